#include "train/data/corpus.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "train/data/shards.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using Kind = Tokenizer::Kind;

class CorpusTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }

  std::string Write(const std::string& name, const std::string& content) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return Path(name);
  }

  std::string WriteShard(const std::string& name, const std::vector<uint16_t>& tokens,
                         int32_t magic = 20240520, int32_t version = 1, int64_t extra = 0) const {
    std::vector<int32_t> header(256);
    header[0] = magic, header[1] = version;
    header[2] = static_cast<int32_t>(static_cast<int64_t>(tokens.size()) + extra);
    std::string content(reinterpret_cast<const char*>(header.data()), 1024);
    content.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
    return Write(name, content);
  }

  absl::StatusOr<TrainingData> Load(const std::string& data, const std::string& validation,
                                    std::optional<Kind> tokenizer) const {
    return LoadTrainingData(data, validation, tokenizer, Path("cache"));
  }

  fs::path folder_;
};

std::vector<int32_t> All(const TokenSpan& span) {
  std::vector<int32_t> tokens(span.size());
  EXPECT_EQ(span.corpus->Read(span.begin, span.size(), tokens.data()), absl::OkStatus());
  return tokens;
}

std::vector<int64_t> Starts(const TokenSpan& span) {
  std::vector<int64_t> starts;
  EXPECT_EQ(span.corpus->DocumentStarts(span.begin, span.end, &starts), absl::OkStatus());
  return starts;
}

void ExpectError(const absl::StatusOr<TrainingData>& data, std::vector<std::string> parts) {
  ASSERT_FALSE(data.ok());
  for (const std::string& part : parts) {
    EXPECT_TRUE(absl::StrContains(data.status().message(), part)) << part << "\n" << data.status();
  }
}

TEST_F(CorpusTest, LastTenthOfATextValidates) {
  const auto data = Load(Write("a.txt", "abcdefghijklmnopqrst"), "", Kind::kByte);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->tokenizer->Decode(All(data->train)), "abcdefghijklmnopqr");
  EXPECT_EQ(data->tokenizer->Decode(All(data->validation)), "st");
  EXPECT_EQ(data->vocab, 256);
  EXPECT_FALSE(data->has_documents);
}

TEST_F(CorpusTest, CharactersOfBothTextsMakeTheVocabulary) {
  const auto data = Load(Write("a.txt", "abcab"), Write("b.txt", "axy\xC3\xA9"), std::nullopt);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->vocab, 6);
  EXPECT_EQ(data->train.size(), 5);
  EXPECT_EQ(All(data->validation), (std::vector<int32_t>{0, 3, 4, 5}));
}

TEST_F(CorpusTest, BlankLinesSeparateDocuments) {
  const std::string text = "\n\none\ntwo\n\n  \nthree\n\nfour";
  const auto data = Load(Write("a.txt", text), Write("b.txt", "one"), Kind::kByte);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->tokenizer->Decode(All(data->train)), text) << "no token is added or lost";
  EXPECT_EQ(Starts(data->train), (std::vector<int64_t>{0, static_cast<int64_t>(text.find("three")),
                                                       static_cast<int64_t>(text.find("four"))}));
  EXPECT_TRUE(data->has_documents);
}

TEST_F(CorpusTest, FilesOfAFolderAreDocumentsInOrder) {
  Write("docs/b.txt", "bb\n\nb");
  Write("docs/a.txt", "aa");
  Write("docs/sub/c.txt", "c");
  Write("docs/empty.txt", "");
  Write("docs/.hidden", "never");
  const auto data = Load(Path("docs"), Write("val.txt", "ab"), Kind::kByte);
  ASSERT_TRUE(data.ok()) << data.status();
  const int32_t end = data->tokenizer->end_of_text();
  EXPECT_EQ(end, 256);
  EXPECT_EQ(All(data->train),
            (std::vector<int32_t>{'a', 'a', end, 'b', 'b', '\n', '\n', 'b', end, 'c', end}));
  EXPECT_EQ(Starts(data->train), (std::vector<int64_t>{0, 3, 9}));
}

TEST_F(CorpusTest, ShardsAreOneStream) {
  std::vector<uint16_t> first(30), second(50);
  std::iota(first.begin(), first.end(), 100);
  std::iota(second.begin(), second.end(), 200);
  first[0] = second[7] = kGpt2EndOfText;
  WriteShard("train_000001.bin", second);
  WriteShard("train_000000.bin", first);
  const auto data = Load(Path("train_*.bin"), "", std::nullopt);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->train.size(), 72);
  EXPECT_EQ(data->validation.size(), 8);
  EXPECT_EQ(data->vocab, kGpt2Vocab);
  EXPECT_FALSE(data->tokenizer.has_value());
  std::vector<int32_t> across(4);
  EXPECT_EQ(data->train.corpus->Read(28, 4, across.data()), absl::OkStatus());
  EXPECT_EQ(across, (std::vector<int32_t>{128, 129, 200, 201}));
  EXPECT_EQ(Starts(data->train), (std::vector<int64_t>{0, 37}));
  EXPECT_TRUE(data->has_documents);
}

TEST_F(CorpusTest, TokensBeyondTheVocabularyAreFound) {
  std::vector<uint16_t> tokens(100, 5);
  tokens[41] = 50257;
  const std::string path = WriteShard("a.bin", tokens);
  const auto data = Load(path, "", std::nullopt);
  ASSERT_TRUE(data.ok()) << data.status();
  const absl::Status status = data->train.corpus->CheckVocab(50257);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  for (const char* part : {path.c_str(), "50257", "41"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
  }
  EXPECT_TRUE(data->train.corpus->CheckVocab(50258).ok());
}

TEST_F(CorpusTest, BadShards) {
  const std::vector<uint16_t> tokens(100, 5);
  const auto load = [&](const std::string& path) { return Load(path, "", std::nullopt); };
  ExpectError(load(WriteShard("magic.bin", tokens, 1234)),
              {"--data", "magic.bin", "1234", "20240520"});
  ExpectError(load(WriteShard("version.bin", tokens, 20240520, 7)), {"version.bin", "version 7"});
  ExpectError(load(WriteShard("short.bin", tokens, 20240520, 1, 1)), {"short.bin", "truncated"});
  ExpectError(load(WriteShard("long.bin", tokens, 20240520, 1, -1)), {"long.bin", "wrong length"});
  ExpectError(load(WriteShard("negative.bin", tokens, 20240520, 1, -200)), {"negative.bin"});
  ExpectError(load(WriteShard("none.bin", {})), {"no tokens"});
  ExpectError(load(Write("header.bin", std::string(1023, '\0'))), {"header.bin", "1023"});
  ExpectError(load(Write("empty.bin", "")), {"empty.bin", "0 bytes"});
  ExpectError(Load(WriteShard("good.bin", tokens), "", Kind::kByte), {"--tokenizer"});
  ExpectError(Load(Path("good.bin"), Write("a.txt", "text"), std::nullopt),
              {"--val_data", "same kind"});
  ExpectError(Load(Path("good.bin"), Path("magic.bin"), std::nullopt), {"--val_data", "magic.bin"});
}

TEST_F(CorpusTest, BadTexts) {
  const auto load = [&](const std::string& path) { return Load(path, "", std::nullopt); };
  ExpectError(load(Path("missing.txt")), {"--data", "missing.txt"});
  ExpectError(load(Write("empty.txt", "")), {"--data", "empty.txt", "is empty"});
  ExpectError(load(Write("latin1.txt", "caf\xE9")), {"--data", "latin1.txt", "byte 3", "UTF-8"});
  fs::create_directories(Path("folder"));
  ExpectError(load(Path("folder")), {"--data", "holds no files"});
  Write("folder/empty.txt", "");
  ExpectError(load(Path("folder")), {"empty"});
  Write("folder/a.bin", "x");
  ExpectError(load(Path("folder")), {"--data", "mixes"});
  ExpectError(Load(Write("a.txt", "abc"), Path("missing"), std::nullopt),
              {"--val_data", "missing"});
  EXPECT_TRUE(Load(Path("latin1.txt"), "", Kind::kByte).ok());
}

}  // namespace
}  // namespace burst
