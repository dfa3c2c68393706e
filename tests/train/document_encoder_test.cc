#include "train/data/document_encoder.h"

#include <gtest/gtest.h>
#include <time.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"

namespace burst {
namespace {

struct Encoded {
  std::vector<int32_t> tokens;
  std::vector<int64_t> starts;
  int64_t bytes = 0;
  SkippedLines skipped;
};

class DocumentEncoderTest : public testing::TestWithParam<const char*> {
 protected:
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  }

  absl::StatusOr<Encoded> Encode(const Tokenizer& tokenizer, const DocumentFormat& format,
                                 int64_t piece_bytes) const {
    const auto sources = FindSources("data", folder_);
    EXPECT_TRUE(sources.ok()) << sources.status();
    Progress progress("encoding", 1);
    Encoded encoded;
    const auto sink = [&](const EncodedPiece& piece) {
      for (int64_t start : piece.starts) {
        encoded.starts.push_back(static_cast<int64_t>(encoded.tokens.size()) + start);
      }
      encoded.tokens.insert(encoded.tokens.end(), piece.tokens.begin(), piece.tokens.end());
      encoded.bytes += piece.bytes;
      encoded.skipped.Add(piece.skipped);
      return absl::OkStatus();
    };
    const absl::Status status =
        EncodeDocuments(*sources, tokenizer, format, &progress, sink, piece_bytes);
    if (!status.ok()) return status;
    return encoded;
  }

  const std::string folder_ = FreshTestFolder();
};
INSTANTIATE_TEST_SUITE_P(Tokenizers, DocumentEncoderTest,
                         testing::Values("tiny", "tiny_gpt2", "sentencepiece/llama",
                                         "sentencepiece/gemma", "sentencepiece/phrases"));

std::string Gzip(const std::string& text) {
  constexpr int kGzip = 16;
  z_stream stream = {};
  deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + kGzip, 8, Z_DEFAULT_STRATEGY);
  std::string in = text, out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(in.data());
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string Zstd(const std::string& text) {
  ZSTD_CCtx* const context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return out;
}

// Returns words, all kinds of space, combining marks, added tokens, and bytes that are not UTF-8.
std::string RandomText(std::mt19937* random, size_t bytes) {
  const std::string parts[] = {"the ",
                               "ring",
                               "\n",
                               "\n\n",
                               " \n",
                               "   ",
                               "12",
                               "e",
                               "\xCC\x81",
                               "\xCC\xA3",
                               "\xE4\xBD\xA0",
                               "<tool_call>",
                               "'s",
                               "\xFF",
                               "...",
                               "\r\n",
                               "\xF0\x9F\x98\x80",
                               "\t",
                               "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};
  std::string text;
  while (text.size() < bytes) text += parts[(*random)() % std::size(parts)];
  return text;
}

// Tokens equal those of the whole text for any pieces, even pieces shorter than a character.
TEST_P(DocumentEncoderTest, PiecesDoNotShow) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const ScopedThreadPool pool(3);
  std::mt19937 random(1);
  for (int i = 0; i < 40; ++i) {
    const std::string text = RandomText(&random, 1 + random() % 400);
    Write("text", text);
    const std::vector<int32_t> whole = TokensOf(tokenizer, text);
    for (int64_t piece_bytes : {1, 2, 3, 7, 20, 64, 1000}) {
      const auto encoded = Encode(tokenizer, {DocumentsAre::kFiles, {}}, piece_bytes);
      ASSERT_TRUE(encoded.ok()) << encoded.status();
      EXPECT_EQ(encoded->tokens, whole) << "text " << i << ", pieces of " << piece_bytes;
      EXPECT_EQ(encoded->starts, std::vector<int64_t>{0});
      EXPECT_EQ(encoded->bytes, static_cast<int64_t>(text.size()));
    }
  }
}

// Added tokens are found in the raw text, in the normalized text, or with the spaces next to them.
// No piece begins or ends in one.
TEST_F(DocumentEncoderTest, PiecesDoNotCutAddedTokens) {
  const nlohmann::json forms = nlohmann::json::parse(ReadAll(TokenizerFixture("forms.json")));
  const ScopedThreadPool pool(3);
  for (const auto& [name, form] : forms.items()) {
    const std::string base = form["base"];
    nlohmann::json json =
        nlohmann::json::parse(ReadAll(TokenizerFixture(base + "/tokenizer.json")));
    json.update(form["changes"]);
    const std::string path = testing::TempDir() + "/tokenizer.json";
    std::ofstream(path) << json.dump();
    const auto tokenizer = Tokenizer::Load(path);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    std::mt19937 random(1);
    for (int i = 0; i < 6; ++i) {
      std::string text;
      while (text.size() < 300) {
        const nlohmann::json& added = json["added_tokens"];
        const nlohmann::json& token = added[random() % added.size()];
        absl::StrAppend(&text, RandomText(&random, 1 + random() % 20),
                        token["content"].get<std::string>());
      }
      Write("text", text);
      const std::vector<int32_t> whole = TokensOf(*tokenizer, text);
      for (const int64_t piece_bytes : {1, 3, 20}) {
        const auto encoded = Encode(*tokenizer, {DocumentsAre::kFiles, {}}, piece_bytes);
        ASSERT_TRUE(encoded.ok()) << encoded.status();
        EXPECT_EQ(encoded->tokens, whole) << name << " " << i << ", pieces of " << piece_bytes;
      }
    }
  }
}

// A word takes many pieces, because it is longer than the text that is read early.
TEST_P(DocumentEncoderTest, AWordOfManyPieces) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const ScopedThreadPool pool(3);
  // SentencePiece's library takes longer.
  const bool bpe = tokenizer.kind() == Tokenizer::Kind::kBpe;
  const std::string word(bpe ? 3 << 20 : 3 << 17, 'x');
  const std::string text = "a " + word + " b" + std::string(70000, ' ') + "c";
  Write("text", text);
  const auto encoded = Encode(tokenizer, {DocumentsAre::kFiles, {}}, 1 << 16);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  EXPECT_EQ(encoded->tokens, TokensOf(tokenizer, text));
}

// A text without cuts is searched for one once, not once for each of its many pieces.
TEST_F(DocumentEncoderTest, ATextWithoutCutsTakesTheTimeOfItsLength) {
  nlohmann::json json = nlohmann::json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
  json["added_tokens"] = {{{"id", 400}, {"content", std::string(32, '\n')}, {"special", true}}};
  const std::string path = testing::TempDir() + "/tokenizer.json";
  std::ofstream(path) << json.dump();
  const auto tokenizer = Tokenizer::Load(path);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text = "a" + std::string(1 << 20, '\n') + "b";
  Write("text", text);
  const ScopedThreadPool pool(3);
  const clock_t begin = clock();
  const auto encoded = Encode(*tokenizer, {DocumentsAre::kFiles, {}}, 1 << 11);
  EXPECT_LT(clock() - begin, 2 * kSlowdown * CLOCKS_PER_SEC);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  EXPECT_EQ(encoded->tokens, TokensOf(*tokenizer, text));
}

// A document starts with the token that holds its first character that is not blank.
TEST_P(DocumentEncoderTest, BlankLinesSeparateDocuments) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const ScopedThreadPool pool(3);
  const std::string text = "\n  \none\ntwo\n\nthree\n \t\n\n  four\n\n\n";
  Write("text", text);
  const std::vector<int32_t> tokens = TokensOf(tokenizer, text);
  std::vector<int64_t> expected = {0};
  const size_t added = tokenizer.Decode(tokens).size() - text.size();  // a space before the text
  for (const char* first : {"three", "four"}) {
    const size_t at = text.find(first) + added;
    size_t end = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
      end += tokenizer.Decode({tokens[i]}).size();
      if (end <= at) continue;
      expected.push_back(static_cast<int64_t>(i));
      break;
    }
  }
  for (int64_t piece_bytes : {1, 2, 3, 5, 8, 100}) {
    const auto encoded = Encode(tokenizer, {DocumentsAre::kBlankLines, {}}, piece_bytes);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    EXPECT_EQ(encoded->tokens, tokens);
    EXPECT_EQ(encoded->starts, expected) << piece_bytes;
  }
}

TEST_P(DocumentEncoderTest, LinesOfJson) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const ScopedThreadPool pool(3);
  const std::vector<std::string> texts = {"one", "", "two\n\nlines", "caf\xC3\xA9 <|endoftext|>",
                                          std::string(500, 'y')};
  std::string lines = "\n";
  std::vector<int32_t> tokens;
  std::vector<int64_t> starts;
  for (const std::string& text : texts) {
    lines += nlohmann::json{{"id", 1}, {"text", text}}.dump() + (text == "one" ? "\r\n\n" : "\n");
    starts.push_back(static_cast<int64_t>(tokens.size()));
    for (int32_t token : TokensOf(tokenizer, text)) tokens.push_back(token);
  }
  for (bool newline : {true, false}) {
    Write("a.jsonl", newline ? lines : lines.substr(0, lines.size() - 1));
    for (int64_t piece_bytes : {1, 2, 3, 10, 40, 1000}) {
      const auto encoded = Encode(tokenizer, {DocumentsAre::kJsonLines, {}}, piece_bytes);
      ASSERT_TRUE(encoded.ok()) << encoded.status();
      EXPECT_EQ(encoded->tokens, tokens) << piece_bytes;
      EXPECT_EQ(encoded->starts, starts) << piece_bytes;
    }
  }
  const struct {
    const char *line, *message;
  } bad[] = {
      {"{\"text\": 1}", "it has no text with the key 'text' (--field)"},
      {"{\"texts\": \"\"}", "it has no text with the key 'text' (--field)"},
      {"[]", "it must be a JSON object"},
      {"{\"text\": \"a\", \"text\": null}", "it has no text with the key 'text' (--field)"},
      {"{\"a\": \"\\ud800\", \"text\": NaN}", "it has no text with the key 'text' (--field)"},
      {"{\"text\": \"\xFF\"}", "it is not JSON at byte 11"},
      {"{\"text\": \"a\"", "it is not JSON at byte 13"}};
  for (const auto& c : bad) {
    Write("a.jsonl", std::string("{\"text\": \"\"}\n") + c.line + "\n\n{\"text\": \"b\"}\n");
    for (int64_t piece_bytes : {1, 100}) {
      DocumentFormat format = {DocumentsAre::kJsonLines, {}};
      const std::string message = "--data: " + folder_ + "/a.jsonl: line 2: " + c.message;
      EXPECT_EQ(Encode(tokenizer, format, piece_bytes).status().message(), message);
      format.lines.bad_lines = BadLines::kSkip;
      const auto encoded = Encode(tokenizer, format, piece_bytes);
      ASSERT_TRUE(encoded.ok()) << encoded.status();
      EXPECT_EQ(encoded->tokens, TokensOf(tokenizer, "b"));
      EXPECT_EQ(encoded->starts, (std::vector<int64_t>{0, 0}));
      EXPECT_EQ(encoded->skipped.lines, 1);
      EXPECT_EQ(encoded->skipped.first, message);
    }
  }
}

// The time grows with the length of a text with a mask, not with its square.
TEST_P(DocumentEncoderTest, ALongTextWithAMask) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  if (GetParam() == std::string("sentencepiece/phrases")) return;  // a text is one piece
  std::string text;
  while (text.size() < 3'000'000) text += "the ring of blocks\n";
  const nlohmann::json line = {{"text", text}, {"counted", {{0, text.size()}}}};
  Write("a.jsonl", line.dump() + "\n");
  const clock_t begin = clock();
  const auto encoded = Encode(tokenizer, {DocumentsAre::kJsonLines, {}}, 1 << 20);
  EXPECT_LT(clock() - begin, 20 * CLOCKS_PER_SEC);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  EXPECT_EQ(encoded->tokens, TokensOf(tokenizer, text));
}

// Lines are read as Python's json reads them, with U+FFFD for half of a surrogate pair.
TEST_P(DocumentEncoderTest, LinesOfPythonsJson) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const struct {
    const char *line, *text;
  } cases[] = {
      {R"({"text": "bad \\u \ud83d lone \uDE00\ud83d\ude00"})",
       "bad \\u \xEF\xBF\xBD lone \xEF\xBF\xBD\xF0\x9F\x98\x80"},
      {R"({"score": NaN, "b": [-Infinity, Infinity], "text": "NaN \\"})", "NaN \\"},
      {R"({"text": "one", "text": "two", "in": {"text": "three"}})", "two"},
  };
  for (const auto& c : cases) {
    Write("a.jsonl", c.line);
    const auto encoded = Encode(tokenizer, {DocumentsAre::kJsonLines, {}}, 100);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    EXPECT_EQ(encoded->tokens, TokensOf(tokenizer, c.text)) << c.line;
  }
}

// Packed lines have the tokens of the unpacked ones, also in two parts. Damage is an error.
TEST_P(DocumentEncoderTest, PackedLines) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const ScopedThreadPool pool(3);
  std::string lines;
  for (int i = 0; i < 3000; ++i) {
    lines += nlohmann::json{{"text", "line " + std::to_string(i * i)}}.dump() + "\n";
  }
  Write("a.jsonl", lines);
  const auto plain = Encode(tokenizer, {DocumentsAre::kJsonLines, {}}, 1000);
  ASSERT_TRUE(plain.ok()) << plain.status();
  std::filesystem::remove(folder_ + "/a.jsonl");
  const std::string first = lines.substr(0, lines.size() / 2), second = lines.substr(first.size());
  for (const auto& [name, pack] : {std::pair("a.jsonl.gz", Gzip), std::pair("a.jsonl.zst", Zstd)}) {
    const std::string packed = pack(lines);
    for (const std::string& content : {packed, pack(first) + pack(second)}) {
      Write(name, content);
      for (int64_t piece_bytes : {50, 1 << 20}) {
        const auto encoded = Encode(tokenizer, {DocumentsAre::kJsonLines, {}}, piece_bytes);
        ASSERT_TRUE(encoded.ok()) << encoded.status();
        EXPECT_EQ(encoded->tokens, plain->tokens) << name;
        EXPECT_EQ(encoded->starts, plain->starts) << name;
        EXPECT_EQ(encoded->bytes, static_cast<int64_t>(lines.size()));
      }
    }
    const auto error_of = [&](const std::string& content) {
      Write(name, content);
      return std::string(
          Encode(tokenizer, {DocumentsAre::kJsonLines, {}}, 1000).status().message());
    };
    EXPECT_TRUE(absl::StrContains(error_of(packed.substr(0, packed.size() - 1)),
                                  std::string(name) + ": its packed data ends"));
    std::string damaged = packed;
    damaged[damaged.size() - (std::string(name) == "a.jsonl.gz" ? 5 : 1)] ^= 1;  // a checksum
    EXPECT_TRUE(absl::StrContains(error_of(damaged), "data is damaged"));
    std::filesystem::remove(folder_ + "/" + name);
  }
}

// The sink's error ends the encoding, also with more pieces than threads.
TEST_P(DocumentEncoderTest, StopsAtAnError) {
  const Tokenizer tokenizer = LoadFixture(GetParam());
  const ScopedThreadPool pool(3);
  Write("text", std::string(1000, 'a'));
  const auto sources = FindSources("data", folder_);
  Progress progress("encoding", 1);
  int calls = 0;
  const auto sink = [&](const EncodedPiece&) {
    return ++calls == 5 ? absl::ResourceExhaustedError("full") : absl::OkStatus();
  };
  const absl::Status status = EncodeDocuments(*sources, tokenizer, {DocumentsAre::kFiles, {}},
                                              &progress, sink, /*piece_bytes=*/10);
  EXPECT_EQ(status, absl::ResourceExhaustedError("full"));
  EXPECT_EQ(calls, 5);
}

}  // namespace
}  // namespace burst
