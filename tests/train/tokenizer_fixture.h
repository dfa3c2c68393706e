// The tiny tokenizers of tests/train/tokenizers, which tests/interop/make_tokenizer_fixture.py
// made.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/testing/subprocess.h"
#include "train/data/tokenizer.h"

namespace burst {

// Returns the path of "tiny", "tiny_gpt2" or "expected.json".
inline std::string TokenizerFixture(const std::string& name) {
  return ProgramPath("tests/train/tokenizers/" + name);
}

inline Tokenizer LoadFixture(const std::string& name) {
  absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(TokenizerFixture(name));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

inline std::vector<int32_t> TokensOf(const Tokenizer& tokenizer, absl::string_view text,
                                     Specials specials = Specials::kAreText) {
  std::vector<int32_t> tokens;
  const absl::Status status = tokenizer.Encode(text, &tokens, specials);
  EXPECT_TRUE(status.ok()) << status;
  return tokens;
}

// Checks every beginning of a text that may be cut, with every limit. The encoder must ask for more
// text, or give the pieces of the whole text. Returns how often it did not ask.
inline int64_t CheckBeginnings(FileEncoder* encoder, absl::string_view text) {
  int64_t known = 0;
  FormedText whole;
  encoder->AppendNormalized(text, /*begins=*/true, &whole);
  for (size_t cut = 1; cut < text.size(); ++cut) {
    if (!encoder->MayCut(text, cut)) continue;
    FormedText part, both;
    encoder->AppendNormalized(text.substr(0, cut), /*begins=*/true, &part);
    both = part;
    encoder->AppendNormalized(text.substr(cut), /*begins=*/false, &both);
    EXPECT_EQ(both.text, whole.text) << cut;
    for (size_t limit = 1; limit <= part.text.size(); ++limit) {
      std::vector<int32_t> expected, tokens;
      const auto end = encoder->EncodePieces(whole, 0, limit, /*complete=*/true, &expected);
      const auto got = encoder->EncodePieces(part, 0, limit, /*complete=*/false, &tokens);
      EXPECT_TRUE(end.ok() && got.ok()) << end.status() << got.status();
      if (!end.ok() || !got.ok()) return 0;
      if (*got == FileEncoder::kMore) continue;
      EXPECT_EQ(*got, *end) << limit << " of " << cut;
      EXPECT_EQ(tokens, expected) << limit << " of " << cut;
      ++known;
    }
  }
  return known;
}

}  // namespace burst
