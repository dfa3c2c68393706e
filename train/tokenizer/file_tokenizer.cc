#include "train/tokenizer/file_tokenizer.h"

namespace burst {

absl::Status FileEncoder::Encode(absl::string_view text, std::vector<int32_t>* tokens) {
  std::string normalized;
  AppendNormalized(text, /*begins=*/true, &normalized);
  return EncodePieces(normalized, 0, normalized.size(), /*complete=*/true, tokens).status();
}

absl::Span<size_t> FileEncoder::TakePlaces(size_t begin, size_t end, absl::Span<size_t>* places) {
  size_t count = 0;
  for (; count < places->size() && (*places)[count] < end; ++count) (*places)[count] -= begin;
  const absl::Span<size_t> taken = places->subspan(0, count);
  places->remove_prefix(count);
  return taken;
}

}  // namespace burst
