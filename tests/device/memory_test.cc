// Tests memory that belongs to another program, and errors that must not end that program.
#include "burst/device/memory.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "burst/base/check.h"
#include "burst/device/small_blocks.h"
#include "burst/tensor/tensor.h"
#include "tests/testing/sanitizers.h"

namespace burst {
namespace {

class Counting : public MemorySource {
 public:
  void* Allocate(size_t bytes) override {
    if (bytes > limit) return nullptr;
    return *live.insert(std::aligned_alloc(64, (bytes + 63) / 64 * 64)).first;
  }
  void Free(void* data) override {
    EXPECT_EQ(live.erase(data), 1u);
    std::free(data);
  }

  std::set<void*> live;
  size_t limit = 1 << 20;
};

TEST(MemorySource, ServesItsThreadItsDeviceAndItsScope) {
  Counting source;
  const Tensor before = Tensor::Zeros({8}, DType::kFloat32);
  Tensor inside;
  {
    const ScopedMemorySource scope(&source);
    inside = Tensor::Zeros({8}, DType::kFloat32);
    EXPECT_EQ(source.live.count(inside.raw_data()), 1u);
    {
      // The source belongs to another device. Memory that passes through the host comes from the
      // pool.
      const ScopedMemorySource other(&source, DeviceType::kCuda);
      const Tensor on_host = Tensor::Zeros({8}, DType::kFloat32);
      EXPECT_EQ(source.live.size(), 1u);
    }
    {
      const ScopedMemorySource pool(nullptr);
      const Tensor of_pool = Tensor::Zeros({8}, DType::kFloat32);
      EXPECT_EQ(source.live.size(), 1u);
    }
    Tensor::EmptyLike(before);  // freed at once
    EXPECT_EQ(source.live.size(), 1u);
  }
  const Tensor after = Tensor::Zeros({8}, DType::kFloat32);
  EXPECT_EQ(source.live.size(), 1u);
  inside = Tensor();  // goes back to its source
  EXPECT_TRUE(source.live.empty());
}

TEST(SmallBlocks, AreKeptAndLargeOnesAreNot) {
  Counting source;
  source.limit = 4 * SmallBlocks::kLargest;
  {
    SmallBlocks blocks(&source);
    void* const first = blocks.Allocate(1000);
    void* const second = blocks.Allocate(1000);
    EXPECT_NE(first, second);
    blocks.Free(first);
    EXPECT_EQ(blocks.Allocate(600), first);  // both take 1,024 bytes
    blocks.Free(first);
    void* const larger = blocks.Allocate(1025);
    EXPECT_NE(larger, first);
    EXPECT_EQ(source.live.size(), 3u);
    void* const largest = blocks.Allocate(SmallBlocks::kLargest);
    void* const too_large = blocks.Allocate(SmallBlocks::kLargest + 1);
    EXPECT_EQ(source.live.size(), 5u);
    blocks.Free(too_large);
    EXPECT_EQ(source.live.size(), 4u);
    for (void* block : {second, larger, largest}) blocks.Free(block);
    EXPECT_EQ(source.live.size(), 4u);
    source.limit = 0;  // kept blocks still exist
    EXPECT_EQ(blocks.Allocate(SmallBlocks::kLargest), largest);
    EXPECT_EQ(blocks.Allocate(SmallBlocks::kLargest), nullptr);
    blocks.Free(largest);
  }
  EXPECT_TRUE(source.live.empty());
}

TEST(FatalErrors, AreThrownWhereTheProgramMustNotEnd) {
  EXPECT_FALSE(ScopedFatalErrors::active());
  {
    const ScopedFatalErrors scope;
    EXPECT_TRUE(ScopedFatalErrors::active());
    EXPECT_THROW(BURST_CHECK_EQ(1, 2) << "one is not two", FatalError);
    Counting source;
    source.limit = 100;
    const ScopedMemorySource memory(&source);
    try {
      Tensor::Empty({1000}, DType::kFloat32);
      ADD_FAILURE() << "there was memory";
    } catch (const FatalError& error) {
      EXPECT_TRUE(error.out_of_memory) << error.what();
    }
    EXPECT_TRUE(source.live.empty());
  }
  EXPECT_FALSE(ScopedFatalErrors::active());
}

// A request for more than any machine has is an error of memory, and leaves the counts as before.
TEST(OutOfMemory, LeavesTheCountsAsTheyWere) {
  if (kAddressSanitizer || kThreadSanitizer) GTEST_SKIP() << "its allocator ends the process";
  const MemoryStats before = GetMemoryStats(DeviceType::kCpu);
  {
    const ScopedFatalErrors scope;
    try {
      Tensor::Empty({int64_t{1} << 50}, DType::kFloat32);
      ADD_FAILURE() << "there was memory";
    } catch (const FatalError& error) {
      EXPECT_TRUE(error.out_of_memory);
      EXPECT_NE(std::string(error.what()).find("out of memory: 4503599627370496 more bytes"),
                std::string::npos)
          << error.what();
    }
  }
  const MemoryStats after = GetMemoryStats(DeviceType::kCpu);
  EXPECT_EQ(after.bytes_in_use, before.bytes_in_use);
  EXPECT_EQ(after.peak_bytes, before.peak_bytes);
  // A program ends with a sentence and exit code 1, not with a failed check.
  EXPECT_EXIT(Tensor::Empty({int64_t{1} << 50}, DType::kFloat32), testing::ExitedWithCode(1),
              "^error: out of memory: ");
}

TEST(Borrow, IsAViewOfMemoryThatIsNotItsOwn) {
  float numbers[6] = {0, 1, 2, 3, 4, 5};
  {
    const Tensor transposed =
        Tensor::Borrow(numbers, {3, 2}, {1, 3}, DType::kFloat32, DeviceType::kCpu);
    EXPECT_EQ(transposed.ToVector<float>(), (std::vector<float>{0, 3, 1, 4, 2, 5}));
    transposed.Slice(0, 0, 1).CopyFrom(Tensor::FromVector<float>({7, 8}, {1, 2}));
  }
  EXPECT_EQ(numbers[0], 7);
  EXPECT_EQ(numbers[3], 8);
}

}  // namespace
}  // namespace burst
