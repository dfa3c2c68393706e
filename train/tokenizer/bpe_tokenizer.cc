#include "train/tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "train/data/utf8.h"
#include "train/tokenizer/json_fields.h"
#include "train/tokenizer/places.h"

namespace burst {
namespace {

// Names of the token in GPT-2 and Qwen, in Llama 3, and in other families; the last one is
// DeepSeek's.
constexpr absl::string_view kEndOfTextNames[] = {
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>",
    "<\xEF\xBD\x9C"
    "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"};

constexpr size_t kCharacter = 4;  // the most bytes of a character
constexpr size_t kSpaces = 64;    // bytes on each side of a cut in which spaces may end

// Returns whether a character is one of Unicode's White_Space.
bool IsSpace(uint32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// Returns the end of the spaces that begin at `begin`.
size_t EndOfSpaces(absl::string_view text, size_t begin) {
  size_t end = begin;
  for (size_t next = begin; next < text.size() && IsSpace(NextCodePoint(text, &next));) end = next;
  return end;
}

// Returns where the spaces at the end of the text begin, at least `least`.
size_t BeginOfSpaces(absl::string_view text, size_t least) {
  size_t begin = text.size();
  while (begin > least) {
    size_t before = begin - 1;
    while (before > least && ContinuesCharacter(text[before])) --before;
    size_t next = before;
    if (!IsSpace(NextCodePoint(text, &next))) break;
    begin = before;
  }
  return begin;
}

// Returns the end of the run that begins at `begin`, and whether its bytes are UTF-8.
std::pair<size_t, bool> RunAt(absl::string_view text, size_t begin) {
  bool is_utf8 = false;
  size_t at = begin;
  while (at < text.size()) {
    size_t next = at;
    const bool valid = NextCodePoint(text, &next) != kCodePoints;
    if (at > begin && valid != is_utf8) break;
    is_utf8 = valid;
    at = valid ? next : at + 1;
  }
  return {at, is_utf8};
}

}  // namespace

absl::Status BpeTokenizer::AddedTokens::Take(
    std::vector<std::pair<std::string, const AddedToken*>> added) {
  if (added.empty()) return absl::OkStatus();
  std::sort(added.begin(), added.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const AddedToken *strips_right = nullptr, *begins_with_space = nullptr;
  for (size_t i = 0; i < added.size(); ++i) {
    const auto& [text, token] = added[i];
    if (i > 0 && added[i - 1].first == text) {
      return InvalidField("added_tokens: ", Shown(added[i - 1].second->text), " and ",
                          Shown(token->text), " have the same text, which is not supported");
    }
    longest = std::max(longest, text.size());
    begins[static_cast<uint8_t>(text[0])] = true;
    for (const char byte : text) has[static_cast<uint8_t>(byte)] = true;
    of_texts |= !token->special;
    strip |= token->strips_left || token->strips_right;
    if (token->strips_right) strips_right = token;
    if (EndOfSpaces(text, 0) > 0) begins_with_space = token;
  }
  if (strips_right != nullptr && begins_with_space != nullptr) {
    return InvalidField("added_tokens: ", Shown(strips_right->text),
                        " takes the spaces after it (rstrip), with which ",
                        Shown(begins_with_space->text), " begins, which is not supported");
  }
  // The range of tokens that begin with a node's text. A node's continuations are made when it is
  // reached.
  struct Range {
    size_t begin, end, depth;
  };
  std::vector<Range> ranges = {{0, added.size(), 0}};
  nodes.emplace_back();
  for (size_t i = 0; i < nodes.size(); ++i) {
    auto [begin, end, depth] = ranges[i];
    for (; begin < end && added[begin].first.size() == depth; ++begin) {
      nodes[i].token = added[begin].second->id;
    }
    nodes[i].first = static_cast<int32_t>(nodes.size());
    for (size_t next = begin; begin < end; begin = next) {
      const char byte = added[begin].first[depth];
      while (next < end && added[next].first[depth] == byte) ++next;
      nodes.emplace_back();
      nodes.back().byte = static_cast<uint8_t>(byte);
      ranges.push_back({begin, next, depth + 1});
    }
    nodes[i].count = static_cast<int32_t>(nodes.size()) - nodes[i].first;
  }
  return absl::OkStatus();
}

std::pair<int32_t, size_t> BpeTokenizer::AddedTokens::Longest(absl::string_view text) const {
  std::pair<int32_t, size_t> found = {-1, 0};
  const Node* node = nodes.data();
  for (size_t at = 0; at < text.size(); ++at) {
    const auto byte = static_cast<uint8_t>(text[at]);
    const Node *const begin = nodes.data() + node->first, *const end = begin + node->count;
    node = std::lower_bound(begin, end, byte, [](const Node& a, uint8_t b) { return a.byte < b; });
    if (node == end || node->byte != byte) break;
    if (node->token >= 0) found = {node->token, at + 1};
  }
  return found;
}

absl::StatusOr<std::shared_ptr<const BpeTokenizer>> BpeTokenizer::FromTokenizerJson(
    absl::string_view text) {
  BURST_ASSIGN_OR_RETURN(BpeFile file, ParseTokenizerJson(text));
  BURST_ASSIGN_OR_RETURN(BpeVocabulary vocabulary, BpeVocabulary::Create(file));
  std::shared_ptr<BpeTokenizer> tokenizer(new BpeTokenizer(std::move(file), std::move(vocabulary)));
  for (const TextForm::Split& split : tokenizer->file_.form.splits) {
    absl::StatusOr<std::shared_ptr<const SplitPattern>> pattern =
        SplitPattern::Compile(split.pattern);
    if (!pattern.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("pre_tokenizer: ", pattern.status().message()));
    }
    tokenizer->patterns_.push_back(*std::move(pattern));
  }
  BURST_RETURN_IF_ERROR(tokenizer->TakeAdded());
  return std::shared_ptr<const BpeTokenizer>(std::move(tokenizer));
}

absl::Status BpeTokenizer::TakeAdded() {
  size_t best = std::size(kEndOfTextNames);
  std::vector<std::pair<std::string, const AddedToken*>> raw, normalized;
  for (const AddedToken& token : file_.added) {
    added_[token.id] = &token;
    if (token.normalized) {
      std::string text;
      file_.form.AppendNormalized(token.text, /*begins_part=*/true, {}, &text);
      normalized.emplace_back(std::move(text), &token);
    } else {
      raw.emplace_back(token.text, &token);
    }
    const size_t place = std::find(std::begin(kEndOfTextNames), std::end(kEndOfTextNames),
                                   absl::string_view(token.text)) -
                         std::begin(kEndOfTextNames);
    if (place < best) best = place, end_of_text_ = token.id;
  }
  // In tokenizers, the part after such a token may begin the text, too.
  const TextForm& form = file_.form;
  const bool adds = form.nfc || form.normalizer_marks.prefix != SpaceMarks::Prefix::kNone;
  if (!normalized.empty() && adds && form.marks.prefix == SpaceMarks::Prefix::kFirstPart) {
    return InvalidField(
        "added_tokens: ", Shown(normalized[0].second->text),
        " is found in the normalized text (normalized), which is not supported with "
        "prepend_scheme first");
  }
  BURST_RETURN_IF_ERROR(raw_.Take(std::move(raw)));
  return normalized_.Take(std::move(normalized));
}

size_t BpeTokenizer::PieceLength(int32_t token, absl::string_view text) const {
  const absl::string_view bytes = Bytes(token);
  const size_t marks = file_.of_bytes ? 0 : absl::c_count(bytes, ' ');
  return std::min(text.size(), bytes.size() + marks * (kSpaceMark.size() - 1));
}

std::unique_ptr<FileEncoder> BpeTokenizer::MakeEncoder(Specials specials) const {
  return std::make_unique<BpeEncoder>(shared_from_this(), specials);
}

BpeEncoder::BpeEncoder(std::shared_ptr<const BpeTokenizer> tokenizer, Specials specials)
    : tokenizer_(std::move(tokenizer)), specials_(specials), merger_(tokenizer_->vocabulary_) {
  for (const auto& pattern : tokenizer_->patterns_) matchers_.emplace_back(pattern);
}

// The longest token that begins first counts. As in tokenizers, a special token that is text hides
// the tokens that begin in it.
template <typename Body>
void BpeEncoder::ForEachPart(const BpeTokenizer::AddedTokens& added, absl::string_view text,
                             const Body& body) const {
  size_t done = 0;  // the end of the last token
  const bool searches = specials_ == Specials::kAreText ? added.of_texts : !added.nodes.empty();
  for (size_t at = searches ? 0 : text.size(); at < text.size();) {
    if (!added.begins[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    const auto [id, length] = added.Longest(text.substr(at));
    if (id < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = *tokenizer_->added_.at(id);
    size_t begin = at, end = at + length;
    at = end;
    if (token.special && specials_ == Specials::kAreText) continue;
    if (token.strips_left) begin = BeginOfSpaces(text.substr(0, begin), done);
    if (token.strips_right) end = EndOfSpaces(text, end);
    if (begin > done) body(done, begin, -1);
    body(begin, end, id);
    done = end;
  }
  if (done < text.size()) body(done, text.size(), -1);
}

// The text is cut at the raw tokens. Each part is normalized, and cut at the normalized tokens.
void BpeEncoder::AppendWithPlaces(absl::string_view text, bool begins, absl::Span<size_t> places,
                                  FormedText* out) const {
  const TextForm& form = tokenizer_->file_.form;
  ForEachPart(tokenizer_->raw_, text, [&](size_t begin, size_t end, int32_t token) {
    absl::Span<size_t> inside = TakePlaces(begin, end, &places);
    absl::string_view part = text.substr(begin, end - begin);
    if (token >= 0) return out->AppendAdded(part, token, inside);
    const bool begins_part = begins || begin > 0;
    std::string normalized;
    if (form.normalizes()) {
      form.AppendNormalized(part, begins_part, inside, &normalized);
      part = normalized;
    }
    const auto append = [&, begins = begins && begin == 0](size_t begin, size_t end,
                                                           int32_t token) {
      const absl::Span<size_t> here = TakePlaces(begin, end, &inside);
      const absl::string_view its_text = part.substr(begin, end - begin);
      if (token >= 0) return out->AppendAdded(its_text, token, here);
      form.marks.AppendForm(its_text, begins && begin == 0, begins_part || begin > 0, here,
                            &out->text);
    };
    ForEachPart(tokenizer_->normalized_, part, append);
    for (size_t& place : inside) place = out->text.size();
  });
  for (size_t& place : places) place = out->text.size();
}

// Returns whether no added token takes the spaces around a place. `taken` is the last end of the
// tokens before the place that take spaces behind them. Many spaces are not looked through.
bool BpeEncoder::IsApartFromSpaces(absl::string_view text, size_t at, size_t taken) const {
  const size_t first = at - std::min(at, kSpaces);
  const size_t begin = first + BeginOfSpaces(text.substr(first, at - first), 0);
  const size_t end = at + EndOfSpaces(text.substr(at, kSpaces), 0);
  if (begin == at && end == at) return true;
  const bool is_known = begin >= first + kCharacter || first == 0;
  if (!is_known || end + kCharacter > at + kSpaces || taken >= begin) return false;
  if (tokenizer_->normalized_.strip && tokenizer_->file_.form.normalizes()) return false;
  for (size_t place = at; place <= end; ++place) {
    for (const auto* added : {&tokenizer_->raw_, &tokenizer_->normalized_}) {
      const int32_t token = added->nodes.empty() ? -1 : added->Longest(text.substr(place)).first;
      if (token >= 0 && tokenizer_->added_.at(token)->strips_left) return false;
    }
  }
  return true;
}

// Returns whether no token of the normalized text crosses a place, at which a character of ASCII
// begins. The normalized text is not known: one of both characters is in no token.
bool BpeEncoder::IsApartFromNormalized(absl::string_view text, size_t at) const {
  const BpeTokenizer::AddedTokens& normalized = tokenizer_->normalized_;
  const TextForm& form = tokenizer_->file_.form;
  if (normalized.nodes.empty() || !form.normalizes()) return true;
  // Returns whether the character is ASCII that no token has, and no character behind it changes
  // it.
  const auto is_apart = [&](size_t place) {
    const char c = text[place], formed = c == ' ' ? kSpaceMark[0] : c;
    const bool stays =
        absl::ascii_iscntrl(c) || place + 1 == text.size() || absl::ascii_isascii(text[place + 1]);
    return absl::ascii_isascii(c) && stays && !normalized.has[static_cast<uint8_t>(c)] &&
           !normalized.has[static_cast<uint8_t>(formed)];
  };
  // A token may end at the cut, unless the part after it would begin with a mark.
  const bool may_end = form.marks.prefix != SpaceMarks::Prefix::kEachPart;
  return (at > 0 && is_apart(at - 1)) || (may_end && is_apart(at));
}

// No added token crosses a cut. None ends there if the part after it would begin with a mark.
size_t BpeEncoder::NextCut(absl::string_view text, size_t at, size_t end) const {
  const TextForm& form = tokenizer_->file_.form;
  const bool may_end = form.normalizer_marks.prefix == SpaceMarks::Prefix::kNone &&
                       form.marks.prefix != SpaceMarks::Prefix::kEachPart;
  const bool strips = tokenizer_->raw_.strip || tokenizer_->normalized_.strip;
  // The last ends of the tokens that begin before the place, and of those that take spaces behind.
  size_t reach = 0, taken = 0;
  for (size_t place = at - std::min(at, Reach()); place < end; ++place) {
    const bool is_free = reach < place || (may_end && reach == place);
    if (place >= at && is_free && absl::ascii_isascii(text[place]) &&
        (!strips || IsApartFromSpaces(text, place, taken)) && IsApartFromNormalized(text, place)) {
      return place;
    }
    const auto add = [&](const BpeTokenizer::AddedTokens& added) {
      if (!added.begins[static_cast<uint8_t>(text[place])]) return;
      const auto [token, length] = added.Longest(text.substr(place));
      reach = std::max(reach, place + length);
      const bool takes = token >= 0 && tokenizer_->added_.at(token)->strips_right;
      if (takes) taken = std::max(taken, place + length);
    };
    add(tokenizer_->raw_);
    if (!form.normalizes()) add(tokenizer_->normalized_);
  }
  return absl::string_view::npos;
}

size_t BpeEncoder::Reach() const {
  return std::max(tokenizer_->raw_.longest, tokenizer_->normalized_.longest) + kSpaces;
}

absl::StatusOr<size_t> BpeEncoder::AppendPiece(absl::string_view text, size_t first, bool complete,
                                               std::vector<int32_t>* tokens) {
  if (first == matchers_.size()) {
    if (!complete) return kMore;
    merger_.Append(text, tokens);
    return text.size();
  }
  BURST_ASSIGN_OR_RETURN(const size_t length, matchers_[first].FirstPiece(text, complete));
  if (length == PatternMatcher::kMore) return kMore;
  const absl::string_view piece = text.substr(0, length);
  if (tokenizer_->file_.form.splits[first].must_match && !matchers_[first].matched()) {
    return absl::InvalidArgumentError(absl::StrCat("the tokenizer's Split would remove '",
                                                   absl::Utf8SafeCEscape(piece.substr(0, 40)),
                                                   "'; give a text without it"));
  }
  for (size_t at = 0; at < length;) {
    BURST_ASSIGN_OR_RETURN(const size_t part,
                           AppendPiece(piece.substr(at), first + 1, /*complete=*/true, tokens));
    at += part;
  }
  return length;
}

absl::StatusOr<size_t> BpeEncoder::EncodePieces(const FormedText& text, size_t begin, size_t limit,
                                                bool complete, std::vector<int32_t>* tokens) {
  size_t at = begin;
  auto added = text.NextAdded(at);
  while (at < limit) {
    const bool is_last = added == text.added.end();
    if (!is_last && added->begin == at) {
      tokens->push_back(added->token);
      at = added++->end;
      continue;
    }
    const auto part =
        absl::string_view(text.text).substr(0, is_last ? text.text.size() : added->begin);
    const auto [end, is_utf8] = RunAt(part, at);
    const bool ends = complete || !is_last || end < part.size();
    if (!is_utf8) {
      if (!ends) return kMore;
      merger_.Append(part.substr(at, end - at), tokens);
      at = end;
    }
    while (at < std::min(end, limit)) {
      BURST_ASSIGN_OR_RETURN(const size_t length,
                             AppendPiece(part.substr(at, end - at), 0, ends, tokens));
      if (length == kMore) return kMore;
      at += length;
    }
    if (at < limit && !ends) return kMore;
  }
  return at;
}

}  // namespace burst
