#include "train/generate/generate.h"

#include <algorithm>

#include "burst/base/check.h"
#include "burst/base/status.h"
#include "model/kv_cache.h"

namespace burst {

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const Tokenizer& tokenizer,
                                                  absl::string_view prompt) {
  std::vector<uint16_t> tokens;
  if (prompt.empty()) {
    if (!tokenizer.Encode("\n", &tokens).ok()) tokens = {0};
  } else {
    BURST_RETURN_IF_ERROR(tokenizer.Encode(prompt, &tokens));
  }
  return std::vector<int32_t>(tokens.begin(), tokens.end());
}

absl::Status Generate(const Transformer& model, const Tokenizer& tokenizer,
                      const std::vector<int32_t>& prompt, const GenerationOptions& options,
                      const std::function<void(absl::string_view)>& emit) {
  BURST_CHECK(!prompt.empty() && options.context >= 1);
  KvCache cache(model.config(), /*batch=*/1, model.dtype(), options.window, model.device());
  std::vector<int32_t> text = prompt;
  int64_t read = 0;  // tokens of the text that have been through the model
  for (int64_t i = 0; i < options.tokens; ++i) {
    int64_t length = static_cast<int64_t>(text.size());
    if (cache.length() + length - read > options.context) {
      // Beyond what it was trained on, the model reads the end of the text afresh.
      cache.Clear();
      read = length - std::min(length, std::max<int64_t>(1, options.context / 2));
    }
    const Tensor tokens = Tensor::FromVector(std::vector<int32_t>(text.begin() + read, text.end()),
                                             {1, length - read});
    BURST_ASSIGN_OR_RETURN(const Tensor logits, model.Decode(cache, tokens));
    read = length;
    // The model's vocabulary may be larger than the tokenizer's.
    const std::vector<float> known =
        logits.View({-1}).Slice(0, 0, tokenizer.vocab()).ToVector<float>();
    const int32_t token = SampleToken(known, options.sampling, i);
    if (token == tokenizer.end_of_text()) break;
    text.push_back(token);
    emit(tokenizer.Decode({token}));
  }
  return absl::OkStatus();
}

}  // namespace burst
