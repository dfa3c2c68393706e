#include "train/tokenizer/bpe_tokenizer.h"

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/data/tokenizer.h"
#include "train/tokenizer/unicode_normal.h"

namespace burst {
namespace {

using Json = nlohmann::json;

std::string Normalized(const Tokenizer& tokenizer, absl::string_view text) {
  FormedText formed;
  tokenizer.of_file()->MakeEncoder(Specials::kAreText)->AppendNormalized(text, true, &formed);
  return formed.text;
}

class Fixture : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Tokenizers, Fixture, testing::Values("tiny", "tiny_gpt2"));

TEST_P(Fixture, TokensAreThoseOfTokenizers) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const Json expected = Json::parse(ReadAll(TokenizerFixture("expected.json")))[GetParam()];
  ASSERT_GT(expected.size(), 80u);
  for (const Json& row : expected) {
    const std::string text = row[0];
    EXPECT_EQ(TokensOf(tokenizer, text), row[1].get<std::vector<int32_t>>()) << row[0];
  }
}

// Decoding is the inverse of encoding for any bytes.
TEST_P(Fixture, DecodingIsTheInverse) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::string text;
    for (size_t length = random() % 200; text.size() < length;) {
      const char* const kParts[] = {" ", "the ", "\xC3\xA9", "\xE4\xBD\xA0", "<|end", "\n", "'s"};
      if (random() % 3 == 0) {
        text += static_cast<char>(random());
      } else {
        text += kParts[random() % 7];
      }
    }
    EXPECT_EQ(tokenizer.Decode(TokensOf(tokenizer, text)), Normalized(tokenizer, text));
  }
}

// A run of bytes that are not UTF-8 ends the text before it and is a separate piece.
TEST_P(Fixture, BytesThatAreNotUtf8) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const std::string runs[] = {"Hello", "\xFF\xFE", " wor", "\xE4\xBD", "ld  ", "\x80", " \xC3\xA9"};
  std::string text;
  std::vector<int32_t> expected;
  for (const std::string& run : runs) {
    text += run;
    for (int32_t token : TokensOf(tokenizer, run)) expected.push_back(token);
  }
  EXPECT_EQ(TokensOf(tokenizer, text), expected);
  EXPECT_EQ(TokensOf(tokenizer, "\xE4\xBD").size(), 2u);
}

// Text may be cut anywhere. The beginning has the same pieces as in the whole text, or the
// tokenizer asks for more text.
TEST_P(Fixture, PiecesOfTextThatIsNotComplete) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const std::string text =
      "The ring\n\n  <tool_call>x</tool_call>  12345\xE4\xBD\xA0\xFF\xFF don't\n \n\xC3\xA9 end...";
  const auto encoder = tokenizer.of_file()->MakeEncoder(Specials::kAreText);
  const int64_t known = CheckBeginnings(encoder.get(), text);
  EXPECT_GT(known, static_cast<int64_t>(text.size() * text.size() / 8));
}

TEST(BpeTokenizer, SpecialTokensAreTextUnlessAskedFor) {
  const Tokenizer tokenizer = LoadFixture("tiny");
  const std::string text = "a<|endoftext|><tool_call>b";
  const std::vector<int32_t> as_text = TokensOf(tokenizer, text);
  const std::vector<int32_t> as_tokens = TokensOf(tokenizer, text, Specials::kAreTokens);
  EXPECT_EQ(tokenizer.end_of_text(), 401);
  EXPECT_EQ(std::count(as_text.begin(), as_text.end(), 401), 0);
  EXPECT_EQ(std::count(as_text.begin(), as_text.end(), 402), 1);  // the token is not special
  EXPECT_EQ(as_tokens.size(), 4u);
  EXPECT_EQ(as_tokens[1], 401);
  EXPECT_EQ(tokenizer.Decode(as_text), text);
  EXPECT_EQ(tokenizer.Decode(as_tokens), text);
}

TEST(BpeTokenizer, CheckpointsHoldAllOfIt) {
  for (const char* name : {"tiny", "tiny_gpt2"}) {
    const Tokenizer tokenizer = LoadFixture(name);
    const absl::StatusOr<Tokenizer> again = Tokenizer::FromJson(tokenizer.ToJson());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->ToJson(), tokenizer.ToJson());
    EXPECT_EQ(again->vocab(), tokenizer.vocab());
    EXPECT_EQ(again->end_of_text(), tokenizer.end_of_text());
    EXPECT_EQ(TokensOf(*again, "The ring's 123"), TokensOf(tokenizer, "The ring's 123"));
  }
}

// The pieces are too long for the merge that looks at all pairs, and give the same tokens. In other
// orders of the merges, a merge makes pairs of lower ranks.
TEST(BpeTokenizer, LongPieces) {
  Json json = Json::parse(LoadFixture("tiny_gpt2").file());
  Json& merges = json["model"]["merges"];
  std::mt19937 random(1);
  for (int i = 0; i < 30; ++i) {
    const std::string path = testing::TempDir() + "/long.json";
    std::ofstream(path) << json.dump();
    const auto tokenizer = Tokenizer::Load(path);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    std::string word;
    while (word.size() < 600) word += std::string(1 + random() % 2, "theringsa"[random() % 9]);
    // The reference merges pair by pair, as the definition says.
    std::map<std::pair<std::string, std::string>, size_t> ranks;
    for (size_t rank = 0; rank < merges.size(); ++rank) {
      ranks[{merges[rank][0], merges[rank][1]}] = rank;
    }
    std::vector<std::string> symbols;
    for (char c : word) symbols.emplace_back(1, c);
    while (true) {
      size_t best = merges.size(), place = 0;
      for (size_t at = 0; at + 1 < symbols.size(); ++at) {
        const auto found = ranks.find({symbols[at], symbols[at + 1]});
        if (found != ranks.end() && found->second < best) best = found->second, place = at;
      }
      if (best == merges.size()) break;
      symbols[place] += symbols[place + 1];
      symbols.erase(symbols.begin() + static_cast<int64_t>(place) + 1);
    }
    std::vector<int32_t> expected;
    for (const std::string& symbol : symbols) expected.push_back(json["model"]["vocab"][symbol]);
    EXPECT_EQ(TokensOf(*tokenizer, word), expected) << i;
    std::shuffle(merges.begin(), merges.end(), random);
  }
}

// All bytes have tokens, so fields about others say nothing.
TEST(BpeTokenizer, FieldsWithoutAMeaningForBytes) {
  const Tokenizer plain = LoadFixture("tiny");
  const std::string file =
      absl::StrReplaceAll(ReadAll(TokenizerFixture("tiny/tokenizer.json")),
                          {{"\"byte_fallback\":false", "\"byte_fallback\":true"},
                           {"\"unk_token\":null", "\"unk_token\":\"a\""}});
  ASSERT_TRUE(absl::StrContains(file, "\"byte_fallback\":true"));
  const std::string folder = FreshTestFolder();
  std::ofstream(folder + "/tokenizer.json", std::ios::binary) << file;
  const auto other = Tokenizer::Load(folder);
  ASSERT_TRUE(other.ok()) << other.status();
  for (const char* text : {"A ring of ranks", "\xE4\xB8\xAD \x01", "<unk> a"}) {
    EXPECT_EQ(TokensOf(*other, text), TokensOf(plain, text));
  }
}

// A clone without Git LFS has pointers in place of files.
TEST(BpeTokenizer, PointersAreNamed) {
  const std::string folder = FreshTestFolder();
  for (const char* name : {"/tokenizer.json", "/tokenizer.model"}) {
    std::ofstream(folder + name) << "version https://git-lfs.github.com/spec/v1\noid sha256:1\n";
    EXPECT_TRUE(absl::StrContains(Tokenizer::Load(folder).status().message(), "run git lfs pull"));
  }
}

// Errors of a file name the place.
TEST(BpeTokenizer, FilesThatAreWrong) {
  const std::string good = ReadAll(TokenizerFixture("tiny/tokenizer.json"));
  const std::string folder = FreshTestFolder(), path = folder + "/tokenizer.json";
  const struct {
    const char *from, *to, *message;
  } cases[] = {
      {"{\"version\"", "{\"version", "it is not JSON"},
      {"\"type\":\"NFC\"", "\"type\":\"NFKC\"", "normalizer \"NFKC\" is not supported"},
      {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", "model \"Unigram\" is not supported"},
      {"\"behavior\":\"Isolated\"", "\"behavior\":\"Removed\"", "behavior Isolated, or Removed"},
      {"\"add_prefix_space\":false", "\"add_prefix_space\":true", "add_prefix_space"},
      {"\"single_word\":false", "\"single_word\":true", "single_word is not supported"},
      {"\"id\":401", "\"id\":-1", "\"<|endoftext|>\" has no id"},
      {"\"id\":401", "\"id\":9999", "the id 9999 is far beyond"},
      {"\"id\":401", "\"id\":65", "\"<|endoftext|>\" must have the id 401, which tokenizers"},
      {"\"id\":403", "\"id\":410", "must have the id 403, which tokenizers gives it; got 410"},
      {"</tool_call>", "<tool_call>", "\"<tool_call>\" must be there once; got it twice"},
      {"\"!\":0", "\"!\":401", "\"<|endoftext|>\" must have an id of its own; got 401, which"},
      {"\"a\":", "\"\\u00e4\\u00f6\":", "model.merges: number"},
      {"\"!\":", "\"\\u00e4\\u00f6\":", "no token for byte 33"},
      {"(?!", "(?<!", "its pattern has a part that looks at what is before it"},
      {"(?!", "(?", "its pattern is not a regular expression"},
      {"\\\\s+\"", "\\\\s+|[^\\\\S]\"", "\\S inside of a class"},
  };
  for (const auto& c : cases) {
    std::string text = good;
    const size_t at = text.find(c.from);
    ASSERT_NE(at, std::string::npos) << c.from;
    text.replace(at, std::string(c.from).size(), c.to);
    std::ofstream(path, std::ios::binary) << text;
    const absl::Status status = Tokenizer::Load(folder).status();
    EXPECT_TRUE(absl::StrContains(status.message(), c.message)) << c.to << ": " << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), path + ": ")) << status;
  }
}

// Tokenizers gives an overlapping token twice; which of two normalized texts counts is chance.
TEST(BpeTokenizer, AddedTokensThatAreNotSupportedTogetherAreNamed) {
  const struct {
    const char *first, *second, *message;
  } cases[] = {
      {"\"content\": \"<a>\", \"rstrip\": true, \"normalized\": true",
       "\"content\": \"\\tb\", \"normalized\": true",
       "\"<a>\" takes the spaces after it (rstrip), with which \"\\tb\" begins"},
      {"\"content\": \"caf\u00e9\", \"normalized\": true",
       "\"content\": \"cafe\u0301\", \"normalized\": true", "have the same text"},
      {"\"content\": \"<a>\"", "\"content\": \"<a>\", \"normalized\": false",
       "\"<a>\" must be there once; got it twice"},
      {"\"content\": \"<a>\"", "\"id\": 257, \"content\": \"\\u0120a\"", "stands for other bytes"},
  };
  for (const auto& c : cases) {
    Json json = Json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
    json["added_tokens"] = {Json::parse(absl::StrCat("{\"id\": 400, ", c.first, "}")),
                            Json::parse(absl::StrCat("{\"id\": 401, ", c.second, "}"))};
    const std::string path = FreshTestFolder() + "/tokenizer.json";
    std::ofstream(path) << json.dump();
    const absl::Status status = Tokenizer::Load(path).status();
    EXPECT_TRUE(absl::StrContains(status.message(), c.message)) << status;
  }
}

// Returns an encoder of the fixture tiny with this added token.
std::unique_ptr<FileEncoder> EncoderWithAdded(const char* token) {
  Json json = Json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
  json["added_tokens"] = {Json::parse(token)};
  const std::string path = FreshTestFolder() + "/tokenizer.json";
  std::ofstream(path) << json.dump();
  const auto tokenizer = Tokenizer::Load(path);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer->of_file()->MakeEncoder(Specials::kAreText);
}

// Chinese text has little ASCII, but lines. A file without cuts would be one piece.
TEST(BpeTokenizer, LinesAreCutsWithTokensOfTheNormalizedText) {
  const auto encoder = EncoderWithAdded(R"({"id": 400, "content": "  ", "normalized": true})");
  const std::string text = "\u4e2d\n\u4e2d\n\ne\u0301 a";
  std::vector<size_t> cuts;
  for (size_t at = 1; at < text.size(); ++at) {
    if (encoder->MayCut(text, at)) cuts.push_back(at);
  }
  EXPECT_EQ(cuts, (std::vector<size_t>{3, 7, 8, 9, 13}));
}

// Gemma has added tokens for runs of ends of lines. A cut is where they begin or end.
TEST(BpeTokenizer, TokensOfTheRawTextAreBetweenCuts) {
  const auto encoder = EncoderWithAdded(R"({"id": 400, "content": "\n\n", "normalized": false})");
  const std::string text = "\u4e2d\n\n\u4e2d\n\n\na";
  std::vector<size_t> cuts;
  for (size_t at = 1; at < text.size(); ++at) {
    if (encoder->MayCut(text, at)) cuts.push_back(at);
  }
  EXPECT_EQ(cuts, (std::vector<size_t>{3, 8, 11}));
}

// Phi's tokens take the spaces next to them. Other spaces are cuts.
TEST(BpeTokenizer, SpacesThatNoAddedTokenTakesAreCuts) {
  const auto encoder = EncoderWithAdded(R"({"id": 400, "content": "<a>", "rstrip": true,
                                            "normalized": false})");
  const std::string text = "\u4e2d\n\u4e2d<a> \n \u4e2d \n<a>";
  std::vector<size_t> cuts;
  for (size_t at = 1; at < text.size(); ++at) {
    if (encoder->MayCut(text, at)) cuts.push_back(at);
  }
  EXPECT_EQ(cuts, (std::vector<size_t>{3, 7, 16, 17, 18}));
}

// A long run has no cuts, and each of its places is found to be none in little time.
TEST(BpeTokenizer, LongRunsWithoutCuts) {
  for (const char* token : {R"({"id": 400, "content": "<a>", "rstrip": true})",
                            R"({"id": 400, "content": "                                "})"}) {
    const auto encoder = EncoderWithAdded(token);
    const std::string text(1 << 22, ' ');
    const clock_t begin = clock();
    EXPECT_EQ(encoder->NextCut(text, 100, text.size() - 100), std::string::npos);
    EXPECT_LT(clock() - begin, 2 * kSlowdown * CLOCKS_PER_SEC);
  }
}

TEST(BpeTokenizer, Gpt2FilesThatAreWrong) {
  const std::string folder = FreshTestFolder();
  const auto load = [&](const std::string& encoder, const std::string& merges) {
    std::ofstream(folder + "/encoder.json", std::ios::binary) << encoder;
    std::ofstream(folder + "/vocab.bpe", std::ios::binary) << merges;
    return std::string(Tokenizer::Load(folder).status().message());
  };
  const std::string encoder = ReadAll(TokenizerFixture("tiny_gpt2/encoder.json"));
  EXPECT_EQ(load(encoder, ""), "");
  std::ofstream(folder + "/tokenizer_config.json") << R"({"tokenizer_class": "Qwen2Tokenizer"})";
  EXPECT_EQ(load(encoder, ""),
            folder +
                "/tokenizer_config.json: tokenizer_class must be GPT2Tokenizer or of its kind; got "
                "\"Qwen2Tokenizer\"; save the folder with a tokenizer.json");
  std::ofstream(folder + "/tokenizer_config.json") << R"({"add_prefix_space": true})";
  EXPECT_TRUE(absl::StrContains(load(encoder, ""), "add_prefix_space must be false; got true"));
  std::ofstream(folder + "/tokenizer_config.json") << R"({"tokenizer_class": "GPT2TokenizerFast"})";
  std::ofstream(folder + "/added_tokens.json") << R"({"<pad>": 381})";
  EXPECT_TRUE(absl::StrContains(load(encoder, ""), "got \"<pad>\" as 381; save"));
  std::filesystem::remove(folder + "/added_tokens.json");
  EXPECT_EQ(load("[]", ""), folder + "/encoder.json: it must be a JSON object");
  EXPECT_EQ(load(encoder, "#version: 0.2\nt h e\n"),
            folder + "/vocab.bpe: line 2 is not two tokens with a space between them");
  EXPECT_EQ(load(encoder, "q q\n"),
            folder +
                "/encoder.json with vocab.bpe: model.merges: number 1 needs \"qq\", which is "
                "not in model.vocab");
  std::filesystem::remove(folder + "/vocab.bpe");
  EXPECT_TRUE(absl::StrContains(Tokenizer::Load(folder).status().message(), "vocab.bpe"));
  std::filesystem::remove(folder + "/encoder.json");
  EXPECT_TRUE(absl::StrContains(
      Tokenizer::Load(folder).status().message(),
      "holds no tokenizer.model, no tokenizer.json, nor encoder.json with vocab.bpe"));
}

absl::StatusOr<Tokenizer> WithAdded(const std::vector<std::string>& added) {
  Json json = Json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
  int id = 404;
  for (const std::string& text : added) {
    json["added_tokens"].push_back({{"id", id++}, {"content", text}, {"special", false}});
  }
  const std::string path = FreshTestFolder() + "/tokenizer.json";
  std::ofstream(path) << json.dump();
  return Tokenizer::Load(path);
}

// The leftmost added token counts. If several begin there, the longest one counts.
TEST(BpeTokenizer, AddedTokensAreTheLongestThatBegin) {
  const std::string letters[] = {"\xE4\xB8\x96", "\xE4\xBD\xA0"};  // not tokens of model.vocab
  std::vector<std::string> added(letters, letters + 2);
  std::mt19937 random(1);
  const auto word = [&](size_t length) {
    std::string text;
    while (length-- > 0) text += letters[random() % 2];
    return text;
  };
  while (added.size() < 300) {
    const std::string text = word(2 + random() % 9);
    if (std::find(added.begin(), added.end(), text) == added.end()) added.push_back(text);
  }
  const auto tokenizer = WithAdded(added);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text = word(5000);
  std::vector<int32_t> expected;
  for (size_t at = 0; at < text.size();) {
    size_t best = 0, length = 0;
    for (size_t i = 0; i < added.size(); ++i) {
      const bool begins = text.compare(at, added[i].size(), added[i]) == 0;
      if (begins && added[i].size() > length) best = i, length = added[i].size();
    }
    expected.push_back(404 + static_cast<int32_t>(best));
    at += added[best].size();
  }
  EXPECT_EQ(TokensOf(*tokenizer, text), expected);
}

// There are 1,000 added tokens of 1,000 lengths. All begin at every place, and none ends.
TEST(BpeTokenizer, ManyAddedTokensTakeTheTimeOfTheLongest) {
  std::vector<std::string> added;
  for (size_t i = 0; i < 1000; ++i) added.push_back(std::string(i + 2, 'x') + "y");
  const auto tokenizer = WithAdded(added);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text(200'000, 'x');
  const clock_t begin = clock();
  EXPECT_EQ(tokenizer->Decode(TokensOf(*tokenizer, text)), text);
  EXPECT_LT(clock() - begin, 20 * CLOCKS_PER_SEC);
  EXPECT_TRUE(absl::StrContains(WithAdded({std::string(1025, 'x')}).status().message(),
                                "has 1025 bytes, more than 1024"));
}

TEST(UnicodeNormal, FormC) {
  const auto form = [](absl::string_view text) {
    std::string out;
    AppendNfc(text, {}, &out);
    return out;
  };
  EXPECT_EQ(form("e\xCC\x81"), "\xC3\xA9");
  EXPECT_EQ(form("xe\xCC\x81y"), "x\xC3\xA9y");
  EXPECT_EQ(form("\xC3\xA9"), "\xC3\xA9");
  EXPECT_EQ(form("\xE2\x84\xAA"), "K");                               // U+212A
  EXPECT_EQ(form("\xE1\x84\x80\xE1\x85\xA1"), "\xEA\xB0\x80");        // Hangul
  EXPECT_EQ(form("e\xFF\xCC\x81\xE4\xBD"), "e\xFF\xCC\x81\xE4\xBD");  // not UTF-8
  // U+0897 came with Unicode 16, so marks do not move across it.
  EXPECT_EQ(form("a\xE0\xA2\x97\xCC\x81"), "a\xE0\xA2\x97\xCC\x81");
}

}  // namespace
}  // namespace burst
