#include "train/data/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/huggingface/export_tokenizer.h"

namespace burst {
namespace {

using Json = nlohmann::json;

std::vector<int32_t> Encode(const Tokenizer& tokenizer, absl::string_view text) {
  std::vector<int32_t> tokens;
  const absl::Status status = tokenizer.Encode(text, &tokens);
  EXPECT_TRUE(status.ok()) << status;
  return {tokens.begin(), tokens.end()};
}

TEST(Tokenizer, BytesRoundTrip) {
  std::string all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
  const Tokenizer tokenizer = Tokenizer::Byte(false);
  EXPECT_EQ(tokenizer.vocab(), 256);
  EXPECT_EQ(tokenizer.end_of_text(), -1);
  EXPECT_EQ(Encode(tokenizer, all)[200], 200);
  EXPECT_EQ(tokenizer.Decode(Encode(tokenizer, all)), all);
  EXPECT_EQ(Tokenizer::Byte(true).vocab(), 257);
  EXPECT_EQ(Tokenizer::Byte(true).end_of_text(), 256);
  EXPECT_EQ(Tokenizer::Byte(true).Decode({72, 256, 105, 1000, -1}), "Hi");
}

TEST(Tokenizer, CharsAreSortedCodePointsOfAllTexts) {
  const Tokenizer tokenizer =
      *Tokenizer::Char({"ba\xC3\xA9", "c\xE2\x82\xAC\xF0\x9F\x98\x80"}, false);
  EXPECT_EQ(tokenizer.vocab(), 6);  // a b c e-acute euro emoji
  const std::string text = "cab\xF0\x9F\x98\x80\xE2\x82\xAC\xC3\xA9";
  EXPECT_EQ(Encode(tokenizer, text), (std::vector<int32_t>{2, 0, 1, 5, 4, 3}));
  EXPECT_EQ(tokenizer.Decode(Encode(tokenizer, text)), text);
}

TEST(Tokenizer, UnknownCharacterIsNamed) {
  const Tokenizer tokenizer = *Tokenizer::Char({"abc"}, false);
  std::vector<int32_t> tokens;
  const absl::Status status = tokenizer.Encode("ab\xC3\xA9", &tokens);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("U+00E9"), absl::string_view::npos) << status;
}

TEST(Tokenizer, WhatIsNotUtf8IsRejected) {
  for (const char* bad : {"\x80", "a\xFF", "\xC3", "\xC3(", "\xC0\x80", "\xE0\x80\x80",
                          "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF0\x9F\x98", "\xF5"}) {
    const absl::Status status = Tokenizer::Char({bad}, false).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("--tokenizer=byte"), absl::string_view::npos) << status;
  }
  EXPECT_TRUE(Tokenizer::Char({"\xED\x9F\xBF\xEE\x80\x80\xF4\x8F\xBF\xBF"}, false).ok());
}

// The tokenizer.json of an export is read as the tokenizer that wrote it.
TEST(Tokenizer, ExportRoundTrip) {
  const std::string text = "cab \n\"\x7F\xC3\xA9\xE2\x96\x81\xF0\x9F\x98\x80";
  for (bool end_of_text : {false, true}) {
    for (const Tokenizer& tokenizer :
         {Tokenizer::Byte(end_of_text), *Tokenizer::Char({text}, end_of_text)}) {
      const std::string folder = FreshTestFolder();
      ASSERT_TRUE(WriteTokenizer(tokenizer, folder).ok());
      const auto read = Tokenizer::Load(folder);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(read->code_points(), tokenizer.code_points());
      EXPECT_EQ(read->vocab(), tokenizer.vocab());
      EXPECT_EQ(read->end_of_text(), tokenizer.end_of_text());
      EXPECT_EQ(Encode(*read, text), Encode(tokenizer, text));
      EXPECT_EQ(read->Decode(Encode(*read, text)), text);
    }
  }
}

// A file whose tokens are not the sorted characters alone is refused, as before.
TEST(Tokenizer, OtherFilesWithoutAPreTokenizerAreRefused) {
  const std::string path = FreshTestFolder() + "/tokenizer.json";
  const auto load = [&](const std::string& vocab, const std::string& merges) {
    std::ofstream(path) << R"({"decoder":{"type":"Fuse"},"added_tokens":[],"model":{"type":"BPE",)"
                        << R"("vocab":)" << vocab << R"(,"merges":)" << merges << "}}";
    return Tokenizer::Load(path).status();
  };
  EXPECT_TRUE(load(R"({"a":0,"b":1})", "[]").ok());
  for (const char* vocab : {R"({"a":1,"b":0})", R"({"a":0,"b":2})", R"({"a":0,"bc":1})",
                            R"({"":0,"b":1})", R"({"a":0,"b":-1})", "{}", "[]"}) {
    EXPECT_NE(load(vocab, "[]").message().find("pre_tokenizer"), std::string::npos) << vocab;
  }
  EXPECT_FALSE(load(R"({"a":0,"ab":1,"b":2})", R"([["a","b"]])").ok());
}

TEST(Tokenizer, JsonRoundTrip) {
  for (bool end_of_text : {false, true}) {
    for (const Tokenizer& tokenizer :
         {Tokenizer::Byte(end_of_text), *Tokenizer::Char({"h\xC3\xA9llo"}, end_of_text)}) {
      const auto copy = Tokenizer::FromJson(tokenizer.ToJson());
      ASSERT_TRUE(copy.ok()) << copy.status();
      EXPECT_EQ(copy->vocab(), tokenizer.vocab());
      EXPECT_EQ(copy->end_of_text(), tokenizer.end_of_text());
      EXPECT_EQ(Encode(*copy, "olh"), Encode(tokenizer, "olh"));
    }
  }
  for (const char* bad : {"", "[]", "{}", "{\"kind\":\"bpe\",\"end_of_text\":false}",
                          "{\"kind\":\"char\",\"end_of_text\":false}",
                          "{\"kind\":\"char\",\"end_of_text\":false,\"code_points\":[3,2]}",
                          "{\"kind\":\"char\",\"end_of_text\":false,\"code_points\":[-1]}",
                          "{\"kind\":\"char\",\"end_of_text\":false,\"code_points\":[55296]}",
                          "{\"kind\":\"char\",\"end_of_text\":0,\"code_points\":[1]}"}) {
    EXPECT_FALSE(Tokenizer::FromJson(bad).ok()) << bad;
  }
}

// AutoTokenizer of transformers gave the expected tokens for the same folders.
TEST(Tokenizer, TheFlagsOfTokenizerConfigWin) {
  const auto token = [](const char* text, const Json& changes = Json::object()) {
    Json json = {{"content", text}, {"single_word", false}, {"lstrip", false},
                 {"rstrip", false}, {"normalized", false},  {"special", true}};
    json.update(changes);
    return json;
  };
  const auto with_id = [](Json json, int id) {
    json["id"] = id;
    return json;
  };
  const std::string folder = FreshTestFolder();
  const auto load = [&](const Json& a, const Json& decoder) {
    Json json = Json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
    json["added_tokens"] = {with_id(a, 400)};
    std::ofstream(folder + "/tokenizer.json") << json.dump();
    std::ofstream(folder + "/tokenizer_config.json") << Json{{"added_tokens_decoder", decoder}};
    return Tokenizer::Load(folder);
  };
  const auto tokens = [&](const Json& a, const Json& decoder, Specials specials) {
    const auto tokenizer = load(a, decoder);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return tokenizer.ok() ? TokensOf(*tokenizer, "o <|a|> the<|b|>", specials)
                          : std::vector<int32_t>();
  };
  const Json a = token("<|a|>"), b = token("<|b|>"), strips = token("<|a|>", {{"lstrip", true}}),
             text = token("<|a|>", {{"special", false}});
  using Tokens = std::vector<int32_t>;
  const Tokens as_is = {78, 220, 400, 266, 401}, stripped = {78, 400, 266, 401};
  EXPECT_EQ(tokens(a, {{"400", a}, {"401", b}}, Specials::kAreTokens), as_is);
  EXPECT_EQ(tokens(a, {{"400", strips}, {"401", b}}, Specials::kAreTokens), stripped);
  EXPECT_EQ(tokens(strips, {{"400", a}, {"401", b}}, Specials::kAreTokens), as_is);
  EXPECT_EQ(tokens(strips, {{"401", b}}, Specials::kAreTokens), stripped);
  const Json few = {{"content", "<|a|>"}, {"lstrip", true}};
  EXPECT_EQ(tokens(a, {{"400", few}, {"401", b}}, Specials::kAreTokens), stripped);
  // A token is special if one of the files says so.
  const auto is_text = [&](const Json& one, const Json& other) {
    const Tokens found = tokens(one, {{"400", other}}, Specials::kAreText);
    return std::count(found.begin(), found.end(), 400) == 0;
  };
  EXPECT_TRUE(is_text(a, text));
  EXPECT_TRUE(is_text(text, a));
  EXPECT_FALSE(is_text(text, text));
  // Flags and ids that a tokenizer cannot have are refused by name.
  const std::pair<Json, const char*> refused[] = {
      {{{"400", token("<|a|>", {{"single_word", true}})}}, "single_word is not supported"},
      {{{"405", a}}, "must have the id of tokenizer.json, 400; got 405"},
      {{{"x", a}}, "has no id or no content"},
      {{{"400", token("<|a|>", {{"lstrip", 1}})}}, "lstrip must be true or false"}};
  for (const auto& [decoder, message] : refused) {
    const absl::Status status = load(a, decoder).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "tokenizer_config.json: added_tokens_decoder"))
        << status;
    EXPECT_TRUE(absl::StrContains(status.message(), message)) << status;
  }
}

// AutoTokenizer of transformers gave the expected tokens for the same folders. Its tokens "burst"
// and "round" are in the vocabulary, and no added tokens.
TEST(Tokenizer, TokensThatTheConfigNamesAreSpecial) {
  const std::string folder = FreshTestFolder();
  const Json a = {{"content", "<|a|>"}, {"lstrip", false},     {"rstrip", false},
                  {"special", false},   {"normalized", false}, {"single_word", false}};
  const auto load = [&](const Json& config, const Json& map) {
    Json json = Json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
    Json added = a;
    added["id"] = 400;
    json["added_tokens"] = {added};
    std::ofstream(folder + "/tokenizer.json") << json.dump();
    std::ofstream(folder + "/tokenizer_config.json") << config.dump();
    if (!map.is_null()) std::ofstream(folder + "/special_tokens_map.json") << map.dump();
    const auto tokenizer = Tokenizer::Load(folder);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    std::filesystem::remove(folder + "/special_tokens_map.json");
    return *tokenizer;
  };
  using Tokens = std::vector<int32_t>;
  const Tokens as_is = {78, 220, 396, 400, 270, 320, 220, 396, 82},
               burst = {78, 220, 396, 400, 220, 346, 220, 396, 82},
               stripped_round = {78, 396, 400, 270, 320, 396, 82};
  const Json round = {{"__type", "AddedToken"}, {"content", "round"}, {"lstrip", true}};
  struct Case {
    Json config, map;
    Tokens tokens;
  };
  const Case cases[] = {{Json::object(), {}, as_is},
                        {{{"eos_token", "burst"}}, {}, burst},
                        {{{"eos_token", nullptr}, {"mask_token", "burst"}}, {}, burst},
                        {{{"eos_token", round}}, {}, stripped_round},
                        {{{"eos_token", "<|new|>"}}, {}, as_is},
                        {{{"additional_special_tokens", {"round", "burst"}}}, {}, burst},
                        {{{"extra_special_tokens", {{"image_token", "burst"}}}}, {}, burst},
                        // special_tokens_map.json wins, but not over added_tokens_decoder.
                        {{{"eos_token", "burst"}}, {{"eos_token", "round"}}, as_is},
                        {Json::object(), {{"pad_token", round}}, stripped_round},
                        {{{"eos_token", "burst"}, {"added_tokens_decoder", {{"400", a}}}},
                         {{"bos_token", round}},
                         burst}};
  for (const Case& c : cases) {
    EXPECT_EQ(TokensOf(load(c.config, c.map), "o round<|a|> burst rounds", Specials::kAreTokens),
              c.tokens)
        << c.config << " " << c.map;
  }
  // Added tokens must be a list, also where the config would add one.
  Json wrong = Json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
  wrong["added_tokens"] = Json::object();
  std::ofstream(folder + "/tokenizer.json") << wrong.dump();
  std::ofstream(folder + "/tokenizer_config.json") << R"({"eos_token": "burst"})";
  EXPECT_TRUE(
      absl::StrContains(Tokenizer::Load(folder).status().message(), "added_tokens must be a list"));
  // Text that is not from a template holds no special token.
  const auto is_text = [&](const Json& config, const char* text, int32_t id) {
    const Tokens found = TokensOf(load(config, {}), text, Specials::kAreText);
    return std::count(found.begin(), found.end(), id) == 0;
  };
  EXPECT_FALSE(is_text(Json::object(), "o<|a|>", 400));
  EXPECT_TRUE(is_text({{"pad_token", "<|a|>"}}, "o<|a|>", 400));
}

}  // namespace
}  // namespace burst
