// Reads files of SentencePiece: a text (a byte with its length, then the text) and a
// tokenizer.model (the rest). A loaded model encodes the text to tokens of its vocabulary, whose
// lengths add up to the text. Pieces of the text give the tokens of the whole. Every other file is
// InvalidArgument.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/tokenizer/sentencepiece_tokenizer.h"

namespace burst {
namespace {

void CheckText(const SentencePieceTokenizer& tokenizer, const std::string& given,
               Specials specials) {
  const auto encoder = tokenizer.MakeEncoder(specials);
  std::string text;
  encoder->AppendNormalized(given, /*begins=*/true, &text);
  std::vector<int32_t> tokens;
  const auto end = encoder->EncodePieces(text, 0, text.size(), /*complete=*/true, &tokens);
  BURST_CHECK(end.ok()) << end.status().ToString();
  BURST_CHECK_EQ(*end, text.size());
  size_t length = 0;
  for (const int32_t token : tokens) {
    BURST_CHECK(token >= 0 && token < tokenizer.vocab()) << token;
    length += tokenizer.Length(token, absl::string_view(text).substr(length));
  }
  BURST_CHECK(specials == Specials::kAreTokens || length == text.size()) << length;
  // The text comes in two parts. The first one sees only some of the next bytes.
  std::vector<int32_t> parts;
  const size_t limit = text.size() / 3;
  size_t known = text.size() * 2 / 3;
  while (known < text.size() && static_cast<unsigned char>(text[known]) >= 0x80) ++known;
  auto first = encoder->EncodePieces(absl::string_view(text).substr(0, known), 0, limit,
                                     known == text.size(), &parts);
  BURST_CHECK(first.ok()) << first.status().ToString();
  if (*first == FileEncoder::kMore) {
    parts.clear();
    first = encoder->EncodePieces(text, 0, limit, /*complete=*/true, &parts);
    BURST_CHECK(first.ok()) << first.status().ToString();
  }
  const auto rest = encoder->EncodePieces(text, *first, text.size(), /*complete=*/true, &parts);
  BURST_CHECK(rest.ok()) << rest.status().ToString();
  BURST_CHECK(specials == Specials::kAreTokens || parts == tokens)
      << "cut at " << *first << " of " << text.size();
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const std::string text = input.Text(255);
  const auto tokenizer = SentencePieceTokenizer::FromModel(input.Rest());
  if (!tokenizer.ok()) {
    BURST_CHECK(absl::IsInvalidArgument(tokenizer.status())) << tokenizer.status().ToString();
    BURST_CHECK(!tokenizer.status().message().empty()) << "an error without a word";
    return;
  }
  BURST_CHECK((*tokenizer)->end_of_text() < (*tokenizer)->vocab()) << (*tokenizer)->end_of_text();
  CheckText(**tokenizer, text, Specials::kAreText);
  CheckText(**tokenizer, text, Specials::kAreTokens);
}

}  // namespace burst
