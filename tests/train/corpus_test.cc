#include "train/data/corpus.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "train/data/batch.h"
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

// A run continues only with the data that it began with. One changed token is other data.
TEST_F(CorpusTest, ADigestIsOfAllTokens) {
  const auto digest = [&](const std::string& path, std::optional<Kind> kind = std::nullopt) {
    const auto data = Load(path, "", kind);
    EXPECT_TRUE(data.ok()) << data.status();
    return data.ok() ? data->train.corpus->digest() : 0;
  };
  std::string text;
  while (text.size() < 1'000'000) text += "line " + std::to_string(text.size()) + " of a text\n";
  const uint64_t of_text = digest(Write("a.txt", text));
  EXPECT_EQ(digest(Write("b.txt", text)), of_text) << "a copy";
  EXPECT_NE(digest(Path("a.txt"), Kind::kByte), of_text);
  for (const size_t at : {size_t{0}, size_t{333'337}, text.size() - 1}) {
    std::string other = text;
    other[at] = 'x';
    EXPECT_NE(digest(Write("c.txt", other)), of_text) << at;
  }
  EXPECT_NE(digest(Write("d.txt", "abcabc")), digest(Write("e.txt", "xyzxyz"))) << "same numbers";

  std::vector<uint16_t> tokens(3'000'000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint16_t>(i * 7919 % 50257);
  const uint64_t of_shard = digest(WriteShard("a.bin", tokens));
  EXPECT_EQ(digest(WriteShard("b.bin", tokens)), of_shard);
  for (const size_t at : {size_t{0}, size_t{1'234'567}, tokens.size() - 1}) {
    std::vector<uint16_t> other = tokens;
    other[at] ^= 1;
    EXPECT_NE(digest(WriteShard("c.bin", other)), of_shard) << at;
  }
  std::swap(tokens[0], tokens[2'000'000]);
  EXPECT_NE(digest(WriteShard("c.bin", tokens)), of_shard);
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

// The last tenths of shards are joined for validation. The first token of the second one does not
// end the first one's document, even if it is a separator.
TEST_F(CorpusTest, NoTargetCrossesBetweenThePartsOfAMixture) {
  std::vector<uint16_t> tokens(40, 7);
  tokens[38] = kGpt2EndOfText;
  const std::string a = WriteShard("a.bin", tokens);
  tokens[36] = kGpt2EndOfText;
  const std::string b = WriteShard("b.bin", tokens);
  const auto data = Load(a + ":1," + b + ":1", "", std::nullopt);
  ASSERT_TRUE(data.ok()) << data.status();
  const std::vector<int32_t> read = All(data->validation);
  const int32_t end = kGpt2EndOfText;
  ASSERT_EQ(read, (std::vector<int32_t>{7, 7, end, 7, end, 7, end, 7}));
  const auto sampler = SequenceSampler::Create(data->validation, {7, 1, /*packed=*/true});
  ASSERT_TRUE(sampler.ok()) << sampler.status();
  EXPECT_EQ(sampler->Evaluation(0, 1, 1)->targets,
            (std::vector<int32_t>{7, end, 7, -1, 7, end, 7}));
}

// The parts of a mixture are one corpus. Each leaves its own last tenth for validation.
TEST_F(CorpusTest, MixturesAreJoined) {
  const std::string a = Write("a.txt", "abcdefgh\n\nij"), b = Write("b.txt", "0123456789");
  const auto data = Load(a + ":0.25," + b + ":2", "", Kind::kByte);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(Tokenizer::Byte(false).Decode(All(data->train)), "abcdefgh\n\n012345678");
  EXPECT_EQ(Tokenizer::Byte(false).Decode(All(data->validation)), "ij9");
  EXPECT_TRUE(data->has_documents);
  ASSERT_EQ(data->train.mixture.size(), 2u);
  EXPECT_EQ(data->train.mixture[1].begin, 10);
  EXPECT_EQ(data->train.mixture[1].end, 19);
  EXPECT_EQ(data->train.mixture[1].weight, 2);
  std::vector<int64_t> starts;
  ASSERT_TRUE(data->train.corpus->DocumentStarts(0, 19, &starts).ok());
  EXPECT_EQ(starts, (std::vector<int64_t>{0, 10}));
  const auto other = Load(a + ":0.5," + b + ":2", "", Kind::kByte);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_NE(other->train.corpus->digest(), data->train.corpus->digest()) << "other weights";
  const auto given = Load(a + ":1," + b + ":2", b, Kind::kByte);
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_EQ(given->train.size(), 22);
  EXPECT_EQ(given->validation.size(), 10);
  ExpectError(Load(a + ":0," + b + ":1", "", Kind::kByte), {"--data", "must be positive"});
  ExpectError(Load(a + ":1," + Path("missing") + ":1", "", Kind::kByte), {"--data", "missing"});
  ExpectError(Load(a + ":1," + Write("c.jsonl", "{\"text\": \"a\"}") + ":1", "", Kind::kByte),
              {"--data", "c.jsonl", "same kind"});
  // A file may have such a name.
  EXPECT_TRUE(Load(Write("d.txt:1", "a file of its own"), "", Kind::kByte).ok());
}

// Documents of lines of JSON are their texts, each with an end, for any tokenizer.
TEST_F(CorpusTest, LinesOfJsonAreDocuments) {
  const std::string path = Write("docs.jsonl",
                                 "{\"text\": \"ab\", \"id\": 1}\n\n{\"text\": \"\"}\n"
                                 "{\"id\": [2], \"text\": \"b\\u00e9\\n\\nc\"}");
  const auto chars = LoadTrainingData(path, path, std::nullopt, Path("cache"));
  ASSERT_TRUE(chars.ok()) << chars.status();
  EXPECT_EQ(chars->tokenizer->kind(), Kind::kChar);
  EXPECT_EQ(chars->vocab, 6);  // line break, a, b, c, e with an accent, end of text
  EXPECT_EQ(chars->end_of_text, 5);
  EXPECT_EQ(All(chars->train), (std::vector<int32_t>{1, 2, 5, 5, 2, 4, 0, 0, 3, 5}));
  std::vector<int64_t> starts;
  ASSERT_TRUE(chars->train.corpus->DocumentStarts(0, 10, &starts).ok());
  EXPECT_EQ(starts, (std::vector<int64_t>{0, 3, 4}));
  EXPECT_TRUE(chars->has_documents);
  const auto bytes = LoadTrainingData(path, path, Kind::kByte, Path("cache"));
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(All(bytes->train),
            (std::vector<int32_t>{'a', 'b', 256, 256, 'b', 0xC3, 0xA9, '\n', '\n', 'c', 256}));
  // The case has another key, and the characters that a model was trained on.
  const std::string body = Write("body.jsonl", "{\"body\": \"cab\"}\n");
  ExpectError(LoadTrainingData(body, "", std::nullopt, Path("cache")), {"body.jsonl", "'text'"});
  const auto known =
      LoadTrainingData(body, body, std::nullopt, Path("cache"), &*chars->tokenizer, {"body"});
  ASSERT_TRUE(known.ok()) << known.status();
  EXPECT_EQ(All(known->train), (std::vector<int32_t>{3, 1, 2, 5}));
  ExpectError(LoadTrainingData(Write("d.jsonl", "{\"text\": \"da\"}"), "", std::nullopt,
                               Path("cache"), &*chars->tokenizer),
              {"--data", "U+0064", "5", "--tokenizer"});
  ExpectError(Load(path, Write("a.txt", "abc"), std::nullopt), {"--val_data", "same kind"});
  Write("folder/a.jsonl", "{\"text\": \"a\"}");
  Write("folder/b.txt", "b");
  ExpectError(Load(Path("folder"), "", std::nullopt), {"--data", "mixes .jsonl", "*.jsonl"});
  ExpectError(Load(Write("blank.jsonl", "\n \n"), "", std::nullopt), {"there is no text in it"});
}

// A model keeps its own characters for a text that has fewer of them, or others.
TEST_F(CorpusTest, TheCharactersOfAModel) {
  const auto model = Load(Write("model.txt", "abcdef"), "", std::nullopt);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto load = [&](const std::string& text) {
    const std::string path = Write("text.txt", text);
    return LoadTrainingData(path, path, std::nullopt, Path("cache"), &*model->tokenizer);
  };
  const auto known = load("fade");
  ASSERT_TRUE(known.ok()) << known.status();
  EXPECT_EQ(All(known->train), (std::vector<int32_t>{5, 0, 3, 4}));
  EXPECT_EQ(known->vocab, 6);
  ExpectError(load("face\xC3\xA9"), {"--data", "U+00E9", "not one of the 6", "--tokenizer"});
  // Documents need an end, for which the model must have a token.
  Write("folder/a", "ab");
  Write("folder/b", "cd");
  const auto folder = LoadTrainingData(Path("folder"), Path("folder"), std::nullopt, Path("cache"),
                                       &*model->tokenizer);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(All(folder->train), (std::vector<int32_t>{0, 1, 6, 2, 3, 6}));
  EXPECT_EQ(folder->vocab, 7);
}

TEST_F(CorpusTest, EndsOfTextAloneTeachNothing) {
  const auto shard =
      Load(WriteShard("end.bin", std::vector<uint16_t>(1000, kGpt2EndOfText)), "", std::nullopt);
  ASSERT_TRUE(shard.ok()) << shard.status();
  const absl::Status status = CheckTeaches("data", shard->train, shard->end_of_text);
  for (const char* part : {"--data: must teach something", "900 end-of-text tokens (50256)"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
  }
  std::vector<uint16_t> tokens(200000, kGpt2EndOfText);
  tokens.back() = 7;
  const auto one = Load(Path("end.bin"), WriteShard("one.bin", tokens), std::nullopt);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(CheckTeaches("val_data", one->validation, one->end_of_text), absl::OkStatus());
}

// Errors name the known formats of files.
TEST_F(CorpusTest, WhatIsNoTextIsRefusedByName) {
  using namespace std::string_literals;
  std::string utf16, zeros(5000, 'x');
  for (const char c : "a text of sixteen bits, without a mark at its beginning"s) {
    utf16 += c, utf16 += '\0';
  }
  zeros[4321] = '\0';
  std::string latin(2000, 'x'), tar(600, 'x');
  for (size_t i = 0; i < latin.size(); i += 50) latin[i] = '\xE9';
  tar.replace(257, 5, "ustar");
  const std::string late = std::string(200000, 'x') + zeros;
  const struct {
    std::string content;
    std::vector<std::string> message;
    bool of_bytes = true;  // also refused with --tokenizer=byte
  } cases[] = {
      {"\x1f\x8b\x08\x00"s + zeros, {"gzip", "gunzip"}},
      {"\x28\xb5\x2f\xfd text", {"zstd", "zstd -d"}},
      {"\xfd"s + "7zXZ\0"s, {"xz", "unxz"}},
      {"BZh91AY&SY\x01", {"bzip2", "bunzip2"}},
      {"PK\x03\x04 text", {"ZIP", "unzip"}},
      {tar, {"tar", "tar -x"}},
      {"PAR1\x15\x04 text", {"Parquet", ".jsonl"}},
      {"ARROW1\0\0"s, {"Arrow", ".jsonl"}},
      {"SQLite format 3\0"s, {"SQLite", ".jsonl"}},
      {"\x89PNG\r\n\x1a\n text", {"PNG", "text files alone"}},
      {"\xff\xd8\xff\xe0 text", {"JPEG"}},
      {"GIF89a text", {"GIF"}},
      {"%PDF-1.7\n text", {"PDF", "pdftotext"}},
      {"\x7f"s + "ELF", {"a program"}},
      {"\x93NUMPY\x01", {"NumPy"}},
      {"\xff\xfe"s + utf16, {"UTF-16", "iconv -f UTF-16 -t UTF-8"}},
      {"\xfe\xff\0a"s, {"UTF-16"}},
      {"\xff\xfe\0\0a\0\0\0"s, {"UTF-32"}},
      {"\x10\0\0\0\0\0\0\0{\"a\": {}}      "s, {"safetensors", "--model"}},
      {"GGUF\x03\0\0\0"s, {"GGUF", "--model"}},
      {"\x88\xd8\x34\x01"s + utf16, {"a shard of llm.c", "name it .bin"}},
      {"[{\"text\": \"a\"},\n {\"text\": \"b\"}]", {"a list of JSON objects", ".jsonl"}},
      {" [ { \"a\": 1}]", {"a list of JSON objects", "jq"}},
      {"{\"id\": 1, \"text\" : \"a\"}\n{\"id\"", {"JSON objects with the key 'text'", ".jsonl"}},
      {utf16, {"UTF-16 without a byte order mark", "UTF-16LE"}, false},
      {zeros, {"a NUL at byte 4321", "--tokenizer=byte"}, false},
      {late, {"a NUL at byte 204321"}, false},
      {latin, {"40 bytes that are not, among 2,000", "iconv -f ISO-8859-1"}, false},
  };
  int number = 0;
  for (const auto& c : cases) {
    SCOPED_TRACE(c.message[0]);
    const std::string name = "file" + std::to_string(number++), path = Write(name, c.content);
    std::vector<std::string> message = c.message;
    message.insert(message.end(), {"--data", path, "must be text in UTF-8; got "});
    for (const Kind kind : {Kind::kChar, Kind::kByte}) {
      if (kind == Kind::kChar || c.of_bytes) ExpectError(Load(path, "", kind), message);
      if (kind == Kind::kByte && !c.of_bytes) {
        EXPECT_TRUE(Load(path, "", kind).ok());
      }
    }
    message[c.message.size()] = "--val_data";
    ExpectError(Load(Write("good.txt", "good"), path, Kind::kChar), message);
  }
  // Next to other files, a picture is refused, and JSON is a text.
  Write("folder/a.txt", "text");
  const std::string list = Write("folder/b.json", "[{\"a\": 1}]");
  EXPECT_TRUE(Load(Path("folder"), "", std::nullopt).ok());
  const std::string picture = Write("folder/c.png", "\x89PNG\r\n\x1a\n");
  ExpectError(Load(Path("folder"), "", std::nullopt), {"--data", picture, "PNG"});
  // These texts look like another format.
  for (const std::string& text :
       {"GGUF is a format"s, "PAR1 of golf"s, "BZh9 and so on"s, "PK, the initials"s,
        "[{1, 2}, 3]"s, "{\"a\": 1}"s, "{ text: 1 }"s, "caf\xC3\xA9 "s, "\xEF\xBB\xBFtext"s}) {
    const auto good = Load(Write("text.txt", text), "", std::nullopt);
    EXPECT_TRUE(good.ok()) << text << good.status();
  }
}

}  // namespace
}  // namespace burst
