// Tests how tokenizers of files form and cut a text. The library tokenizers gave the expected
// tokens (tests/interop/make_forms_fixture.py).
#include "train/tokenizer/text_form.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/data/tokenizer.h"
#include "train/tokenizer/bpe_file.h"

namespace burst {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

Json Forms() { return Json::parse(ReadAll(TokenizerFixture("forms.json"))); }

absl::StatusOr<Tokenizer> Load(const Json& json) {
  const std::string path = testing::TempDir() + "/tokenizer.json";
  std::ofstream(path) << json.dump();
  return Tokenizer::Load(path);
}

Json Changed(const std::string& base, const Json& changes) {
  Json json = Json::parse(ReadAll(TokenizerFixture(base + "/tokenizer.json")));
  json.update(changes);
  return json;
}

TEST(TextForm, TokensAreThoseOfTokenizers) {
  const Json forms = Forms();
  EXPECT_EQ(forms.size(), 16u);
  for (const auto& [name, form] : forms.items()) {
    SCOPED_TRACE(name);
    const absl::StatusOr<Tokenizer> tokenizer = Load(Changed(form["base"], form["changes"]));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (const Json& row : form["tokens"]) {
      EXPECT_EQ(TokensOf(*tokenizer, row[0].get<std::string>()), row[1].get<std::vector<int32_t>>())
          << row[0];
    }
  }
}

// Tokens stand for all bytes of the formed text, one after the other.
TEST(TextForm, LengthsAddUpToTheText) {
  const Json forms = Forms();
  for (const auto& [name, form] : forms.items()) {
    SCOPED_TRACE(name);
    const Tokenizer tokenizer = *Load(Changed(form["base"], form["changes"]));
    const auto encoder = tokenizer.of_file()->MakeEncoder(Specials::kAreText);
    for (const Json& row : form["tokens"]) {
      FormedText text;
      encoder->AppendNormalized(row[0].get<std::string>(), true, &text);
      size_t at = 0;
      for (const int32_t token : TokensOf(tokenizer, row[0].get<std::string>())) {
        at += tokenizer.of_file()->Length(token, text, at);
      }
      EXPECT_EQ(at, text.text.size()) << row[0];
    }
  }
}

// As in tokenizers, U+2581 in an added token is a space of the decoded text.
TEST(TextForm, MarksInAddedTokensAreSpaces) {
  const Json form = Forms()["raw_marks"];
  const Tokenizer tokenizer = *Load(Changed(form["base"], form["changes"]));
  EXPECT_EQ(TokensOf(tokenizer,
                     "a\xE2\x96\x81\xE2\x96\x81"
                     "b")[1],
            430);
  EXPECT_EQ(tokenizer.Decode({430}), "  ");
}

// Text may be cut anywhere. The beginning has the same pieces as in the whole text, or the
// tokenizer asks for more text.
TEST(TextForm, PiecesOfTextThatIsNotComplete) {
  const Json forms = Forms();
  for (const auto& [name, form] : forms.items()) {
    SCOPED_TRACE(name);
    const Tokenizer tokenizer = *Load(Changed(form["base"], form["changes"]));
    const auto encoder = tokenizer.of_file()->MakeEncoder(Specials::kAreText);
    const std::string text = "The ring  \n <tool_call>  x 1234a\xE4\xBD\xA0\xFF lo  ring  .";
    EXPECT_GT(CheckBeginnings(encoder.get(), text), static_cast<int64_t>(text.size()));
  }
}

TEST(TextForm, WhatIsNotSupportedIsNamed) {
  const auto refused = [](const std::string& base, const Json& changes, const std::string& says) {
    EXPECT_THAT(std::string(Load(Changed(base, changes)).status().message()), HasSubstr(says));
  };
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const auto cut_by = [&](const Json& part) {
    return Json{{"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {part, byte_level}}}}};
  };
  const Json removes = {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Removed"}};
  refused("tiny", cut_by(removes), "the behavior Isolated, or Removed and invert");
  refused("tiny", cut_by({{"type", "Punctuation"}}), "pre_tokenizer \"Punctuation\"");
  refused("tiny", {{"pre_tokenizer", nullptr}}, "pre_tokenizer must be a ByteLevel");
  refused("tiny_llama2", {{"pre_tokenizer", byte_level}}, "is not supported with a ByteLevel");
  const Json prepend = {{"type", "Prepend"}, {"prepend", "\u2581"}};
  refused("tiny_llama2",
          {{"normalizer", {{"type", "Sequence"}, {"normalizers", {prepend, prepend}}}}},
          "a second Prepend");
  const Json metaspace = {{"type", "Metaspace"}, {"replacement", "\u2581"}};
  refused("tiny_llama2",
          {{"normalizer", nullptr},
           {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {metaspace, metaspace}}}}},
          "a second Metaspace");
  refused("tiny_llama2", {{"normalizer", {{"type", "Lowercase"}}}}, "normalizer \"Lowercase\"");
  refused("tiny_llama2", {{"normalizer", nullptr}}, "U+2581 for spaces only");
}

// A Split that removes text has no tokens for it.
TEST(TextForm, ATextThatWouldBeRemovedIsAnError) {
  Json changes = Forms()["removed"]["changes"];
  changes["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a-z]+";
  const Tokenizer tokenizer = *Load(Changed("tiny", changes));
  std::vector<int32_t> tokens;
  EXPECT_EQ(tokenizer.Encode("ring", &tokens), absl::OkStatus());
  EXPECT_THAT(std::string(tokenizer.Encode("ring 7", &tokens).message()),
              HasSubstr("would remove ' 7'"));
}

TEST(TextForm, FilesOfTiktokenAreLlama3sOnly) {
  EXPECT_TRUE(IsTiktokenFile("IQ== 0\nIg== 1\n"));
  for (const char* other : {"", "{\"a\": 1}", "\x0A\x0E", "a 0", "IQ==", "IQ== -1"}) {
    EXPECT_FALSE(IsTiktokenFile(other)) << other;
  }
  EXPECT_THAT(std::string(TokenizerJsonOfTiktoken("IQ== 0\nIg== 1\n").status().message()),
              HasSubstr("got 2 ranks; give the model's tokenizer.json"));
  EXPECT_THAT(std::string(TokenizerJsonOfTiktoken("IQ== 0\nIg== 7\n").status().message()),
              HasSubstr("line 2 must be a token in base64 and the rank 1"));
  // With its number of ranks, bytes first.
  std::string file;
  for (int i = 0; i < 128000; ++i) {
    std::string bytes(1, static_cast<char>(i));
    if (i == 256) bytes = "in";
    if (i == 257) bytes = "ri";
    if (i == 258) bytes = "rin";
    if (i > 258) bytes = absl::StrCat("#", i);
    absl::StrAppend(&file, absl::Base64Escape(bytes), " ", i, "\n");
  }
  const std::string path = testing::TempDir() + "/tokenizer.model";
  std::ofstream(path) << file;
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(path);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(tokenizer->vocab(), 128256);
  EXPECT_EQ(tokenizer->end_of_text(), 128001);
  EXPECT_EQ(*tokenizer->Beginning(), std::vector<int32_t>{128000});
  EXPECT_EQ(TokensOf(*tokenizer, "rin ri\xC3"), (std::vector<int32_t>{258, ' ', 257, 0xC3}));
}

}  // namespace
}  // namespace burst
