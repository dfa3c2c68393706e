// Tests tiny models of SentencePiece (tests/interop/make_sentencepiece_fixture.py) with its
// library's tokens of texts.
#include "train/tokenizer/sentencepiece_tokenizer.h"

#include <gtest/gtest.h>
#include <time.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/data/tokenizer.h"

namespace burst {
namespace {

using Json = nlohmann::json;

std::string ModelFile(const std::string& name) {
  return ReadAll(TokenizerFixture("sentencepiece/" + name + "/tokenizer.model"));
}

class SentencePiece : public testing::TestWithParam<const char*> {
 protected:
  struct Row {
    std::string text;
    std::vector<int32_t> tokens;
  };
  static std::vector<Row> Expected() {
    const Json expected = Json::parse(ReadAll(TokenizerFixture("sentencepiece/expected.json")));
    std::vector<Row> rows;
    for (const Json& row : expected[GetParam()]) {
      rows.push_back({"", row[1]});
      EXPECT_TRUE(absl::Base64Unescape(row[0].get<std::string>(), &rows.back().text));
    }
    EXPECT_GT(rows.size(), 80u);
    return rows;
  }
  static bool AddsSpace() { return GetParam() != std::string("gemma"); }
  // Returns the text that decoding gives: with spaces for U+2581, and bytes that are not UTF-8
  // replaced.
  static std::string GivenBack(const Tokenizer& tokenizer, const std::string& text) {
    FormedText formed;
    tokenizer.of_file()->MakeEncoder(Specials::kAreText)->AppendNormalized(text, true, &formed);
    return absl::StrReplaceAll(formed.text, {{"\xE2\x96\x81", " "}});
  }

  const Tokenizer tokenizer_ = LoadFixture("sentencepiece/" + std::string(GetParam()));
};
INSTANTIATE_TEST_SUITE_P(Models, SentencePiece,
                         testing::Values("llama", "gemma", "unigram", "phrases"));

TEST_P(SentencePiece, TokensAreTheLibrarys) {
  for (const Row& row : Expected()) {
    EXPECT_EQ(TokensOf(tokenizer_, row.text), row.tokens) << absl::CEscape(row.text);
    // The second time uses the remembered words.
    EXPECT_EQ(TokensOf(tokenizer_, row.text), row.tokens) << absl::CEscape(row.text);
  }
}

TEST_P(SentencePiece, DecodesToTheTextBehindTheSpaceThatWasAdded) {
  for (const Row& row : Expected()) {
    const std::string text = tokenizer_.Decode(row.tokens);
    EXPECT_EQ(text, GivenBack(tokenizer_, row.text)) << absl::CEscape(row.text);
    const bool space = AddsSpace() && !row.text.empty();
    EXPECT_EQ(absl::StartsWith(text, " "), space || absl::StartsWith(row.text, " ") ||
                                               absl::StartsWith(row.text, "\xE2\x96\x81"));
  }
}

// The lengths count the normalized text, which keeps the text's own U+2581.
TEST_P(SentencePiece, LengthsOfTokensAddUpToTheText) {
  for (const Row& row : Expected()) {
    FormedText formed;
    tokenizer_.of_file()
        ->MakeEncoder(Specials::kAreText)
        ->AppendNormalized(row.text, true, &formed);
    size_t at = 0;
    for (const int32_t token : row.tokens) {
      at += tokenizer_.of_file()->Length(token, formed, at);
    }
    EXPECT_EQ(at, formed.text.size()) << absl::CEscape(row.text);
  }
}

// Text may be cut anywhere. The words of the beginning equal those of the whole, or the tokenizer
// asks for more text.
TEST_P(SentencePiece, WordsOfTextThatIsNotComplete) {
  const auto encoder = tokenizer_.of_file()->MakeEncoder(Specials::kAreText);
  const int64_t known =
      CheckBeginnings(encoder.get(), "The ring  of the\n\n \xE2\x96\x81x\xC3\xA9 <s> 12   \n");
  const bool one_piece =
      GetParam() == std::string("unigram") || GetParam() == std::string("phrases");
  EXPECT_EQ(known == 0, one_piece);
}

TEST_P(SentencePiece, ACheckpointHoldsIt) {
  const auto again = Tokenizer::FromJson(tokenizer_.ToJson());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->kind(), Tokenizer::Kind::kSentencePiece);
  EXPECT_EQ(again->vocab(), tokenizer_.vocab());
  EXPECT_EQ(again->end_of_text(), 2);  // </s>
  EXPECT_EQ(again->ToJson(), tokenizer_.ToJson());
  for (const Row& row : Expected()) EXPECT_EQ(TokensOf(*again, row.text), row.tokens);
}

TEST(SentencePieceTokenizer, ControlTokensAreTextUnlessAskedFor) {
  for (const std::string name : {"llama", "gemma"}) {
    const Tokenizer tokenizer = LoadFixture("sentencepiece/" + name);
    const std::string text = "<s>the ring</s><s>of";
    EXPECT_EQ(tokenizer.Decode(TokensOf(tokenizer, text)), (name == "llama" ? " " : "") + text);
    std::vector<int32_t> expected = {1};
    for (const int32_t token : TokensOf(tokenizer, "the ring")) expected.push_back(token);
    expected.insert(expected.end(), {2, 1});
    for (const int32_t token : TokensOf(tokenizer, "of")) expected.push_back(token);
    EXPECT_EQ(TokensOf(tokenizer, text, Specials::kAreTokensAndSpaced), expected);
    // Otherwise only the whole text has a space, and this text begins with a token.
    const std::vector<int32_t> plain = TokensOf(tokenizer, text, Specials::kAreTokens);
    EXPECT_EQ(tokenizer.Decode(plain), "the ringof");
    EXPECT_EQ(plain == expected, name == "gemma");
    EXPECT_EQ(TokensOf(tokenizer, "</s>", Specials::kAreTokens), std::vector<int32_t>{2});
  }
}

// Tokens of a chat are often added to a model in other files of its folder.
TEST(SentencePieceTokenizer, AddedTokensOfTheFolderAreFound) {
  const std::string folder = FreshTestFolder();
  std::ofstream(folder + "/tokenizer.model", std::ios::binary) << ModelFile("llama");
  Json json = Json::parse(ReadAll(TokenizerFixture("tiny_llama2/tokenizer.json")));
  const auto write = [&] { std::ofstream(folder + "/tokenizer.json") << json.dump(); };
  write();
  EXPECT_EQ(Tokenizer::Load(folder)->kind(), Tokenizer::Kind::kSentencePiece);
  json["added_tokens"].push_back({{"id", 430}, {"content", "<|user|>"}, {"special", true}});
  write();
  const auto tokenizer = Tokenizer::Load(folder);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(TokensOf(*tokenizer, "<|user|>", Specials::kAreTokens), std::vector<int32_t>{430});
  EXPECT_TRUE(Tokenizer::Load(folder + "/tokenizer.model").ok());
}

// Without a tokenizer.json, the model must find added tokens where transformers finds them.
TEST(SentencePieceTokenizer, AddedTokensThatTheModelFindsOtherwiseAreRefused) {
  const std::string folder = FreshTestFolder();
  const std::string gemma = ModelFile("gemma"), with_space = gemma + "\x1a\x02\x18\x01";
  const auto load = [&](const std::string& model) {
    std::ofstream(folder + "/tokenizer.model", std::ios::binary) << model;
    return Tokenizer::Load(folder);
  };
  const Tokenizer model = *load(gemma);
  const auto one = [&](const std::string& text) {
    EXPECT_EQ(TokensOf(model, text).size(), 1) << text;
    return TokensOf(model, text)[0];
  };
  const int32_t mask = one("<mask>"), lines = one("\n\n"), word = one("in");
  const struct {
    std::string text;
    int64_t id;
    std::string flag;
    bool is_found;
  } cases[] = {
      {"<s>", 1, "special", true},
      {"<s>", 1, "rstrip", false},
      {"<unk>", 0, "special", true},
      {"<mask>", mask, "special", true},
      {"<mask>", mask + 1, "special", false},
      {"<|user|>", 1, "special", false},
      {"  ", lines + 1, "special", false},  // SentencePiece finds U+2581 in place of spaces
      {"in", word, "special", false},       // may be a part of a longer word
      {"<|user|>", model.vocab(), "special", false},
      {"<|user|>", -1, "special", false}};
  for (const auto& c : cases) {
    const Json decoder = {{absl::StrCat(c.id), {{"content", c.text}, {c.flag, true}}}};
    const std::pair<std::string, Json> files[] = {
        {"tokenizer_config.json", {{"added_tokens_decoder", decoder}}},
        {"added_tokens.json", {{c.text, c.id}}}};
    for (const auto& [file, json] : files) {
      if (c.flag != "special" && file == "added_tokens.json") continue;  // it has no flags
      const std::string path = folder + "/" + file;
      std::ofstream(path) << json.dump();
      const absl::Status status = load(gemma).status();
      EXPECT_EQ(status.ok(), c.is_found) << path << json;
      if (!c.is_found) {
        EXPECT_EQ(status.message(),
                  absl::StrCat(path, ": must have tokens that the folder's tokenizer finds in the ",
                               "same places; got \"", c.text, "\" as ", c.id,
                               "; save the folder with a tokenizer.json"));
      }
      // The library puts a space before a text that begins with a symbol, but not before "<s>".
      EXPECT_EQ(load(with_space).ok(), c.is_found && c.id != mask) << path << json;
      std::filesystem::remove(path);
    }
  }
}

// transformers' AutoTokenizer takes a tokenizer.json with the tokens of tokenizer_config.json.
TEST(SentencePieceTokenizer, AddedTokensOfTheConfigAreFoundBesideATokenizerJson) {
  const std::string folder = FreshTestFolder();
  std::ofstream(folder + "/tokenizer.model", std::ios::binary) << ModelFile("llama");
  std::ofstream(folder + "/tokenizer.json")
      << ReadAll(TokenizerFixture("tiny_llama2/tokenizer.json"));
  const Json token = {{"content", "<|user|>"}, {"special", true}};
  std::ofstream(folder + "/tokenizer_config.json")
      << Json{{"added_tokens_decoder", {{"430", token}}}};
  const auto tokenizer = Tokenizer::Load(folder);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(TokensOf(*tokenizer, "<|user|>", Specials::kAreTokens), std::vector<int32_t>{430});
}

// A message that occurs twice is merged: the later fields count.
std::string WithNormalizer(const std::string& fields) {
  return ModelFile("llama") + "\x1a" + static_cast<char>(fields.size()) + fields;
}
std::string WithTrainer(const std::string& fields) {
  return ModelFile("llama") + "\x12" + static_cast<char>(fields.size()) + fields;
}

TEST(SentencePieceTokenizer, WhatChangesTextIsRefusedByName) {
  using namespace std::string_literals;
  const struct {
    std::string model;
    const char* name;
  } cases[] = {
      {WithNormalizer("\x12\x01x"s), "precompiled_charsmap"},
      {WithNormalizer("\x20\x01"s), "remove_extra_whitespaces"},
      {WithNormalizer("\x28\x00"s), "escape_whitespaces"},
      {WithTrainer("\xc0\x01\x01"s), "treat_whitespace_as_suffix"},
      {WithTrainer("\x98\x02\x00"s), "byte_fallback"},
  };
  EXPECT_TRUE(SentencePieceTokenizer::FromModel(ModelFile("llama")).ok());
  for (const auto& c : cases) {
    const auto tokenizer = SentencePieceTokenizer::FromModel(c.model);
    ASSERT_FALSE(tokenizer.ok()) << c.name;
    EXPECT_TRUE(absl::StrContains(tokenizer.status().message(), c.name)) << tokenizer.status();
  }
}

// A file that is cut anywhere, or has a changed byte, gives a tokenizer or an error.
TEST(SentencePieceTokenizer, DamagedFiles) {
  const std::string model = ModelFile("llama");
  for (const std::string& text : {std::string(), std::string("x"), std::string(100, '\xff')}) {
    EXPECT_FALSE(SentencePieceTokenizer::FromModel(text).ok()) << absl::CEscape(text);
  }
  int good = 0;
  for (size_t at = 0; at < model.size(); at += 7) {
    good += SentencePieceTokenizer::FromModel(model.substr(0, at)).ok();
    std::string changed = model;
    changed[at] = static_cast<char>(changed[at] ^ (1 << at % 8));
    const auto tokenizer = SentencePieceTokenizer::FromModel(changed);
    if (!tokenizer.ok()) continue;
    std::vector<int32_t> tokens;
    EXPECT_TRUE(
        (*tokenizer)->MakeEncoder(Specials::kAreTokens)->Encode("the <s> ring", &tokens).ok());
  }
  EXPECT_EQ(good, 0);
}

// The time grows with the length of a chat, not with its square.
TEST(SentencePieceTokenizer, ManyControlTokens) {
  const Tokenizer tokenizer = LoadFixture("sentencepiece/llama");
  std::string text;
  for (int i = 0; i < 50'000; ++i)
    text += "the ring of blocks goes around, and so do all of its ranks</s>";
  FormedText formed;
  const clock_t begin = clock();
  tokenizer.of_file()->MakeEncoder(Specials::kAreTokens)->AppendNormalized(text, true, &formed);
  EXPECT_LT(clock() - begin, 2 * kSlowdown * CLOCKS_PER_SEC);
  EXPECT_EQ(formed.added.size(), 50'000u);
  EXPECT_EQ(formed.text, absl::StrCat(" ", text));
}

}  // namespace
}  // namespace burst
