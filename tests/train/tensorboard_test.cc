#include "train/report/tensorboard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

std::string FreshFolder(const std::string& name) {
  const std::string folder = testing::TempDir() + "/" + name;
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

std::string OnlyFile(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  EXPECT_EQ(files.size(), 1u);
  return files.empty() ? "" : files[0];
}

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
T At(const std::string& bytes, size_t offset) {
  T value{};
  if (offset + sizeof(T) <= bytes.size()) std::memcpy(&value, &bytes[offset], sizeof(T));
  return value;
}

// Computes CRC-32C by its definition, the division of polynomials over GF(2), bit by bit from the
// top.
uint32_t Crc32cByDivision(const std::string& bytes) {
  uint32_t remainder = 0xffffffff;
  for (const char c : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      const uint32_t top = (remainder >> 31) ^ (static_cast<uint8_t>(c) >> bit & 1);
      remainder = remainder << 1 ^ (top != 0 ? 0x1EDC6F41 : 0);
    }
  }
  uint32_t reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (remainder >> bit & 1) << (31 - bit);
  return ~reversed;
}

uint32_t Masked(const std::string& bytes) {
  const uint32_t crc = Crc32cByDivision(bytes);
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

// Returns the fields of a message as bytes, also of varints.
std::multimap<int, std::string> Fields(const std::string& message) {
  std::multimap<int, std::string> fields;
  size_t i = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0; i < message.size(); shift += 7) {
      const uint8_t byte = static_cast<uint8_t>(message[i++]);
      value |= uint64_t{byte & 127u} << shift;
      if (byte < 128) break;
    }
    return value;
  };
  while (i < message.size()) {
    const uint64_t key = varint();
    const size_t begin = i;
    size_t length = 0;
    switch (key & 7) {
      case 0:
        fields.emplace(static_cast<int>(key >> 3), std::to_string(varint()));
        continue;
      case 1:
        length = 8;
        break;
      case 2:
        length = varint();
        fields.emplace(static_cast<int>(key >> 3), message.substr(i, length));
        i += length;
        continue;
      case 5:
        length = 4;
        break;
      default:
        ADD_FAILURE() << "wire type " << (key & 7);
        return fields;
    }
    fields.emplace(static_cast<int>(key >> 3), message.substr(begin, length));
    i = begin + length;
  }
  return fields;
}

// Returns the events of a file, and expects right checksums.
std::vector<std::multimap<int, std::string>> Events(const std::string& file) {
  std::vector<std::multimap<int, std::string>> events;
  for (size_t i = 0; i < file.size();) {
    const uint64_t length = At<uint64_t>(file, i);
    EXPECT_EQ(At<uint32_t>(file, i + 8), Masked(file.substr(i, 8)));
    if (length > file.size()) return ADD_FAILURE(), events;
    const std::string event = file.substr(i + 12, length);
    EXPECT_EQ(At<uint32_t>(file, i + 12 + length), Masked(event));
    events.push_back(Fields(event));
    i += 16 + length;
  }
  return events;
}

std::string Only(const std::multimap<int, std::string>& fields, int number) {
  EXPECT_EQ(fields.count(number), 1u) << number;
  return fields.count(number) == 0 ? "" : fields.find(number)->second;
}

// Returns the values of a summary by tag.
std::map<std::string, float> Scalars(const std::multimap<int, std::string>& event) {
  std::map<std::string, float> scalars;
  const auto values = Fields(Only(event, 5));
  for (const auto& [number, value] : values) {
    EXPECT_EQ(number, 1);
    const auto fields = Fields(value);
    scalars[Only(fields, 1)] = At<float>(Only(fields, 2), 0);
  }
  return scalars;
}

StepMetrics Row(int64_t step) {
  StepMetrics row;
  row.step = step;
  row.loss = 1.5;
  row.lr = 0.25;
  row.grad_norm = 3;
  row.tokens_per_second = 4096;
  row.step_ms = 12.5;
  return row;
}

// RFC 3720, appendix B.4, publishes the values.
TEST(Crc32c, ByDivisionIsThePublishedOne) {
  EXPECT_EQ(Crc32cByDivision(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32cByDivision(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(TensorBoard, StepsAreScalars) {
  const std::string folder = FreshFolder("scalars");
  auto log = TensorBoardLog::Create(folder, 0);
  ASSERT_TRUE(log.ok()) << log.status();
  StepMetrics second = Row(300);
  second.val_loss = 2.5;
  second.pipeline_bubble = 0.5;
  second.loss = std::nan("");
  ASSERT_TRUE(log->Append(Row(1)).ok());
  ASSERT_TRUE(log->Append(second).ok());
  StepMetrics validated = Row(301);
  validated.val_loss_ema = 0.75;
  ASSERT_TRUE(log->AppendValidation(validated).ok());

  const std::string path = OnlyFile(folder);
  EXPECT_TRUE(absl::StrContains(path, "/events.out.tfevents.")) << path;
  const std::string file = Read(path);  // while the log is still open
  // Every event file of TensorFlow begins with a record of 24 bytes and their checksum.
  EXPECT_EQ(file.substr(0, 12), std::string("\x18\0\0\0\0\0\0\0\xa3\x7fK\"", 12));
  const auto events = Events(file);
  ASSERT_EQ(events.size(), 6u);
  EXPECT_EQ(Only(events[0], 3), "brain.Event:2");
  for (const auto& event : events) EXPECT_GT(At<double>(Only(event, 1), 0), 1.6e9) << "seconds";

  EXPECT_EQ(Only(events[1], 2), "1");
  EXPECT_EQ(Scalars(events[1]), (std::map<std::string, float>{{"loss/train", 1.5f},
                                                              {"lr", 0.25f},
                                                              {"grad_norm", 3},
                                                              {"tokens_per_second", 4096},
                                                              {"step_ms", 12.5f}}));
  EXPECT_EQ(Only(events[2], 2), "300");
  EXPECT_TRUE(std::isnan(Scalars(events[2])["loss/train"]));
  EXPECT_EQ(Only(events[3], 2), "300");
  EXPECT_EQ(Scalars(events[3]), (std::map<std::string, float>{{"pipeline_bubble", 0.5f}}));
  EXPECT_EQ(Only(events[4], 2), "300");
  EXPECT_EQ(Scalars(events[4]), (std::map<std::string, float>{{"loss/validation", 2.5f}}));
  EXPECT_EQ(Only(events[5], 2), "301");
  EXPECT_EQ(Scalars(events[5]), (std::map<std::string, float>{{"loss/validation_ema", 0.75f}}));
}

// From the step at which a session starts, TensorBoard drops the events of earlier files.
TEST(TensorBoard, AResumedRunStartsASession) {
  const std::string folder = FreshFolder("resumed");
  ASSERT_TRUE(TensorBoardLog::Create(folder, 200).ok());
  const auto events = Events(Read(OnlyFile(folder)));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(Only(events[1], 2), "201");
  EXPECT_EQ(Only(Fields(Only(events[1], 7)), 1), "1");
}

TEST(TensorBoard, AFolderThatIsNotThereIsNamed) {
  const auto log = TensorBoardLog::Create("/nowhere", 0);
  ASSERT_FALSE(log.ok());
  EXPECT_TRUE(absl::StrContains(log.status().message(), "/nowhere/events")) << log.status();
}

}  // namespace
}  // namespace burst
