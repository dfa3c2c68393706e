// Tests base, device and tensor, on which everything else is built.

#include <gtest/gtest.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>

#include "burst/base/check.h"
#include "burst/base/enum_names.h"
#include "burst/base/json.h"
#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "burst/base/print_error.h"
#include "burst/device/memory.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

enum class Color { kRed, kGreen, kBlue };
constexpr EnumName<Color> kColors[] = {{Color::kRed, "red"}, {Color::kBlue, "blue"}};

TEST(EnumNames, ParseWhatTheyPrint) {
  EXPECT_STREQ(NameOf(Color::kBlue, kColors), "blue");
  EXPECT_STREQ(NameOf(Color::kGreen, kColors), "?");
  EXPECT_EQ(*ParseName("red", kColors), Color::kRed);
  const absl::Status status = ParseName("green", kColors).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "must be one of red, blue; got 'green'");
  EXPECT_EQ(ForSetting<Color>("color", status).status().message(),
            "color: must be one of red, blue; got 'green'");
  EXPECT_EQ(*ForSetting("color", ParseName("blue", kColors)), Color::kBlue);
}

TEST(Json, DepthAndKeysAreLimited) {
  const auto nested = [](int depth) {
    return std::string(depth, '[') + "\"]]\\\"]]\"" + std::string(depth, ']');
  };
  ASSERT_TRUE(ParseJson(nested(kMaxJsonDepth)).ok());
  EXPECT_EQ(ParseJson(nested(kMaxJsonDepth))->dump(), nested(kMaxJsonDepth));
  for (int depth : {kMaxJsonDepth + 1, 10'000'000}) {
    EXPECT_EQ(ParseJson(nested(depth)).status().message(), "the JSON is nested more than 64 deep");
  }
  EXPECT_EQ(ParseJson("{").status().message(), "it is not JSON");
  EXPECT_EQ(ParseJson(R"({"a": {"b": 1, "c": [], "b": 2}})").status().message(),
            "the JSON has the key 'b' twice");
  EXPECT_EQ(ParseJson<nlohmann::ordered_json>(R"({"b":[{"a":1},{"a":2}],"a":0})")->dump(),
            R"({"b":[{"a":1},{"a":2}],"a":0})");
}

// The header has 200,000 tensors. A parser whose time grows as the square would take more than 5
// minutes.
TEST(Json, TimeGrowsAsTheLength) {
  constexpr int kEntries = 200'000;
  std::string text = "{";
  for (int i = 0; i < kEntries; ++i) {
    text += (i == 0 ? "\"t" : ",\"t") + std::to_string(i) +
            R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  }
  text += "}";
  const auto seconds = [] {
    timespec now = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  };
  const double begin = seconds();
  const auto json = ParseJson(text);
  const auto ordered = ParseJson<nlohmann::ordered_json>(text);
  EXPECT_LT(seconds() - begin, 30) << "seconds of this thread, with a sanitizer too";
  ASSERT_TRUE(json.ok() && ordered.ok()) << json.status() << ordered.status();
  EXPECT_EQ(json->size(), size_t{kEntries});
  EXPECT_EQ(ordered->dump(), text);
}

TEST(Json, MemoryIsLimited) {
  std::string zeros = "[0", arrays = "[[]";
  for (int i = 0; i < 17'000'000; ++i) zeros += ",0";
  for (int i = 0; i < 7'000'000; ++i) arrays += ",[]";
  for (std::string* text : {&zeros, &arrays}) {
    *text += "]";
    EXPECT_EQ(ParseJson(*text).status().message(), "the JSON takes more than 512 MiB of memory");
  }
}

TEST(PrintError, ATerminalShowsEveryByteAndObeysNone) {
  EXPECT_EQ(Printable("a \"b\" \\ 'ü€😀'"), "a \"b\" \\ 'ü€😀'");
  EXPECT_EQ(Printable("\x1b]0;owned\x07\n\x7f"), "\\x1b]0;owned\\x07\\n\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "1m"),
            "\\xc2\\x9b1m")
      << "a control character of two bytes";
  EXPECT_EQ(Printable("\xff\xe2\x82 \xed\xa0\x80"), "\\xff\\xe2\\x82 \\xed\\xa0\\x80");
  EXPECT_EQ(Printable(absl::string_view("\0", 1)), "\\x00");
}

// The known answers come from Random123, the authors' implementation (kat_vectors, philox4x32-10).
TEST(PhiloxTest, KnownAnswers) {
  EXPECT_EQ(Philox(0, PhiloxCounter{0, 0, 0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox(~0ull, PhiloxCounter{~0u, ~0u, ~0u, ~0u}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      Philox(0x299f31d0a4093822, PhiloxCounter{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
      (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, NormalMoments) {
  // Over n draws, the standard error of the mean is 1/sqrt(n), of the variance sqrt(2/n), of the
  // fourth moment sqrt(96/n). The test allows five of each.
  const int n = 1 << 20;
  double sum = 0, squares = 0, fourth = 0;
  for (int i = 0; i < n / 4; ++i) {
    const PhiloxCounter bits = Philox(7, 3, i);
    for (const auto& pair : {NormalFromBits(bits[0], bits[1]), NormalFromBits(bits[2], bits[3])}) {
      for (double x : pair) {
        sum += x;
        squares += x * x;
        fourth += x * x * x * x;
      }
    }
  }
  EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(fourth / n, 3, 5 * std::sqrt(96.0 / n));
}

TEST(ParallelTest, CoversEveryItemOnce) {
  for (int threads : {1, 2, 3}) {
    ScopedThreadPool pool(threads);
    EXPECT_EQ(NumThreads(), threads);
    for (int64_t n : {0, 1, 2, 5, 1000}) {
      for (int64_t grain : {1, 7, 5000}) {
        std::vector<std::atomic<int>> visits(n);
        ParallelFor(n, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++visits[i];
        });
        ParallelTasks(n, [&](int64_t i) { ++visits[i]; });
        for (int64_t i = 0; i < n; ++i) EXPECT_EQ(visits[i], 2);
      }
    }
  }
  EXPECT_EQ(NumThreads(), 1);
}

TEST(ParallelTest, NestedLoopsRunInline) {
  ScopedThreadPool pool(2);
  std::atomic<int> items{0};
  ParallelFor(2, 1, [&](int64_t, int64_t) {
    EXPECT_EQ(NumThreads(), 1);
    ParallelFor(10, 1, [&](int64_t begin, int64_t end) { items += end - begin; });
  });
  EXPECT_EQ(items, 20);
}

TEST(ParallelTest, PoolsOfRanksAreIndependent) {
  std::vector<std::thread> ranks;
  std::atomic<int64_t> total{0};
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&] {
      ScopedThreadPool pool(2);
      for (int i = 0; i < 200; ++i) {
        ParallelFor(64, 1, [&](int64_t begin, int64_t end) { total += end - begin; });
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(total, 3 * 200 * 64);
}

// An exception of a body on any worker reaches the caller, once no worker runs. Then the pool can
// be used again.
TEST(ParallelTest, ExceptionsReachTheCaller) {
  const ScopedThreadPool pool(4);
  for (int thrower = 0; thrower < 4; ++thrower) {
    std::atomic<int> running{0}, ended{0};
    const auto body = [&](int64_t worker) {
      ++running;
      std::this_thread::sleep_for(std::chrono::milliseconds(worker == thrower ? 0 : 5));
      ++ended;
      if (worker == thrower) throw std::runtime_error("worker " + std::to_string(worker));
    };
    try {
      ParallelFor(4, 1, [&](int64_t begin, int64_t) { body(begin); });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "worker " + std::to_string(thrower));
    }
    EXPECT_EQ(running, 4);
    EXPECT_EQ(ended, 4);
    EXPECT_EQ(NumThreads(), 4);
    EXPECT_THROW(ParallelTasks(16,
                               [&](int64_t task) {
                                 if (task % 4 == thrower) throw std::bad_alloc();
                               }),
                 std::bad_alloc);
    std::atomic<int64_t> items{0};
    ParallelFor(100, 1, [&](int64_t begin, int64_t end) { items += end - begin; });
    EXPECT_EQ(items, 100);
  }
}

TEST(ParallelTest, FailedChecksOfWorkersReachALibrarysCaller) {
  const ScopedThreadPool pool(3);
  const ScopedFatalErrors library;
  std::atomic<int> threw{0};
  EXPECT_THROW(ParallelFor(3, 1,
                           [&](int64_t begin, int64_t) {
                             EXPECT_TRUE(ScopedFatalErrors::active());
                             ++threw;
                             BURST_CHECK(begin < 0) << "of worker " << begin;
                           }),
               FatalError);
  EXPECT_EQ(threw, 3);
}

TEST(MemoryTest, CountsWhatIsInUse) {
  const MemoryStats before = GetMemoryStats(DeviceType::kCpu);
  ResetPeakMemory(DeviceType::kCpu);
  {
    const Tensor a = Tensor::Empty({1000, 1000}, DType::kFloat32);
    const MemoryStats during = GetMemoryStats(DeviceType::kCpu);
    EXPECT_GE(during.bytes_in_use - before.bytes_in_use, 4000000);
    EXPECT_LE(during.bytes_in_use - before.bytes_in_use, 4000000 * 9 / 8);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.raw_data()) % 64, 0u);
  }
  const MemoryStats after = GetMemoryStats(DeviceType::kCpu);
  EXPECT_EQ(after.bytes_in_use, before.bytes_in_use);
  EXPECT_GE(after.peak_bytes, before.bytes_in_use + 4000000);
}

Tensor Iota(const Shape& shape) {
  Tensor tensor = Tensor::Empty(shape, DType::kFloat32);
  std::iota(tensor.data<float>(), tensor.data<float>() + tensor.numel(), 0.f);
  return tensor;
}

TEST(TensorTest, SlicesShareMemoryAndCloneCopies) {
  const Tensor a = Iota({2, 3, 4});
  const Tensor slice = a.Slice(1, 1, 2).Slice(-1, 2, 2);
  EXPECT_FALSE(slice.is_contiguous());
  EXPECT_EQ(slice.ToVector<double>(), (std::vector<double>{6, 7, 10, 11, 18, 19, 22, 23}));
  const Tensor copy = slice.Clone();
  slice.CopyFrom(Tensor::Zeros({2, 2, 2}, DType::kFloat32));
  EXPECT_EQ(a.ToVector<float>()[6], 0);
  EXPECT_EQ(a.ToVector<float>()[5], 5);
  EXPECT_EQ(copy.ToVector<int32_t>()[0], 6);
}

TEST(TensorTest, SlicesMayStep) {
  const Tensor a = Tensor::FromVector<float>({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {5, 2});
  const Tensor even = a.Slice(0, 0, 3, 2), odd = a.Slice(0, 1, 2, 2);
  EXPECT_EQ(even.ToVector<float>(), (std::vector<float>{0, 1, 4, 5, 8, 9}));
  odd.CopyFrom(even.Slice(0, 0, 2));
  EXPECT_EQ(a.ToVector<float>(), (std::vector<float>{0, 1, 0, 1, 4, 5, 4, 5, 8, 9}));
  EXPECT_DEATH(a.Slice(0, 1, 3, 2), "slice 1 \\+ 3 x 2");
}

TEST(TensorTest, ViewKeepsOrder) {
  const Tensor a = Iota({2, 6});
  EXPECT_EQ(a.View({3, -1}).shape(), (Shape{3, 4}));
  EXPECT_EQ(a.View({12}).ToVector<float>(), a.ToVector<float>());
  EXPECT_DEATH(a.Slice(1, 0, 3).View({6}), "strided");
  EXPECT_DEATH(a.View({5}), "viewed as");
}

TEST(TensorTest, ArithmeticAndConversion) {
  const Tensor a = Iota({5});
  a.Add(a.Clone());
  a.Scale(0.5);
  EXPECT_EQ(a.ToVector<float>(), (std::vector<float>{0, 1, 2, 3, 4}));
  EXPECT_EQ(a.To(DType::kFloat64).dtype(), DType::kFloat64);
  EXPECT_EQ(a.To(DType::kFloat64).ToVector<float>(), a.ToVector<float>());
  EXPECT_DEATH(a.data<double>(), "float32");
}

TEST(TensorTest, EmptyDimensions) {
  const Tensor a = Tensor::Zeros({2, 0, 3}, DType::kFloat64);
  EXPECT_EQ(a.numel(), 0);
  a.Clone().Add(a);
  EXPECT_TRUE(a.ToVector<double>().empty());
}

}  // namespace
}  // namespace burst
