// Compares texts that several threads encode in pieces with a plain reading of the whole text.
#include "train/data/text_encoder.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "burst/base/parallel.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using Kind = Tokenizer::Kind;

bool Blank(absl::string_view text) {
  return text.find_first_not_of(" \t\r\n") == absl::string_view::npos;
}

// Returns the documents of a single text, line by line. Each reaches to the next.
std::vector<std::string> Documents(const std::string& text) {
  std::vector<std::string> documents(1);
  bool after_blank = false;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    const std::string line = text.substr(begin, end - begin);
    if (!Blank(line) && after_blank && !Blank(documents.back())) documents.emplace_back();
    documents.back() += line;
    after_blank = Blank(line);
    begin = end;
  }
  return documents;
}

class TextEncoderTest : public testing::Test {
 protected:
  void SetUp() override { folder_ = FreshTestFolder(); }
  void TearDown() override { fs::remove_all(folder_); }

  Sources Write(const std::string& option, const std::vector<std::string>& texts) const {
    Sources sources;
    sources.option = option;
    for (size_t i = 0; i < texts.size(); ++i) {
      const std::string path = absl::StrCat(folder_, "/", option, i, ".txt");
      std::ofstream(path, std::ios::binary) << texts[i];
      sources.files.push_back({path, *IdentityOf(path)});
    }
    return sources;
  }

  struct Encoded {
    std::vector<std::vector<uint16_t>> tokens;
    std::vector<std::vector<int64_t>> starts;
    std::string tokenizer;
  };

  absl::StatusOr<Encoded> Encode(const std::vector<const Sources*>& sources, Kind kind,
                                 int64_t piece_bytes) const {
    const std::string payload_folder = folder_ + "/payload";
    fs::create_directories(payload_folder);
    const auto payload = CheckedFileWriter::Create(payload_folder + "/");
    EXPECT_TRUE(payload.ok()) << payload.status();
    const auto texts = EncodeTexts(sources, kind, payload->get(), piece_bytes);
    if (!texts.ok()) return texts.status();
    const std::string bytes = ReadAll(fs::directory_iterator(payload_folder)->path().string());
    EXPECT_EQ(static_cast<int64_t>(bytes.size()), texts->payload_bytes);
    Encoded encoded;
    encoded.tokenizer = texts->tokenizer.ToJson();
    for (const EncodedText& part : texts->parts) {
      encoded.tokens.emplace_back(part.tokens);
      std::memcpy(encoded.tokens.back().data(), bytes.data() + part.tokens_at, 2 * part.tokens);
      encoded.starts.emplace_back(part.starts);
      std::memcpy(encoded.starts.back().data(), bytes.data() + part.starts_at, 8 * part.starts);
    }
    return encoded;
  }

  // Encodes whole texts with the tokenizer's own Encode.
  static absl::StatusOr<Encoded> Plainly(const std::vector<std::vector<std::string>>& parts,
                                         Kind kind) {
    std::vector<std::vector<std::string>> full(parts.size());
    std::vector<absl::string_view> all;
    bool end_of_text = false;
    for (size_t i = 0; i < parts.size(); ++i) {
      for (const std::string& text : parts[i]) {
        if (!text.empty()) full[i].push_back(text);
      }
      end_of_text |= full[i].size() > 1;
      for (const std::string& text : full[i]) all.push_back(text);
    }
    absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Byte(end_of_text);
    if (kind == Kind::kChar) tokenizer = Tokenizer::Char(all, end_of_text);
    if (!tokenizer.ok()) return tokenizer.status();
    Encoded encoded;
    encoded.tokenizer = tokenizer->ToJson();
    for (const std::vector<std::string>& texts : full) {
      std::vector<int32_t> tokens;
      std::vector<int64_t> starts;
      for (const std::string& text : texts) {
        std::vector<std::string> documents = {text};
        if (texts.size() == 1) documents = Documents(text);
        for (const std::string& document : documents) {
          starts.push_back(static_cast<int64_t>(tokens.size()));
          EXPECT_TRUE(tokenizer->Encode(document, &tokens).ok());
        }
        if (end_of_text) tokens.push_back(tokenizer->end_of_text());
      }
      encoded.tokens.emplace_back(tokens.begin(), tokens.end());
      encoded.starts.push_back(starts);
    }
    return encoded;
  }

  std::string folder_;
};

// Short texts have characters of one to four bytes and all kinds of blank lines. They are cut
// everywhere, and some are not UTF-8.
TEST_F(TextEncoderTest, PiecesMakeTheWhole) {
  const ScopedThreadPool pool(3);
  std::mt19937 random(1);
  const char* const symbols[] = {"a",
                                 "b",
                                 " ",
                                 "\t",
                                 "\r\n",
                                 "\n",
                                 "\n",
                                 "\n\n",
                                 "\xC3\xA9",
                                 "\xE2\x82\xAC",
                                 "\xF0\x9F\x98\x80"};
  const char* const bad[] = {
      "\x80", "\xFF", "\xC3", "\xE2\x82", "\xF0\x9F\x98", "\xED\xA0\x80", "\x80\x80\x80\x80\x80"};
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<std::vector<std::string>> parts(1 + random() % 2);
    for (auto& texts : parts) {
      texts.resize(1 + (random() % 3 == 0 ? random() % 4 : 0));
      for (std::string& text : texts) {
        for (size_t i = random() % 40; i > 0; --i) text += symbols[random() % 11];
        if (random() % 16 == 0) text.insert(random() % (text.size() + 1), bad[random() % 7]);
      }
      if (texts[0].empty()) texts[0] = "x";
    }
    std::vector<Sources> sources;
    for (size_t i = 0; i < parts.size(); ++i) {
      sources.push_back(Write(i == 0 ? "data" : "val_data", parts[i]));
    }
    std::vector<const Sources*> pointers;
    for (const Sources& source : sources) pointers.push_back(&source);
    for (const Kind kind : {Kind::kByte, Kind::kChar}) {
      const auto encoded = Encode(pointers, kind, 4 + random() % 12);
      const auto expected = Plainly(parts, kind);
      ASSERT_EQ(encoded.ok(), expected.ok()) << encoded.status() << "\n" << expected.status();
      if (!expected.ok()) {
        ++refused;
        // The error names the first bad byte of the first bad file.
        for (size_t i = 0; i < parts.size(); ++i) {
          for (size_t j = 0; j < parts[i].size(); ++j) {
            const absl::Status status = Tokenizer::Char({parts[i][j]}, false).status();
            if (status.ok()) continue;
            ASSERT_EQ(encoded.status().message(),
                      absl::StrCat("--", sources[i].option, ": ", sources[i].files[j].path, ": ",
                                   status.message()));
            i = parts.size() - 1;
            break;
          }
        }
        continue;
      }
      ASSERT_EQ(encoded->tokenizer, expected->tokenizer);
      ASSERT_EQ(encoded->tokens, expected->tokens);
      ASSERT_EQ(encoded->starts, expected->starts);
    }
  }
  EXPECT_GT(refused, 20);
}

TEST_F(TextEncoderTest, AChangeWhileItIsReadIsAnError) {
  const Sources sources = Write("data", {"some text\n"});
  std::ofstream(sources.files[0].path, std::ios::app) << "more";
  const auto encoded = Encode({&sources}, Kind::kChar, 1 << 20);
  EXPECT_TRUE(absl::StrContains(encoded.status().message(), "was changed while it was read"))
      << encoded.status();
}

}  // namespace
}  // namespace burst
