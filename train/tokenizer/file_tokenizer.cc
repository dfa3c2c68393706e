#include "train/tokenizer/file_tokenizer.h"

namespace burst {

absl::Status FileEncoder::Encode(absl::string_view text, std::vector<int32_t>* tokens) {
  std::string normalized;
  AppendNormalized(text, /*begins=*/true, &normalized);
  return EncodePieces(normalized, 0, normalized.size(), /*complete=*/true, tokens).status();
}

}  // namespace burst
