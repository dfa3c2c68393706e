#include "train/tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "train/data/utf8.h"
#include "train/tokenizer/unicode_normal.h"

namespace burst {
namespace {

// Names of the token in GPT-2 and Qwen, in Llama 3, and in other families.
constexpr absl::string_view kEndOfTextNames[] = {"<|endoftext|>", "<|end_of_text|>", "</s>",
                                                 "<eos>"};

// Returns whether text[at...] may be the beginning of a character that is cut.
bool IsCutCharacter(absl::string_view text, size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
  return at + bytes > text.size();
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
  const BpeFile& read = tokenizer->file_;
  if (!read.pattern.empty()) {
    absl::StatusOr<std::shared_ptr<const SplitPattern>> pattern =
        SplitPattern::Compile(read.pattern);
    if (!pattern.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("pre_tokenizer: ", pattern.status().message()));
    }
    tokenizer->pattern_ = *std::move(pattern);
  }
  size_t best = std::size(kEndOfTextNames);
  std::vector<std::pair<std::string, int32_t>> all, not_special;
  for (const AddedToken& token : read.added) {
    all.emplace_back(token.text, token.id);
    if (!token.special) not_special.emplace_back(token.text, token.id);
    const size_t place = std::find(std::begin(kEndOfTextNames), std::end(kEndOfTextNames),
                                   absl::string_view(token.text)) -
                         std::begin(kEndOfTextNames);
    if (place < best) best = place, tokenizer->end_of_text_ = token.id;
  }
  tokenizer->all_.Take(std::move(all));
  tokenizer->not_special_.Take(std::move(not_special));
  return std::shared_ptr<const BpeTokenizer>(std::move(tokenizer));
}

std::unique_ptr<FileEncoder> BpeTokenizer::MakeEncoder(Specials specials) const {
  return std::make_unique<BpeEncoder>(shared_from_this(), specials);
}

BpeEncoder::BpeEncoder(std::shared_ptr<const BpeTokenizer> tokenizer, Specials specials)
    : tokenizer_(std::move(tokenizer)),
      added_(specials == Specials::kAreText ? tokenizer_->not_special_ : tokenizer_->all_),
      merger_(tokenizer_->vocabulary_) {
  if (tokenizer_->pattern_ != nullptr) {
    matcher_ = std::make_unique<PatternMatcher>(tokenizer_->pattern_);
  }
}

// Returns the leftmost added token that begins in [begin, end). If several begin there, it is the
// longest one.
BpeEncoder::Found BpeEncoder::FindAdded(absl::string_view text, size_t begin, size_t end) const {
  if (added_.nodes.empty()) return {end, 0, -1};
  for (size_t at = begin; at < end; ++at) {
    if (!added_.begins[static_cast<uint8_t>(text[at])]) continue;
    const auto [token, length] = added_.Longest(text.substr(at));
    if (token >= 0) return {at, length, token};
  }
  return {end, 0, -1};
}

void BpeEncoder::AppendNormalized(absl::string_view text, bool /*begins*/, std::string* out) const {
  if (!tokenizer_->normalizes()) {
    absl::StrAppend(out, text);
    return;
  }
  // An added token is found before the text around it is normalized.
  for (size_t at = 0; at < text.size();) {
    const Found added = FindAdded(text, at, text.size());
    AppendNfc(text.substr(at, added.begin - at), out);
    absl::StrAppend(out, text.substr(added.begin, added.length));
    at = added.begin + added.length;
  }
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
  // cut added token may begin.
  const size_t cut = part.complete ? 0 : std::min(part.end - begin, added_.longest - 1);
  const Found added = FindAdded(text.substr(0, part.end), begin, part.end - cut);
  part.end = added.begin;
  if (added.token < 0) return part;
  part.complete = true;
  if (added.begin > begin) return part;
  return {Part::Kind::kAdded, begin + added.length, true, added.token};
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
    if (part.kind == Part::Kind::kBroken || matcher_ == nullptr) {
      if (!part.complete) return kMore;
      merger_.Append(text.substr(at, part.end - at), tokens);
      at = part.end;
      continue;
    }
    if (part.end == at) return kMore;
    while (at < std::min(part.end, limit)) {
      BURST_ASSIGN_OR_RETURN(const size_t length,
                             matcher_->FirstPiece(text.substr(at, part.end - at), part.complete));
      if (length == PatternMatcher::kMore) return kMore;
      merger_.Append(text.substr(at, length), tokens);
      at += length;
    }
    if (at < limit && !part.complete) return kMore;
  }
  return at;
}

}  // namespace burst
