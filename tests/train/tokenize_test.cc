#include "train/data/tokenize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "burst/base/parallel.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/data/batch.h"
#include "train/data/corpus.h"
#include "train/data/shards.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

class TokenizeTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.data = folder_ + "/data";
    config_.tokenizer = TokenizerFixture("tiny");
    config_.out = folder_ + "/out";
    fs::create_directories(config_.data);
  }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  }
  std::vector<std::string> FilesOf(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  absl::StatusOr<TrainingData> LoadShards(const std::string& pattern,
                                          const Tokenizer* tokenizer = nullptr) const {
    return LoadTrainingData(folder_ + "/out/" + pattern, folder_ + "/out/" + pattern, std::nullopt,
                            folder_ + "/cache", tokenizer);
  }

  const std::string folder_ = FreshTestFolder();
  const ScopedThreadPool pool_{3};
  TokenizeConfig config_;
};

std::vector<int32_t> All(const TokenSpan& span) {
  std::vector<int32_t> tokens(span.size());
  EXPECT_EQ(span.corpus->Read(span.begin, span.size(), tokens.data()), absl::OkStatus());
  return tokens;
}

// Returns the target at `place` of the span's only sequence, with packed documents.
int32_t PackedTarget(const TokenSpan& span, int64_t place) {
  const auto sampler = SequenceSampler::Create(span, {span.size() - 1, 1, /*packed=*/true});
  EXPECT_TRUE(sampler.ok()) << sampler.status();
  const auto batch = sampler->Training(0, 1);
  EXPECT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ(*sampler->TrainingTargets(0, 1), batch->num_targets);
  return batch->targets[place];
}

// The trainer reads the documents in order, each after an end-of-text token.
TEST_F(TokenizeTest, AFolderOfTexts) {
  const std::vector<std::string> texts = {"The first one.\n", "", "A ring of ranks's <|endoftext|>",
                                          "The last\xFF"};
  const Tokenizer tokenizer = LoadFixture("tiny");
  std::vector<int32_t> expected;
  std::vector<int64_t> starts;
  for (size_t i = 0; i < texts.size(); ++i) {
    Write("data/" + std::to_string(i), texts[i]);
    if (texts[i].empty()) continue;
    starts.push_back(static_cast<int64_t>(expected.size()));
    expected.push_back(tokenizer.end_of_text());
    for (int32_t token : TokensOf(tokenizer, texts[i])) expected.push_back(token);
  }
  config_.shard_tokens = 10;
  const auto summary = TokenizeToShards(config_);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->documents, 3);
  EXPECT_EQ(summary->tokens, static_cast<int64_t>(expected.size()));
  EXPECT_EQ(summary->shards, (summary->tokens + 9) / 10);
  EXPECT_EQ(fs::file_size(config_.out + "/train_000000.bin"), 1024u + 2 * 10);
  EXPECT_FALSE(fs::exists(config_.out + ".part"));

  const auto data = LoadShards("train_*.bin");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(All(data->train), expected);
  EXPECT_EQ(data->vocab, tokenizer.vocab());
  std::vector<int64_t> found;
  ASSERT_TRUE(data->train.corpus->DocumentStarts(0, data->train.size(), &found).ok());
  EXPECT_EQ(found, starts);
  // The folder is also a tokenizer.
  const absl::StatusOr<Tokenizer> beside = Tokenizer::Load(config_.out);
  ASSERT_TRUE(beside.ok()) << beside.status();
  const auto with_text = LoadShards("train_*.bin", &*beside);
  ASSERT_TRUE(with_text.ok()) << with_text.status();
  EXPECT_EQ(with_text->tokenizer->Decode(All(with_text->train)),
            "<|endoftext|>The first one.\n<|endoftext|>A ring of ranks's <|endoftext|>"
            "<|endoftext|>The last\xFF");
  const Tokenizer other = LoadFixture("tiny_gpt2");
  EXPECT_TRUE(absl::StrContains(LoadShards("train_*.bin", &other).status().message(),
                                "was made with a vocabulary of 404"));
}

// More than 65,536 tokens take 32 bits each, as in llm.c for Llama 3.
TEST_F(TokenizeTest, LargeVocabularies) {
  nlohmann::json json = nlohmann::json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
  for (int id = 404; id < 70000; ++id) {
    json["added_tokens"].push_back({{"id", id}, {"content", "<" + std::to_string(id) + ">"}});
  }
  Write("tokenizer.json", json.dump());
  config_.tokenizer = folder_ + "/tokenizer.json";
  Write("data/a", "one<69999>two");
  const auto summary = TokenizeToShards(config_);
  ASSERT_TRUE(summary.ok()) << summary.status();
  const std::string bytes = ReadAll(config_.out + "/train_000000.bin");
  int32_t header[256];
  std::memcpy(header, bytes.data(), sizeof(header));
  EXPECT_EQ(header[0], 20240801);
  EXPECT_EQ(header[1], 7);
  EXPECT_EQ(header[2], summary->tokens);
  EXPECT_EQ(bytes.size(), 1024u + 4 * summary->tokens);
  const auto data = LoadShards("*.bin");
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->vocab, 70000);
  const std::vector<int32_t> tokens = All(data->train);
  EXPECT_EQ(tokens[0], 401);
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 69999), 1);

  // The trainer encodes the texts.
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(config_.tokenizer);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto text =
      LoadTrainingData(config_.data, config_.data, std::nullopt, folder_ + "/cache", &*tokenizer);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(All(text->train), std::vector<int32_t>(tokens.begin() + 1, tokens.end()));
}

TEST_F(TokenizeTest, DocumentsForValidation) {
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += "{\"body\": \"document " + std::to_string(i) + "\"}\n";
  Write("data/web.jsonl", lines);
  config_.lines.field = "body";
  config_.val_tokens = 1;
  const auto summary = TokenizeToShards(config_);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->documents, 20);
  EXPECT_EQ(FilesOf(config_.out),
            (std::vector<std::string>{"tokenizer.json", "train_000000.bin", "val_000000.bin"}));
  const Tokenizer tokenizer = LoadFixture("tiny");
  const auto data = LoadShards("val_*.bin", &tokenizer);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(tokenizer.Decode(All(data->train)), "<|endoftext|>document 0");
}

// The data are shards of documents, the same files, and the same lines of JSON. With packing, the
// targets are the documents' tokens and an end after each.
TEST_F(TokenizeTest, TheEndOfADocumentIsLearnedFromShardsFoldersAndLines) {
  const std::vector<std::string> texts = {"The first one.", "A ring of ranks", "x", "The last"};
  const Tokenizer tokenizer = LoadFixture("tiny");
  std::string lines;
  std::vector<int32_t> learned;  // tokens of the second to the last document but one
  for (size_t i = 0; i < texts.size(); ++i) {
    Write("data/" + std::to_string(i), texts[i]);
    lines += nlohmann::json{{"text", texts[i]}}.dump() + "\n";
    if (i == 0 || i + 1 == texts.size()) continue;
    const std::vector<int32_t> tokens = TokensOf(tokenizer, texts[i]);
    learned.insert(learned.end(), tokens.begin(), tokens.end());
    learned.push_back(tokenizer.end_of_text());
  }
  Write("lines.jsonl", lines);
  ASSERT_TRUE(TokenizeToShards(config_).ok());
  const auto targets = [&](const std::string& data, const Tokenizer* given) {
    const auto loaded = LoadTrainingData(data, data, std::nullopt, folder_ + "/cache", given);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    const int64_t seqlen = loaded->train.size() - 1;
    const auto sampler = SequenceSampler::Create(loaded->train, {seqlen, 1, /*packed=*/true});
    EXPECT_TRUE(sampler.ok()) << sampler.status();
    std::vector<int32_t> found = sampler->Training(0, 1)->targets;
    found.erase(std::remove(found.begin(), found.end(), -1), found.end());
    return found;
  };
  for (const std::string& data :
       {folder_ + "/out/train_*.bin", config_.data, folder_ + "/lines.jsonl"}) {
    std::vector<int32_t> found = targets(data, &tokenizer);
    EXPECT_EQ(std::count(found.begin(), found.end(), tokenizer.end_of_text()),
              absl::EndsWith(data, ".bin") ? 3 : 4)
        << data;  // the last document of a shard has no end
    const auto first = std::find(found.begin(), found.end(), tokenizer.end_of_text()) + 1;
    // A text's first token follows the separator in shards alone.
    if (absl::EndsWith(data, ".bin")) {
      EXPECT_TRUE(std::equal(learned.begin(), learned.end(), first)) << data;
    }
  }
  EXPECT_EQ(targets(config_.data, &tokenizer), targets(folder_ + "/lines.jsonl", &tokenizer));
}

// A document is BOS, the text and the end, and begins at BOS. If one token is both, it comes once.
// With packing, BOS is a target only where it is the one token between two documents.
TEST_F(TokenizeTest, WhatTheTokenizerPutsBeforeATextByAnOption) {
  nlohmann::json json = nlohmann::json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
  const Tokenizer tokenizer = LoadFixture("tiny");
  Write("data/a", "The first one.");
  Write("data/b", "x");
  config_.tokenizer = folder_ + "/tokenizer.json";
  config_.bos = true;
  const auto expect = [&](int32_t bos, bool separators, const std::vector<int32_t>& behind) {
    json["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", {{{"SpecialToken", {{"id", "b"}}}}, {{"Sequence", {{"id", "A"}}}}}},
        {"special_tokens", {{"b", {{"ids", {bos}}}}}}};
    Write("tokenizer.json", json.dump());
    config_.separators = separators;
    fs::remove_all(config_.out);
    const auto summary = TokenizeToShards(config_);
    ASSERT_TRUE(summary.ok()) << summary.status();
    std::vector<int32_t> expected;
    std::vector<int64_t> starts;
    for (const char* text : {"The first one.", "x"}) {
      starts.push_back(static_cast<int64_t>(expected.size()));
      expected.push_back(bos);
      for (const int32_t token : TokensOf(tokenizer, text)) expected.push_back(token);
      expected.insert(expected.end(), behind.begin(), behind.end());
    }
    const Tokenizer made = *Tokenizer::Load(config_.out);
    const auto data = LoadShards("train_*.bin", &made);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ(All(data->train), expected);
    std::vector<int64_t> found;
    ASSERT_TRUE(data->train.corpus->DocumentStarts(0, data->train.size(), &found).ok());
    EXPECT_EQ(found, starts);
    EXPECT_EQ(PackedTarget(data->train, starts[1] - 1), behind.empty() ? bos : -1);
    EXPECT_EQ(PackedTarget(data->train, starts[1] - 2), expected[starts[1] - 1]);
    EXPECT_TRUE(data->tokenizer->marks().begins);
    EXPECT_EQ(data->tokenizer->marks().separator, bos == tokenizer.end_of_text() ? -1 : bos);
  };
  expect(400, true, {tokenizer.end_of_text()});
  expect(400, false, {});
  expect(tokenizer.end_of_text(), true, {});
}

TEST_F(TokenizeTest, WhatIsNoTextIsRefused) {
  Write("data/a.gz", "\x1f\x8b\x08");
  const absl::Status status = TokenizeToShards(config_).status();
  EXPECT_TRUE(absl::StrContains(status.message(), "a.gz must be text in UTF-8; got gzip"))
      << status;
  EXPECT_FALSE(fs::exists(config_.out));
}

TEST_F(TokenizeTest, NothingIsLeftOfWhatFails) {
  Write("data/a.jsonl", "{}\n");
  EXPECT_TRUE(absl::StrContains(TokenizeToShards(config_).status().message(), "no text with the"));
  EXPECT_FALSE(fs::exists(config_.out));
  // Leftovers of a killed process are removed.
  Write("out.part/train_000007.bin", "left");
  Write("data/a.jsonl", "{\"text\": \"a\"}\n");
  ASSERT_TRUE(TokenizeToShards(config_).ok());
  EXPECT_EQ(FilesOf(config_.out), (std::vector<std::string>{"tokenizer.json", "train_000000.bin"}));
  // An existing folder stays.
  EXPECT_EQ(TokenizeToShards(config_).status().code(), absl::StatusCode::kAlreadyExists);
  // A user's own folder stays, too, if it has the name of an unfinished one.
  fs::remove_all(config_.out);
  fs::create_directory(config_.out + ".part");
  Write("out.part/notes.txt", "mine");
  EXPECT_TRUE(absl::StrContains(TokenizeToShards(config_).status().message(), "holds notes.txt"));
  EXPECT_EQ(FilesOf(config_.out + ".part"), (std::vector<std::string>{"notes.txt"}));
  config_.out += "2";
  Write("data/b", "text");
  EXPECT_TRUE(
      absl::StrContains(TokenizeToShards(config_).status().message(), "name only one kind"));
}

}  // namespace
}  // namespace burst
