// Reads files of tokenizers: a tokenizer.json (up to the first zero byte) and a text (the rest), or
// GPT-2's two files, separated by a tab. A loaded tokenizer's JSON gives the same tokenizer. Its
// tokens are in its vocabulary, and their lengths add up to the text. Pieces of the text give the
// tokens of the whole. Every other file is InvalidArgument.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/tokenizer/bpe_file.h"
#include "train/tokenizer/bpe_tokenizer.h"
#include "train/tokenizer/prompt_template.h"

namespace burst {
namespace {

void CheckText(const std::shared_ptr<const BpeTokenizer>& tokenizer, const std::string& given,
               Specials specials) {
  BpeEncoder encoder(tokenizer, specials);
  FormedText text;
  encoder.AppendNormalized(given, /*begins=*/true, &text);
  std::vector<int32_t> tokens;
  const size_t size = text.text.size();
  const absl::StatusOr<size_t> end = encoder.EncodePieces(text, 0, size, true, &tokens);
  if (!end.ok()) {
    BURST_CHECK(absl::IsResourceExhausted(end.status())) << end.status().ToString();
    return;
  }
  BURST_CHECK_EQ(*end, size);
  size_t length = 0;
  for (int32_t token : tokens) {
    BURST_CHECK(token >= 0 && token < tokenizer->vocab()) << token;
    length += tokenizer->Length(token, text, length);
  }
  BURST_CHECK_EQ(length, size);
  // The text comes in two parts. The first one sees only some of the next bytes.
  size_t cut = given.size() / 2;
  while (cut < given.size() && (cut == 0 || !encoder.MayCut(given, cut))) ++cut;
  FormedText both;
  encoder.AppendNormalized(absl::string_view(given).substr(0, cut), /*begins=*/true, &both);
  std::vector<int32_t> parts;
  absl::StatusOr<size_t> first =
      encoder.EncodePieces(both, 0, both.text.size() / 2, cut == given.size(), &parts);
  encoder.AppendNormalized(absl::string_view(given).substr(cut), /*begins=*/false, &both);
  BURST_CHECK(both.text == text.text) << "cut at " << cut << " of " << given.size();
  if (!first.ok()) return;
  if (*first == BpeEncoder::kMore) {
    parts.clear();
    first = 0;
  }
  const auto rest = encoder.EncodePieces(both, *first, size, /*complete=*/true, &parts);
  BURST_CHECK(rest.ok()) << rest.status().ToString();
  BURST_CHECK(parts == tokens) << "cut at " << cut << " of " << given.size();
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  std::string json = input.TextUntil('\0');
  if (!json.empty() && json.back() == '\t') {
    const absl::StatusOr<std::string> of_gpt2 =
        TokenizerJsonOfGpt2("encoder.json", json, "vocab.bpe", input.TextUntil('\0'));
    if (!of_gpt2.ok()) {
      BURST_CHECK(absl::IsInvalidArgument(of_gpt2.status())) << of_gpt2.status().ToString();
      return;
    }
    json = *of_gpt2;
  }
  const std::string text = input.Rest();
  const auto beginning = TemplateBeginning(json);
  BURST_CHECK(beginning.ok() || absl::IsInvalidArgument(beginning.status()))
      << beginning.status().ToString();
  const auto tokenizer = BpeTokenizer::FromTokenizerJson(json);
  if (!tokenizer.ok()) {
    BURST_CHECK(absl::IsInvalidArgument(tokenizer.status())) << tokenizer.status().ToString();
    BURST_CHECK(!tokenizer.status().message().empty()) << "an error without a word";
    return;
  }
  BURST_CHECK((*tokenizer)->vocab() >= 256) << (*tokenizer)->vocab();
  BURST_CHECK((*tokenizer)->end_of_text() < (*tokenizer)->vocab()) << (*tokenizer)->end_of_text();
  CheckText(*tokenizer, text, Specials::kAreText);
  CheckText(*tokenizer, text, Specials::kAreTokens);
}

}  // namespace burst
