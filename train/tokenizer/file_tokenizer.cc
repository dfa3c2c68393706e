#include "train/tokenizer/file_tokenizer.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "train/tokenizer/places.h"

namespace burst {

std::vector<FormedText::Added>::const_iterator FormedText::NextAdded(size_t at) const {
  return std::lower_bound(added.begin(), added.end(), at,
                          [](const Added& a, size_t place) { return a.begin < place; });
}

void FormedText::AppendAdded(absl::string_view its_text, int32_t token, absl::Span<size_t> places) {
  MovePlaces(text.size(), places);
  added.push_back({text.size(), text.size() + its_text.size(), token});
  absl::StrAppend(&text, its_text);
}

absl::Status FileEncoder::Encode(absl::string_view text, std::vector<int32_t>* tokens) {
  FormedText formed;
  AppendNormalized(text, /*begins=*/true, &formed);
  return EncodePieces(formed, 0, formed.text.size(), /*complete=*/true, tokens).status();
}

// A character of ASCII changes none before it.
size_t FileEncoder::NextCut(absl::string_view text, size_t at, size_t end) const {
  while (at < end && !absl::ascii_isascii(text[at])) ++at;
  return at < end ? at : absl::string_view::npos;
}

size_t FileTokenizer::Length(int32_t token, const FormedText& text, size_t at) const {
  const auto added = text.NextAdded(at);
  if (added != text.added.end() && added->begin == at) return added->end - at;
  return PieceLength(token, absl::string_view(text.text).substr(at));
}

}  // namespace burst
