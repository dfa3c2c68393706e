#include "train/checkpoint/safetensors.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "burst/base/parallel.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

class SafetensorsTest : public testing::Test {
 protected:
  void SetUp() override { path_ = FreshTestFolder() + "/tensors"; }

  absl::Status WriteSample() const {
    return WriteSafetensors(path_,
                            {{"a", Tensor::FromVector<float>({1, 2, 3, 4, 5, 6}, {2, 3})},
                             {"b", Tensor::FromVector<double>({7, 8}, {2})},
                             {"empty", Tensor::Zeros({0, 4}, DType::kFloat32)},
                             {"c", Tensor::FromVector<int32_t>({-9}, {1})}},
                            {{"key", "value \"quoted\" \xC3\xA9"}});
  }

  std::string Content() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  void SetContent(const std::string& content) const {
    std::ofstream(path_, std::ios::binary) << content;
  }

  static absl::Status Read(const SafetensorsFile& file, const std::string& name,
                           const Tensor& tensor) {
    return file.Read({{name, tensor}});
  }

  // Counts the files in the file's folder, with the file.
  int64_t FilesBeside() const {
    return std::distance(fs::directory_iterator(fs::path(path_).parent_path()), {});
  }

  // Returns the error of the file, once all of it has been read.
  absl::Status Verify() const {
    const auto file = SafetensorsFile::Open(path_);
    return file.ok() ? file->Verify(SafetensorsFile::Numbers::kAny) : file.status();
  }

  std::string path_;
};

std::string WithHeader(const std::string& header, const std::string& data = "") {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

TEST_F(SafetensorsTest, RoundTrip) {
  ASSERT_TRUE(WriteSample().ok());
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata().at("key"), "value \"quoted\" \xC3\xA9");
  EXPECT_EQ(file->names(), (std::vector<std::string>{"a", "b", "c", "empty"}));
  const Tensor a = Tensor::Zeros({2, 3}, DType::kFloat32), b = Tensor::Zeros({2}, DType::kFloat64),
               c = Tensor::Zeros({1}, DType::kInt32);
  ASSERT_TRUE(Read(*file, "a", a).ok() && Read(*file, "b", b).ok() && Read(*file, "c", c).ok());
  EXPECT_EQ(a.ToVector<float>(), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(b.ToVector<double>(), (std::vector<double>{7, 8}));
  EXPECT_EQ(c.ToVector<int32_t>(), (std::vector<int32_t>{-9}));
  EXPECT_TRUE(Read(*file, "empty", Tensor::Zeros({0, 4}, DType::kFloat32)).ok());
  EXPECT_TRUE(file->has_checksums());
  EXPECT_EQ(file->metadata().size(), 1u) << "checksums are not among the strings";
  EXPECT_EQ(FilesBeside(), 1);
}

// The content is built by hand, except for the checksums.
TEST_F(SafetensorsTest, IsTheFormatOthersRead) {
  ASSERT_TRUE(WriteSafetensors(path_, {{"x", Tensor::FromVector<float>({1.5f}, {1})}}, {}).ok());
  const std::string data("\x00\x00\xC0\x3F", 4);
  const auto hash = [](const std::string& bytes) {
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx",
                  static_cast<unsigned long long>(XXH3_64bits(bytes.data(), bytes.size())));
    return std::string(digits);
  };
  const auto header = [&](const std::string& own) {
    std::string text = R"({"__metadata__":{"xxh3":")" + own + R"(","xxh3:x":")" + hash(data) +
                       R"("},"x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}})";
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text;
  };
  EXPECT_EQ(Content(), WithHeader(header(hash(header(std::string(16, '0')))), data));
}

TEST_F(SafetensorsTest, FilesWithoutChecksumsAreRead) {
  SetContent(WithHeader(R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}})", "1234"));
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_FALSE(file->has_checksums());
  EXPECT_TRUE(Read(*file, "x", Tensor::Zeros({1}, DType::kFloat32)).ok());
}

// The test flips every bit of the file: length, header, padding, checksums and data.
TEST_F(SafetensorsTest, EveryFlippedBitIsFound) {
  ASSERT_TRUE(WriteSample().ok());
  ASSERT_EQ(Verify(), absl::OkStatus());
  const std::string content = Content();
  for (size_t bit = 0; bit < 8 * content.size(); ++bit) {
    const auto put = [&](char byte) {
      std::fstream(path_, std::ios::in | std::ios::out | std::ios::binary).seekp(bit / 8).put(byte);
    };
    put(static_cast<char>(content[bit / 8] ^ (1 << bit % 8)));
    const absl::Status status = Verify();
    put(content[bit / 8]);
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << "bit " << bit << ": " << status;
    ASSERT_TRUE(absl::StrContains(status.message(), path_)) << status;
  }
}

TEST_F(SafetensorsTest, DamagedAndInfiniteTensorsAreNamed) {
  ASSERT_TRUE(WriteSample().ok());
  std::string content = Content();
  content[content.size() - 4 - 16] ^= 1;  // c is at the end, b before it
  SetContent(content);
  const auto damaged = SafetensorsFile::Open(path_);
  ASSERT_TRUE(damaged.ok()) << damaged.status();
  EXPECT_TRUE(Read(*damaged, "a", Tensor::Zeros({2, 3}, DType::kFloat32)).ok());
  const absl::Status status = Read(*damaged, "b", Tensor::Zeros({2}, DType::kFloat64));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(absl::StrContains(status.message(), "checksum of the tensor 'b'")) << status;

  // The change is in every place of tensors of every length: in chunks, at their ends and
  // beginnings.
  for (const int64_t n : {int64_t{1}, int64_t{7}, int64_t{1} << 18, (int64_t{1} << 18) + 3}) {
    for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
      for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf(""), -std::nanf("")}) {
        std::vector<float> values(n, -std::numeric_limits<float>::max());
        const Tensor good = Tensor::FromVector<float>({3e38f, 1e-45f}, {2});
        values[at] = bad;
        ASSERT_TRUE(WriteSafetensors(path_,
                                     {{"good", good},
                                      {"bad", Tensor::FromVector(values, {n})},
                                      {"ints", Tensor::FromVector<int32_t>({0x7F800000}, {1})}},
                                     {})
                        .ok());
        const auto file = SafetensorsFile::Open(path_);
        ASSERT_TRUE(file.ok()) << file.status();
        EXPECT_EQ(file->Verify(SafetensorsFile::Numbers::kAny), absl::OkStatus());
        const absl::Status infinite = file->Verify(SafetensorsFile::Numbers::kFinite);
        EXPECT_EQ(infinite.code(), absl::StatusCode::kDataLoss);
        EXPECT_TRUE(absl::StrContains(infinite.message(), "'bad' holds a number")) << infinite;
      }
    }
  }
}

TEST_F(SafetensorsTest, ThreadsReadTheSameAndFindTheSame) {
  std::vector<NamedTensor> tensors, read;
  for (int i = 0; i < 20; ++i) {
    const Tensor tensor = Tensor::Empty({1 + 30000 * (i % 7)}, DType::kFloat32);
    tensor.Fill(i + 0.5);
    tensors.push_back({std::string(1, static_cast<char>('a' + i)), tensor});
    read.push_back({tensors.back().name, Tensor::ZerosLike(tensor)});
  }
  ASSERT_TRUE(WriteSafetensors(path_, tensors, {}).ok());
  const std::string content = Content();
  const ScopedThreadPool pool(4);
  ASSERT_TRUE(WriteSafetensors(path_, tensors, {}).ok());
  EXPECT_TRUE(Content() == content);
  {
    const auto file = SafetensorsFile::Open(path_);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->Read(read), absl::OkStatus());
    for (int i = 0; i < 20; ++i) {
      EXPECT_TRUE(read[i].tensor.ToVector<float>() == tensors[i].tensor.ToVector<float>()) << i;
    }
  }
  std::string damaged = content;
  damaged[damaged.size() - 1] ^= 1;  // t
  damaged[damaged.size() / 2] ^= 1;
  SetContent(damaged);
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  const absl::Status status = file->Read(read);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(file->Read(read), status) << "always the first of both";
  EXPECT_FALSE(absl::StrContains(status.message(), "'t'")) << status;
}

TEST_F(SafetensorsTest, EveryTruncationIsFound) {
  ASSERT_TRUE(WriteSample().ok());
  const std::string content = Content();
  for (size_t length = 0; length < content.size(); ++length) {
    SetContent(content.substr(0, length));
    const absl::Status status = SafetensorsFile::Open(path_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << length;
    EXPECT_TRUE(absl::StrContains(status.message(), path_)) << status;
  }
  SetContent(content + "x");
  EXPECT_EQ(SafetensorsFile::Open(path_).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(SafetensorsTest, GarbageIsRejected) {
  for (const std::string& bad :
       {std::string(100, '\xFF'), std::string(100, '\0'), std::string("{\"a\": 1}       "),
        WithHeader("[]"), WithHeader("{"), WithHeader(R"({"x":1})"), WithHeader(R"({"x":{}})"),
        WithHeader(R"({"__metadata__":{"k":1}})"),
        WithHeader(R"({"x":{"data_offsets":[0,4],"dtype":"Q4","shape":[1]}})", "1234"),
        WithHeader(R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":[2]}})", "1234"),
        WithHeader(R"({"x":{"data_offsets":[4,0],"dtype":"F32","shape":[1]}})", "1234"),
        WithHeader(R"({"x":{"data_offsets":[-4,0],"dtype":"F32","shape":[1]}})", "1234"),
        WithHeader(R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":[-1]}})", "1234"),
        WithHeader(R"({"x":{"data_offsets":[0],"dtype":"F32","shape":[1]}})", "1234"),
        WithHeader(R"({"x":{"data_offsets":[0,"4"],"dtype":"F32","shape":[1]}})", "1234"),
        WithHeader(R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":1}})", "1234"),
        WithHeader(R"({"x":{"data_offsets":[0,0],"dtype":"F32","shape":[4294967296,4294967296]}})"),
        WithHeader(R"({"x":{"data_offsets":[0,0],"dtype":"F32","shape":)"
                   R"([0,281474976710655,281474976710655]}})"),
        // Overlaps, gaps, and names and keys that occur twice.
        WithHeader(R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]},)"
                   R"("y":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}})",
                   "1234"),
        WithHeader(R"({"x":{"data_offsets":[0,8],"dtype":"F32","shape":[2]},)"
                   R"("y":{"data_offsets":[4,12],"dtype":"F32","shape":[2]}})",
                   "123456789012"),
        WithHeader(R"({"x":{"data_offsets":[4,8],"dtype":"F32","shape":[1]}})", "12345678"),
        WithHeader(R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]},)"
                   R"("x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}})",
                   "1234"),
        WithHeader(R"({"x":{"dtype":"F64","data_offsets":[0,4],"dtype":"F32","shape":[1]}})",
                   "1234"),
        // Checksums without the header's, of no tensor, and of another alphabet.
        WithHeader(R"({"__metadata__":{"xxh3:x":"0000000000000000"},)"
                   R"("x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}})",
                   "1234"),
        WithHeader(R"({"__metadata__":{"xxh3":"0000000000000000"}})"),
        WithHeader(R"({"__metadata__":{"xxh3":""}})"),
        WithHeader(R"({"__metadata__":{"xxh3":")" + std::string(1000, '0') + R"("}})"),
        std::string(8, '\xFF'), std::string("\0\0\0\0\0\0\0\x80", 8),
        WithHeader(R"({"x":)" + std::string(20000000, '[') + std::string(20000000, ']') + "}"),
        WithHeader(std::string(20000000, '['))}) {
    SetContent(bad);
    EXPECT_EQ(SafetensorsFile::Open(path_).status().code(), absl::StatusCode::kDataLoss)
        << bad.substr(0, 200);
  }
}

TEST_F(SafetensorsTest, WrongShapesAndNamesAreErrors) {
  ASSERT_TRUE(WriteSample().ok());
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(Read(*file, "d", Tensor::Zeros({1}, DType::kFloat32)).code(),
            absl::StatusCode::kNotFound);
  const absl::Status status = Read(*file, "a", Tensor::Zeros({3, 2}, DType::kFloat32));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "'a' is [2, 3]")) << status;
  EXPECT_FALSE(Read(*file, "a", Tensor::Zeros({2, 3}, DType::kFloat64)).ok());
}

TEST_F(SafetensorsTest, FullDiskKeepsTheOldFile) {
  ASSERT_TRUE(WriteSample().ok());
  const std::string before = Content();
  // The limit of a file's size makes write(2) fail as on a full disk.
  signal(SIGXFSZ, SIG_IGN);
  rlimit limit, old;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  limit = {300, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const absl::Status status =
      WriteSafetensors(path_, {{"big", Tensor::Zeros({1000}, DType::kFloat32)}}, {});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), path_)) << status;
  EXPECT_EQ(Content(), before);
  EXPECT_EQ(FilesBeside(), 1);
}

TEST_F(SafetensorsTest, WhatCannotBeOpenedIsAnError) {
  const std::string folder = fs::path(path_).parent_path().string();
  EXPECT_EQ(SafetensorsFile::Open(path_ + "x").status().code(), absl::StatusCode::kNotFound);
  fs::create_symlink(folder + "/b", folder + "/a");
  fs::create_symlink(folder + "/a", folder + "/b");
  ASSERT_EQ(mkfifo((folder + "/pipe").c_str(), 0600), 0);
  for (const std::string& path : {folder, folder + "/a", folder + "/pipe"}) {
    const absl::Status status = SafetensorsFile::Open(path).status();
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(absl::StrContains(status.message(), path)) << status;
  }
  EXPECT_FALSE(WriteSafetensors("/nowhere/at/all", {}, {}).ok());
  EXPECT_FALSE(WriteSafetensors(folder + "/a/file", {}, {}).ok());
}

}  // namespace
}  // namespace burst
