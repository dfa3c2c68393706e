// Makes tokenizers from JSON (the first line) and from a text (the rest). A tokenizer's JSON gives
// the same tokenizer. Encoded text decodes to its bytes. Each token decodes to text that encodes to
// that token.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/data/tokenizer.h"

namespace burst {
namespace {

void CheckText(const Tokenizer& tokenizer, const std::string& text) {
  std::vector<int32_t> tokens;
  const absl::Status status = tokenizer.Encode(text, &tokens);
  if (!status.ok()) {
    BURST_CHECK(absl::IsInvalidArgument(status)) << status.ToString();
    return;
  }
  for (int32_t token : tokens) {
    BURST_CHECK(token < tokenizer.vocab() && token != tokenizer.end_of_text()) << token;
  }
  BURST_CHECK_EQ(tokenizer.Decode(std::vector<int32_t>(tokens.begin(), tokens.end())), text);
}

void CheckTokenizer(const Tokenizer& tokenizer) {
  BURST_CHECK(tokenizer.vocab() <= 65536) << "tokens are 16 bits: " << tokenizer.vocab();
  const absl::StatusOr<Tokenizer> again = Tokenizer::FromJson(tokenizer.ToJson());
  BURST_CHECK(again.ok()) << tokenizer.ToJson() << ": " << again.status().ToString();
  BURST_CHECK_EQ(again->ToJson(), tokenizer.ToJson());
  BURST_CHECK_EQ(again->vocab(), tokenizer.vocab());
  for (int32_t token = 0; token < tokenizer.vocab(); ++token) {
    const std::string text = tokenizer.Decode({token});
    std::vector<int32_t> tokens;
    const absl::Status status = tokenizer.Encode(text, &tokens);
    BURST_CHECK(status.ok()) << "token " << token << ": " << status.ToString();
    if (token == tokenizer.end_of_text()) continue;
    BURST_CHECK(tokens.size() == 1 && tokens[0] == token) << "token " << token;
  }
  BURST_CHECK_EQ(tokenizer.Decode({-1, static_cast<int32_t>(tokenizer.vocab()), INT32_MAX}), "");
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const std::string json = input.TextUntil('\n'), text = input.Rest();
  const absl::StatusOr<Tokenizer> read = Tokenizer::FromJson(json);
  if (read.ok()) {
    CheckTokenizer(*read);
    CheckText(*read, text);
  } else {
    BURST_CHECK(absl::IsDataLoss(read.status())) << read.status().ToString();
  }
  const absl::StatusOr<Tokenizer> made = Tokenizer::Char({text}, size % 2 == 1);
  if (!made.ok() || text.empty()) return;
  CheckTokenizer(*made);
  std::vector<int32_t> tokens;
  BURST_CHECK(made->Encode(text, &tokens).ok()) << "its own text";
  CheckText(*made, text);
}

}  // namespace burst
