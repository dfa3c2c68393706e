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
  FormedText text;
  encoder->AppendNormalized(given, /*begins=*/true, &text);
  const size_t size = text.text.size();
  std::vector<int32_t> tokens;
  const auto end = encoder->EncodePieces(text, 0, size, /*complete=*/true, &tokens);
  BURST_CHECK(end.ok()) << end.status().ToString();
  BURST_CHECK_EQ(*end, size);
  size_t length = 0;
  for (const int32_t token : tokens) {
    BURST_CHECK(token >= 0 && token < tokenizer.vocab()) << token;
    length += tokenizer.Length(token, text, length);
  }
  BURST_CHECK_EQ(length, size);
  // The text comes in two parts. The first one sees only some of the next bytes.
  if (specials == Specials::kAreTokens) return;
  size_t cut = given.size() / 2;
  while (!encoder->MayCut(given, cut)) ++cut;
  FormedText both;
  encoder->AppendNormalized(given.substr(0, cut), /*begins=*/true, &both);
  std::vector<int32_t> parts;
  auto first = encoder->EncodePieces(both, 0, both.text.size() / 2, cut == given.size(), &parts);
  BURST_CHECK(first.ok()) << first.status().ToString();
  encoder->AppendNormalized(given.substr(cut), /*begins=*/cut == 0, &both);
  BURST_CHECK(both.text == text.text) << "cut at " << cut << " of " << given.size();
  if (*first == FileEncoder::kMore) {
    parts.clear();
    first = 0;
  }
  const auto rest = encoder->EncodePieces(both, *first, size, /*complete=*/true, &parts);
  BURST_CHECK(rest.ok()) << rest.status().ToString();
  BURST_CHECK(parts == tokens) << "cut at " << cut << " of " << given.size();
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
