#include "train/tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "train/data/utf8.h"
#include "train/tokenizer/unicode_normal.h"

namespace burst {
namespace {

// Names of the token in GPT-2 and Qwen, in Llama 3, and in other families; the last one is
// DeepSeek's.
constexpr absl::string_view kEndOfTextNames[] = {
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>",
    "<\xEF\xBD\x9C"
    "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"};

// Returns whether text[at...] may be the beginning of a character that is cut.
bool IsCutCharacter(absl::string_view text, size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
  return at + bytes > text.size();
}

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

// Makes places of a text places of its normal form. A composed character is where its first one
// was, as in tokenizers.
void ComposePlaces(absl::string_view text, absl::string_view composed, absl::Span<size_t> places) {
  std::string form;  // of the text before `done`, where an ASCII character is
  size_t done = 0;
  for (size_t& place : places) {
    size_t ascii = place;
    while (ascii > done && static_cast<unsigned char>(text[ascii]) >= 0x80) --ascii;
    AppendNfc(text.substr(done, ascii - done), &form);
    done = ascii;
    std::string before;
    AppendNfc(text.substr(done, place - done), &before);
    place = std::min(composed.size(), form.size() + before.size());
    while (place < composed.size() && ContinuesCharacter(composed[place])) ++place;
  }
}

}  // namespace

void BpeTokenizer::AddedTokens::Take(std::vector<std::pair<std::string, int32_t>> added) {
  if (added.empty()) return;
  std::stable_sort(added.begin(), added.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [text, token] : added) {
    longest = std::max(longest, text.size());
    begins[static_cast<uint8_t>(text[0])] = true;
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
      nodes[i].token = added[begin].second;
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
  tokenizer->TakeAdded();
  return std::shared_ptr<const BpeTokenizer>(std::move(tokenizer));
}

void BpeTokenizer::TakeAdded() {
  size_t best = std::size(kEndOfTextNames);
  std::vector<std::pair<std::string, int32_t>> all, not_special, raw, raw_not_special;
  for (const AddedToken& token : file_.added) {
    std::string text = token.text;
    if (token.normalized) {
      text.clear();
      AppendFormed(token.text, /*begins_text=*/false, /*begins_part=*/true, {}, &text);
    }
    added_[token.id] = {text.size(), token.strips_left, token.strips_right};
    for (AddedTokens* tokens : {&all_, &not_special_, &raw_, &raw_not_special_}) {
      tokens->strip_left |= token.strips_left;
    }
    all.emplace_back(text, token.id);
    if (!token.special) not_special.emplace_back(text, token.id);
    if (!token.normalized) raw.emplace_back(text, token.id);
    if (!token.normalized && !token.special) raw_not_special.emplace_back(text, token.id);
    const size_t place = std::find(std::begin(kEndOfTextNames), std::end(kEndOfTextNames),
                                   absl::string_view(token.text)) -
                         std::begin(kEndOfTextNames);
    if (place < best) best = place, end_of_text_ = token.id;
  }
  all_.Take(std::move(all));
  not_special_.Take(std::move(not_special));
  raw_.Take(std::move(raw));
  raw_not_special_.Take(std::move(raw_not_special));
}

void BpeTokenizer::AppendFormed(absl::string_view part, bool begins_text, bool begins_part,
                                absl::Span<size_t> places, std::string* out) const {
  const TextForm& form = file_.form;
  if (part.empty()) return;
  // The first place is before the mark that is put before the part.
  for (; !places.empty() && places.front() == 0; places.remove_prefix(1)) {
    places.front() = out->size();
  }
  const bool begins = form.prefix == TextForm::Prefix::kFirstPart ? begins_text : begins_part;
  const bool has_space = absl::StartsWith(part, " ") || absl::StartsWith(part, kSpaceMark);
  if (form.prefix != TextForm::Prefix::kNone && begins && !(form.prefix_once && has_space)) {
    absl::StrAppend(out, kSpaceMark);
  }
  std::string composed;
  if (form.nfc) {
    AppendNfc(part, &composed);
    ComposePlaces(part, composed, places);
    part = composed;
  }
  if (!form.marks_spaces) {
    for (size_t& place : places) place += out->size();
    absl::StrAppend(out, part);
    return;
  }
  for (size_t at = 0; at <= part.size(); ++at) {
    for (; !places.empty() && places.front() == at; places.remove_prefix(1)) {
      places.front() = out->size();
    }
    if (at == part.size()) break;
    const char c = part[at];
    if (c == ' ') {
      absl::StrAppend(out, kSpaceMark);
    } else {
      out->push_back(c);
    }
  }
}

size_t BpeTokenizer::Length(int32_t token, absl::string_view text) const {
  const auto added = added_.find(token);
  if (added == added_.end()) {
    const absl::string_view bytes = Bytes(token);
    const size_t marks = file_.of_bytes ? 0 : absl::c_count(bytes, ' ');
    return std::min(text.size(), bytes.size() + marks * (kSpaceMark.size() - 1));
  }
  const size_t before = added->second.strips_left ? EndOfSpaces(text, 0) : 0;
  const size_t end = std::min(text.size(), before + added->second.length);
  return added->second.strips_right ? EndOfSpaces(text, end) : end;
}

std::unique_ptr<FileEncoder> BpeTokenizer::MakeEncoder(Specials specials) const {
  return std::make_unique<BpeEncoder>(shared_from_this(), specials);
}

BpeEncoder::BpeEncoder(std::shared_ptr<const BpeTokenizer> tokenizer, Specials specials)
    : tokenizer_(std::move(tokenizer)),
      added_(specials == Specials::kAreText ? tokenizer_->not_special_ : tokenizer_->all_),
      raw_(specials == Specials::kAreText ? tokenizer_->raw_not_special_ : tokenizer_->raw_),
      merger_(tokenizer_->vocabulary_) {
  for (const auto& pattern : tokenizer_->patterns_) matchers_.emplace_back(pattern);
}

// Returns the leftmost added token that begins in [begin, end), with the spaces that it takes. If
// several begin there, it is the longest one.
BpeEncoder::Found BpeEncoder::FindAdded(const BpeTokenizer::AddedTokens& added,
                                        absl::string_view text, size_t begin, size_t end) const {
  if (added.nodes.empty()) return {end, 0, -1};
  for (size_t at = begin; at < end; ++at) {
    if (!added.begins[static_cast<uint8_t>(text[at])]) continue;
    const auto [token, length] = added.Longest(text.substr(at));
    if (token < 0) continue;
    const BpeTokenizer::Added& found = tokenizer_->added_.at(token);
    const size_t first = found.strips_left ? BeginOfSpaces(text.substr(0, at), begin) : at;
    const size_t last = found.strips_right ? EndOfSpaces(text, at + length) : at + length;
    return {first, last - first, token};
  }
  return {end, 0, -1};
}

void BpeEncoder::AppendWithPlaces(absl::string_view text, bool begins, absl::Span<size_t> places,
                                  std::string* out) const {
  if (!tokenizer_->file_.form.changes_text()) {
    for (size_t& place : places) place += out->size();
    absl::StrAppend(out, text);
    return;
  }
  // An added token is found before the text around it is formed.
  for (size_t at = 0; at < text.size();) {
    const Found added = FindAdded(raw_, text, at, text.size());
    tokenizer_->AppendFormed(text.substr(at, added.begin - at), begins && at == 0, begins || at > 0,
                             TakePlaces(at, added.begin, &places), out);
    at = added.begin + added.length;
    for (size_t& place : TakePlaces(added.begin, at, &places)) place += out->size();
    absl::StrAppend(out, text.substr(added.begin, added.length));
  }
  for (size_t& place : places) place = out->size();
}

// Returns the run that begins at `begin`, which is UTF-8 or is not.
BpeEncoder::Part BpeEncoder::RunAt(absl::string_view text, size_t begin, bool complete) {
  Part run{Part::Kind::kText, text.size(), complete, -1};
  for (size_t at = begin; at < text.size();) {
    size_t next = at;
    const bool valid = NextCodePoint(text, &next) != kCodePoints;
    if (!valid && !complete && IsCutCharacter(text, at)) {
      run.end = at;  // the next bytes decide
      break;
    }
    const auto kind = valid ? Part::Kind::kText : Part::Kind::kBroken;
    if (at == begin) run.kind = kind;
    if (kind != run.kind) {
      run.end = at, run.complete = true;
      break;
    }
    at = valid ? next : at + 1;
  }
  return run;
}

BpeEncoder::Part BpeEncoder::PartAt(absl::string_view text, size_t begin, bool complete) {
  if (begin >= run_.end) run_ = RunAt(text, begin, complete);
  Part part = run_;
  if (part.kind == Part::Kind::kBroken || added_.nodes.empty()) return part;
  // An added token is UTF-8, so it does not reach across runs. Near the end of the text so far, a
  // cut added token may begin, which may take the spaces before it.
  const size_t cut = part.complete ? 0 : std::min(part.end - begin, added_.longest - 1);
  const size_t run_end = part.end;
  const Found added = FindAdded(added_, text.substr(0, run_end), begin, run_end - cut);
  part.end = added.begin;
  if (added.token < 0) {
    if (!part.complete && added_.strip_left) {
      part.end = BeginOfSpaces(text.substr(0, part.end), begin);
    }
    while (part.end > begin && part.end < run_end && ContinuesCharacter(text[part.end])) --part.end;
    return part;
  }
  const bool may_go_on = !part.complete && added.begin + added.length == run_end &&
                         tokenizer_->added_.at(added.token).strips_right;
  part.complete = true;
  if (added.begin > begin) return part;
  if (may_go_on) return {Part::Kind::kText, begin, false, -1};
  return {Part::Kind::kAdded, begin + added.length, true, added.token};
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

absl::StatusOr<size_t> BpeEncoder::EncodePieces(absl::string_view text, size_t begin, size_t limit,
                                                bool complete, std::vector<int32_t>* tokens) {
  size_t at = begin;
  run_ = Part();
  while (at < limit) {
    const Part part = PartAt(text, at, complete);
    if (part.kind == Part::Kind::kAdded) {
      tokens->push_back(part.token);
      at = part.end;
      continue;
    }
    if (part.kind == Part::Kind::kBroken) {
      if (!part.complete) return kMore;
      merger_.Append(text.substr(at, part.end - at), tokens);
      at = part.end;
      continue;
    }
    if (part.end == at) return kMore;
    while (at < std::min(part.end, limit)) {
      BURST_ASSIGN_OR_RETURN(const size_t length,
                             AppendPiece(text.substr(at, part.end - at), 0, part.complete, tokens));
      if (length == kMore) return kMore;
      at += length;
    }
    if (at < limit && !part.complete) return kMore;
  }
  return at;
}

}  // namespace burst
