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

// Checks every beginning of a normalized text, with every limit. The encoder must ask for more
// text, or give the pieces of the whole text. Returns how often it did not ask.
inline int64_t CheckBeginnings(FileEncoder* encoder, absl::string_view text,
                               bool cut_before_ascii = false) {
  int64_t known = 0;
  for (size_t limit = 1; limit <= text.size(); ++limit) {
    std::vector<int32_t> whole;
    const auto end = encoder->EncodePieces(text, 0, limit, /*complete=*/true, &whole);
    EXPECT_TRUE(end.ok()) << end.status();
    for (size_t size = limit; size < text.size(); ++size) {
      const bool next_is_ascii = size + 1 >= text.size() || (text[size] & 0x80) == 0;
      if (cut_before_ascii && !next_is_ascii) continue;
      std::vector<int32_t> tokens;
      const auto part =
          encoder->EncodePieces(text.substr(0, size), 0, limit, /*complete=*/false, &tokens);
      EXPECT_TRUE(part.ok()) << part.status();
      if (!end.ok() || !part.ok()) return 0;
      if (*part == FileEncoder::kMore) continue;
      EXPECT_EQ(*part, *end) << limit << " of " << size;
      EXPECT_EQ(tokens, whole) << limit << " of " << size;
      ++known;
    }
  }
  return known;
}

}  // namespace burst
