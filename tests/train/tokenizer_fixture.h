// The tiny tokenizers of tests/train/tokenizers, which tests/interop/make_tokenizer_fixture.py
// made.
#pragma once

#include <gtest/gtest.h>

#include <string>

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

}  // namespace burst
