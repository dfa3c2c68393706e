// Tests safetensors files that are written tensor by tensor, and tensors that are converted while
// they are read.
#include "train/checkpoint/safetensors_writer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/testing/subprocess.h"
#include "train/checkpoint/safetensors.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

class SafetensorsWriterTest : public testing::Test {
 protected:
  void SetUp() override { path_ = FreshTestFolder() + "/tensors"; }

  std::string Content() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // Writes a file with one tensor of two-byte numbers.
  void WriteBits(const std::string& dtype, const std::vector<uint16_t>& bits) const {
    const int64_t n = static_cast<int64_t>(bits.size());
    auto writer = SafetensorsWriter::Create(path_, {{"x", dtype, {n}}}, {}, /*checksums=*/false);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Write(bits.data(), 2 * n).ok());
    ASSERT_TRUE(writer->Commit().ok());
  }

  absl::Status ReadConverted(const Tensor& to, SafetensorsFile::Numbers numbers) const {
    const auto file = SafetensorsFile::Open(path_);
    EXPECT_TRUE(file.ok()) << file.status();
    const NamedTensor named = {"x", to};
    return file->ReadConverted({&named, 1}, numbers);
  }

  std::string path_;
};

constexpr auto kAny = SafetensorsFile::Numbers::kAny;
constexpr auto kFinite = SafetensorsFile::Numbers::kFinite;

// The format has the length, the header in this order, spaces to a multiple of 8 bytes, and the
// data.
TEST_F(SafetensorsWriterTest, BytesOfAFile) {
  auto writer = SafetensorsWriter::Create(
      path_, {{"a", "F32", {1, 2}}, {"none", "F32", {0, 3}}, {"b", "F16", {1}}}, {{"format", "pt"}},
      /*checksums=*/false);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_TRUE(writer->Write("abc", 3).ok());
  EXPECT_TRUE(writer->Write("defgh", 5).ok());
  EXPECT_TRUE(writer->Write("ij", 2).ok());
  EXPECT_FALSE(fs::exists(path_)) << "before it is complete";
  ASSERT_TRUE(writer->Commit().ok());
  std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
      R"("none":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]},)"
      R"("b":{"dtype":"F16","shape":[1],"data_offsets":[8,10]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::string length = {static_cast<char>(header.size() % 256),
                              static_cast<char>(header.size() / 256),
                              0,
                              0,
                              0,
                              0,
                              0,
                              0};
  EXPECT_EQ(Content(), length + header + "abcdefghij");
}

TEST_F(SafetensorsWriterTest, ChecksumsAreThoseOfTheContent) {
  const std::vector<float> a = {1, 2, 3};
  auto writer = SafetensorsWriter::Create(path_, {{"a", "F32", {3}}, {"b", "F32", {1, 3}}},
                                          {{"key", "value"}}, /*checksums=*/true);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(writer->Write(a.data(), 12).ok());
  ASSERT_TRUE(writer->Commit().ok());
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->has_checksums());
  EXPECT_EQ(file->metadata(), StringMap({{"key", "value"}}));
  EXPECT_TRUE(file->Verify(kFinite).ok());
  const std::string whole = Content();
  for (size_t at = whole.size() - 30; at < whole.size(); ++at) {  // the data and the header's end
    std::string damaged = whole;
    damaged[at] ^= 1;
    std::ofstream(path_, std::ios::binary) << damaged;
    const auto opened = SafetensorsFile::Open(path_);
    EXPECT_FALSE(opened.ok() && opened->Verify(kAny).ok()) << at;
  }
}

TEST_F(SafetensorsWriterTest, WithoutCommitThereIsNothing) {
  {
    auto writer = SafetensorsWriter::Create(path_, {{"a", "F32", {1}}}, {}, true);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Write("abcd", 4).ok());
  }
  EXPECT_TRUE(fs::is_empty(fs::path(path_).parent_path()));
  EXPECT_FALSE(SafetensorsWriter::Create(path_ + "/there/is/no/such/folder", {}, {}, true).ok());
}

// The numbers are IEEE 754's binary16, and the upper half of a binary32.
TEST_F(SafetensorsWriterTest, SixteenBitNumbers) {
  const std::vector<uint16_t> halves = {0x0000, 0x3C00, 0xC000, 0x3555, 0x7BFF, 0x0001, 0x83FF};
  const std::vector<double> values = {0, 1, -2, 1365.0 / 4096, 65504., 0x1p-24, -0x1.ff8p-15};
  WriteBits("F16", halves);
  const Tensor wide = Tensor::Zeros({7}, DType::kFloat64),
               single = Tensor::Zeros({7}, DType::kFloat32);
  ASSERT_TRUE(ReadConverted(wide, kFinite).ok());
  ASSERT_TRUE(ReadConverted(single, kFinite).ok());
  EXPECT_EQ(wide.ToVector<double>(), values);
  EXPECT_EQ(single.ToVector<double>(), values);
  WriteBits("BF16", {0x3F80, 0xC000, 0x0001, 0x7F7F});
  const Tensor four = Tensor::Zeros({4}, DType::kFloat64);
  ASSERT_TRUE(ReadConverted(four, kFinite).ok());
  EXPECT_EQ(four.ToVector<double>(), std::vector<double>({1, -2, 0x1p-133, 0x1.fep127}));
}

TEST_F(SafetensorsWriterTest, WhatCannotBeConvertedIsNamed) {
  const auto message = [](const absl::Status& status) { return std::string(status.message()); };
  for (const char* dtype : {"F16", "BF16"}) {
    WriteBits(dtype, {0, static_cast<uint16_t>(dtype[0] == 'F' ? 0x7C00 : 0x7F80)});
    const Tensor two = Tensor::Zeros({2}, DType::kFloat32);
    EXPECT_EQ(ReadConverted(two, kFinite).code(), absl::StatusCode::kDataLoss);
    EXPECT_TRUE(ReadConverted(two, kAny).ok());
    EXPECT_TRUE(std::isinf(two.data<float>()[1]));
    EXPECT_TRUE(absl::StrContains(message(ReadConverted(Tensor::Zeros({3}, DType::kFloat32), kAny)),
                                  "'x' is [2]"));
  }
  WriteBits("I16", {1, 2});
  EXPECT_TRUE(absl::StrContains(message(ReadConverted(Tensor::Zeros({2}, DType::kFloat32), kAny)),
                                "'x' is of the dtype I16"));
}

}  // namespace
}  // namespace burst
