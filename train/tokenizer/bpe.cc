#include "train/tokenizer/bpe.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "train/data/utf8.h"

namespace burst {

absl::StatusOr<BpeVocabulary> BpeVocabulary::Create(const BpeFile& file) {
  BpeVocabulary vocabulary;
  vocabulary.byte_tokens_.fill(-1);
  vocabulary.of_bytes_ = file.of_bytes;
  for (size_t byte = 0; byte < file.byte_ids.size(); ++byte) {
    vocabulary.byte_tokens_[byte] = file.byte_ids[byte];
  }
  for (const auto& [character, id] : file.characters) vocabulary.characters_.emplace(character, id);
  for (int32_t id : file.piece_ids) {
    const std::string& bytes = file.tokens[id];
    if (bytes.size() == 1) vocabulary.byte_tokens_[static_cast<uint8_t>(bytes[0])] = id;
    if (file.ignore_merges) vocabulary.pieces_.emplace(bytes, id);
  }
  const auto& bytes = vocabulary.byte_tokens_;
  const auto missing = std::find(bytes.begin(), bytes.end(), -1);
  if (missing != bytes.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model.vocab has no token for byte ", missing - bytes.begin(), "; all 256 must have one"));
  }
  // If a pair occurs twice, the later one counts, as in tokenizers.
  vocabulary.merges_.reserve(file.merges.size());
  for (size_t rank = 0; rank < file.merges.size(); ++rank) {
    const BpeMerge& merge = file.merges[rank];
    vocabulary.merges_[Key(merge.left, merge.right)] = {static_cast<uint32_t>(rank), merge.merged};
  }
  return vocabulary;
}

int32_t BpeVocabulary::WholePiece(absl::string_view bytes) const {
  if (pieces_.empty()) return -1;
  const auto found = pieces_.find(bytes);
  return found == pieces_.end() ? -1 : found->second;
}

void BpeVocabulary::AppendSymbols(absl::string_view piece, std::vector<int32_t>* symbols) const {
  for (size_t at = 0; at < piece.size();) {
    size_t next = at + 1;
    if (!of_bytes_) {
      next = at;
      NextCodePoint(piece, &next);
      const auto character = characters_.find(piece.substr(at, next - at));
      if (character != characters_.end()) {
        symbols->push_back(character->second);
        at = next;
        continue;
      }
    }
    for (; at < next; ++at) symbols->push_back(byte_tokens_[static_cast<uint8_t>(piece[at])]);
  }
}

void BpeMerger::Append(absl::string_view piece, std::vector<int32_t>* tokens) {
  // Bytes of a short piece; pieces that are remembered.
  constexpr size_t kShort = 48, kMostKnown = 1 << 17;
  if (piece.size() == 1) {
    vocabulary_.AppendSymbols(piece, tokens);
    return;
  }
  if (piece.size() > kShort) {
    const int32_t whole = vocabulary_.WholePiece(piece);
    if (whole >= 0) {
      tokens->push_back(whole);
    } else {
      MergeLong(piece, tokens);
    }
    return;
  }
  const auto found = known_.find(piece);
  if (found != known_.end()) {
    const auto begin = known_tokens_.begin() + found->second.begin;
    tokens->insert(tokens->end(), begin, begin + found->second.count);
    return;
  }
  const size_t before = tokens->size();
  const int32_t whole = vocabulary_.WholePiece(piece);
  if (whole >= 0) {
    tokens->push_back(whole);
  } else {
    MergeShort(piece, tokens);
  }
  if (known_.size() >= kMostKnown) known_.clear(), known_tokens_.clear();
  known_.emplace(piece, Known{static_cast<uint32_t>(known_tokens_.size()),
                              static_cast<uint32_t>(tokens->size() - before)});
  known_tokens_.insert(known_tokens_.end(), tokens->begin() + before, tokens->end());
}

// Merges a short piece. It looks at all pairs before each merge.
void BpeMerger::MergeShort(absl::string_view piece, std::vector<int32_t>* tokens) {
  symbols_.clear();
  vocabulary_.AppendSymbols(piece, &symbols_);
  results_.clear();
  for (size_t i = 0; i + 1 < symbols_.size(); ++i) {
    results_.push_back(vocabulary_.Merge(symbols_[i], symbols_[i + 1]));
  }
  while (!results_.empty()) {
    const auto best =
        std::min_element(results_.begin(), results_.end(),
                         [](const auto& a, const auto& b) { return a.rank < b.rank; });
    if (best->token < 0) break;
    const size_t i = best - results_.begin();
    symbols_[i] = best->token;
    symbols_.erase(symbols_.begin() + i + 1);
    results_.erase(best);
    if (i < results_.size()) results_[i] = vocabulary_.Merge(symbols_[i], symbols_[i + 1]);
    if (i > 0) results_[i - 1] = vocabulary_.Merge(symbols_[i - 1], symbols_[i]);
  }
  tokens->insert(tokens->end(), symbols_.begin(), symbols_.end());
}

// Merges a long piece of n symbols in at most n log n steps. Each rank has a list of its pairs,
// which are almost always in order. A merge makes no pair of a rank that is being merged, because
// the merged token is longer than the tokens of such a pair.
void BpeMerger::MergeLong(absl::string_view piece, std::vector<int32_t>* tokens) {
  struct Symbol {
    int32_t token;
    BpeVocabulary::Result result;  // the merge with the symbol after it, if there is one
    int64_t before, after;
  };
  symbols_.clear();
  vocabulary_.AppendSymbols(piece, &symbols_);
  const int64_t n = static_cast<int64_t>(symbols_.size());
  std::vector<Symbol> symbols(n);
  for (int64_t i = 0; i < n; ++i) symbols[i] = {symbols_[i], {}, i - 1, i + 1};
  struct Pair {
    int64_t place, next;  // the place of its left symbol; the pair that was added before it
  };
  std::vector<Pair> pairs;
  absl::flat_hash_map<uint32_t, int64_t> last_pairs;  // by ranks that are in `ranks`
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> ranks;
  const auto offer = [&](int64_t i) {
    if (i < 0) return;
    Symbol& symbol = symbols[i];
    symbol.result = {};
    if (symbol.after >= n) return;
    symbol.result = vocabulary_.Merge(symbol.token, symbols[symbol.after].token);
    if (symbol.result.token < 0) return;
    const auto [last, is_new] = last_pairs.try_emplace(symbol.result.rank, -1);
    if (is_new) ranks.push(symbol.result.rank);
    pairs.push_back({i, std::exchange(last->second, static_cast<int64_t>(pairs.size()))});
  };
  for (int64_t i = 0; i < n; ++i) offer(i);
  // The ranks that are being merged, the lowest one last, and the beginnings of their places. The
  // places are in decreasing order.
  std::vector<std::pair<uint32_t, size_t>> merging;
  std::vector<int64_t> places;
  while (true) {
    while (!merging.empty() && places.size() == merging.back().second) merging.pop_back();
    if (!ranks.empty() && (merging.empty() || ranks.top() < merging.back().first)) {
      const auto last = last_pairs.find(ranks.top());
      merging.emplace_back(ranks.top(), places.size());
      ranks.pop();
      for (int64_t i = last->second; i >= 0; i = pairs[i].next) places.push_back(pairs[i].place);
      last_pairs.erase(last);
      const auto begin = places.begin() + merging.back().second;
      if (!std::is_sorted(begin, places.end(), std::greater<>())) {
        std::sort(begin, places.end(), std::greater<>());
      }
    }
    if (merging.empty()) break;
    const int64_t place = places.back();
    places.pop_back();
    Symbol& symbol = symbols[place];
    // One of the two may have been merged with another one since.
    if (symbol.result.rank != merging.back().first) continue;
    Symbol& next = symbols[symbol.after];
    symbol.token = symbol.result.token;
    next.result = {};
    symbol.after = next.after;
    if (next.after < n) symbols[next.after].before = place;
    offer(symbol.before);
    offer(place);
  }
  for (int64_t i = 0; i < n; i = symbols[i].after) tokens->push_back(symbols[i].token);
}

}  // namespace burst
