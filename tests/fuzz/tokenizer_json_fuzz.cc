// Reads files of tokenizers: a tokenizer.json (up to the first zero byte) and a text (the rest), or
// GPT-2's two files, separated by a tab. A loaded tokenizer's JSON gives the same tokenizer. Its
// tokens are in its vocabulary and decode to the text. Pieces of the text give the tokens of the
// whole. Every other file is InvalidArgument.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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
  std::string text;
  encoder.AppendNormalized(given, /*begins=*/true, &text);
  std::vector<int32_t> tokens;
  const absl::StatusOr<size_t> end = encoder.EncodePieces(text, 0, text.size(), true, &tokens);
  if (!end.ok()) {
    BURST_CHECK(absl::IsResourceExhausted(end.status())) << end.status().ToString();
    return;
  }
  BURST_CHECK_EQ(*end, text.size());
  std::string decoded;
  for (int32_t token : tokens) {
    BURST_CHECK(token >= 0 && token < tokenizer->vocab()) << token;
    absl::StrAppend(&decoded, tokenizer->Bytes(token));
  }
  BURST_CHECK_EQ(decoded, text);
  // The text comes in two parts. The first one sees only some of the next bytes.
  std::vector<int32_t> parts;
  const size_t limit = text.size() / 3, known = text.size() * 2 / 3;
  absl::StatusOr<size_t> first = encoder.EncodePieces(absl::string_view(text).substr(0, known), 0,
                                                      limit, /*complete=*/false, &parts);
  if (!first.ok()) return;
  if (*first == BpeEncoder::kMore) {
    parts.clear();
    first = encoder.EncodePieces(text, 0, limit, /*complete=*/true, &parts);
    BURST_CHECK(first.ok()) << first.status().ToString();
  }
  const auto rest = encoder.EncodePieces(text, *first, text.size(), /*complete=*/true, &parts);
  BURST_CHECK(rest.ok()) << rest.status().ToString();
  BURST_CHECK(parts == tokens) << "cut at " << *first << " of " << text.size();
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
