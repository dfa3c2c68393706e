#include "train/checkpoint/safetensors.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

class SafetensorsTest : public testing::Test {
 protected:
  void SetUp() override {
    const fs::path folder = fs::path(testing::TempDir()) /
                            testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder);
    fs::create_directories(folder);
    path_ = (folder / "tensors").string();
  }

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
  ASSERT_TRUE(file->Read("a", a).ok() && file->Read("b", b).ok() && file->Read("c", c).ok());
  EXPECT_EQ(a.ToVector<float>(), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(b.ToVector<double>(), (std::vector<double>{7, 8}));
  EXPECT_EQ(c.ToVector<int32_t>(), (std::vector<int32_t>{-9}));
  EXPECT_TRUE(file->Read("empty", Tensor::Zeros({0, 4}, DType::kFloat32)).ok());
  EXPECT_FALSE(fs::exists(path_ + ".tmp"));
}

TEST_F(SafetensorsTest, IsTheFormatOthersRead) {
  ASSERT_TRUE(WriteSafetensors(path_, {{"x", Tensor::FromVector<float>({1.5f}, {1})}}, {}).ok());
  std::string header = R"({"x":{"data_offsets":[0,4],"dtype":"F32","shape":[1]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(Content(), WithHeader(header, std::string("\x00\x00\xC0\x3F", 4)));
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
        WithHeader(
            R"({"x":{"data_offsets":[0,0],"dtype":"F32","shape":[4294967296,4294967296]}})")}) {
    SetContent(bad);
    EXPECT_EQ(SafetensorsFile::Open(path_).status().code(), absl::StatusCode::kDataLoss) << bad;
  }
  EXPECT_EQ(SafetensorsFile::Open(path_ + "x").status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(SafetensorsFile::Open(fs::path(path_).parent_path().string()).ok());
}

TEST_F(SafetensorsTest, WrongShapesAndNamesAreErrors) {
  ASSERT_TRUE(WriteSample().ok());
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->Read("d", Tensor::Zeros({1}, DType::kFloat32)).code(),
            absl::StatusCode::kNotFound);
  const absl::Status status = file->Read("a", Tensor::Zeros({3, 2}, DType::kFloat32));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "'a' is [2, 3]")) << status;
  EXPECT_FALSE(file->Read("a", Tensor::Zeros({2, 3}, DType::kFloat64)).ok());
}

TEST_F(SafetensorsTest, FullDiskKeepsTheOldFile) {
  ASSERT_TRUE(WriteSample().ok());
  const std::string before = Content();
  // What write(2) meets on a full disk, by way of the largest size a file may have.
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
  EXPECT_FALSE(fs::exists(path_ + ".tmp"));
}

TEST_F(SafetensorsTest, LeftOverTemporaryIsReplaced) {
  std::ofstream(path_ + ".tmp") << std::string(100000, 'x');
  ASSERT_TRUE(WriteSample().ok());
  EXPECT_TRUE(SafetensorsFile::Open(path_).ok());
  EXPECT_FALSE(fs::exists(path_ + ".tmp"));
  EXPECT_FALSE(WriteSafetensors("/nowhere/at/all", {}, {}).ok());
}

}  // namespace
}  // namespace burst
