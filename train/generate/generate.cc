#include "train/generate/generate.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "model/kv_cache.h"
#include "train/data/utf8.h"

namespace burst {
namespace {

constexpr uint64_t kSamplingStream = uint64_t{0x5A3B1E} << 32;

// Runs the tokens, spread over the ranks, through the model. Returns the logits [1, vocab] of the
// last token on all ranks, in host memory.
absl::StatusOr<Tensor> Prefill(const Transformer& model, const GenerationRanks& ranks,
                               const std::vector<int32_t>& tokens, KvCache* cache) {
  BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules,
                         MakeLayerSchedules(model.config(), *ranks.attention,
                                            static_cast<int64_t>(tokens.size()), ranks.mask));
  const std::vector<int32_t>& positions = schedules.shard().local_positions();
  std::vector<int32_t> own;
  for (const int32_t position : positions) own.push_back(tokens[position]);
  const Shape shape = {1, static_cast<int64_t>(own.size())};
  const SequenceBatch batch = {Tensor::FromVector(own, shape), Tensor::FromVector(positions, shape),
                               /*targets=*/Tensor(), schedules};
  BURST_ASSIGN_OR_RETURN(Tensor logits,
                         model.NextTokenLogits(*ranks.attention, batch.To(model.device()), cache));
  // One rank has the logits.
  BURST_ASSIGN_OR_RETURN(const std::vector<double> has, ranks.comm->AllGather(!logits.null()));
  const int owner = static_cast<int>(std::find(has.begin(), has.end(), 1) - has.begin());
  logits = logits.null() ? Tensor::Empty({1, model.config().vocab}, model.dtype())
                         : logits.To(DeviceType::kCpu);
  BURST_RETURN_IF_ERROR(ranks.comm->Broadcast(logits, owner));
  return logits;
}

}  // namespace

void PenalizeRepetition(const std::vector<int32_t>& text, double penalty,
                        std::vector<float>* logits) {
  if (penalty == 1) return;
  std::vector<bool> seen(logits->size());
  for (const int32_t token : text) {
    const auto i = static_cast<size_t>(token);
    if (i >= seen.size() || seen[i]) continue;
    seen[i] = true;
    const double logit = (*logits)[i];
    (*logits)[i] = static_cast<float>(logit > 0 ? logit / penalty : logit * penalty);
  }
}

int32_t SampleToken(absl::Span<const float> logits, const SamplingOptions& options, int64_t index) {
  BURST_CHECK(!logits.empty());
  if (options.temperature == 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  // The likeliest token comes first. Equal logits are in order of token, so that the choice depends
  // on the arguments alone.
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  size_t choices = order.size();
  if (options.top_k > 0) choices = std::min(choices, static_cast<size_t>(options.top_k));
  std::partial_sort(order.begin(), order.begin() + choices, order.end(), likelier);
  order.resize(choices);

  // The weights are exp((l - max) / temperature). The choice inverts their cumulative sum at a
  // uniform number.
  std::vector<double> cumulative;
  double sum = 0;
  for (int32_t token : order) {
    sum += std::exp((double{logits[token]} - double{logits[order[0]]}) / options.temperature);
    cumulative.push_back(sum);
  }
  // A token stays if the tokens before it sum to less than top_p, and its weight is at least min_p
  // of the first one's, which is 1.
  size_t kept = 1;
  while (kept < order.size() && cumulative[kept - 1] < options.top_p * sum &&
         cumulative[kept] - cumulative[kept - 1] >= options.min_p) {
    ++kept;
  }
  order.resize(kept);
  cumulative.resize(kept);
  sum = cumulative.back();
  const double u = UniformFromBits(Philox(options.seed, kSamplingStream, index)[0]) * sum;
  const size_t chosen =
      std::upper_bound(cumulative.begin(), cumulative.end(), u) - cumulative.begin();
  return order[std::min(chosen, order.size() - 1)];
}

std::string CharacterStream::Append(absl::string_view text) {
  constexpr size_t kMost = 4;  // the most bytes of a character
  absl::StrAppend(&held_, text);
  // A character that may be cut begins among the last bytes.
  size_t end = held_.size();
  for (size_t back = 1; back < kMost && back <= held_.size(); ++back) {
    const size_t at = held_.size() - back;
    if (ContinuesCharacter(held_[at])) continue;
    const auto first = static_cast<unsigned char>(held_[at]);
    const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
    if (bytes > back) end = at;
    break;
  }
  std::string whole = held_.substr(0, end);
  held_.erase(0, end);
  return whole;
}

std::string TextBefore::Append(absl::string_view piece) {
  absl::StrAppend(&held_, piece);
  if (stop_.empty()) return Rest();
  const size_t found = held_.find(stop_);
  if (found != std::string::npos) {
    ended_ = true;
    return Rest().substr(0, found);
  }
  // The longest end of the text that begins `stop` is held.
  size_t kept = std::min(held_.size(), stop_.size() - 1);
  while (held_.compare(held_.size() - kept, kept, stop_, 0, kept) != 0) --kept;
  const std::string shown = held_.substr(0, held_.size() - kept);
  held_.erase(0, shown.size());
  return shown;
}

int64_t ReadTokens(int64_t prompt_tokens, int64_t context) {
  if (prompt_tokens <= context) return prompt_tokens;
  return std::min(prompt_tokens, std::max<int64_t>(1, context / 2));
}

absl::Status Generate(const Transformer& model, const Tokenizer& tokenizer,
                      const std::vector<int32_t>& prompt, const GenerationOptions& options,
                      const std::function<bool(absl::string_view)>& emit,
                      const std::optional<GenerationRanks>& ranks) {
  BURST_CHECK(!prompt.empty() && options.context >= 1);
  Communicator* const comm = ranks.has_value() ? ranks->comm : nullptr;
  KvCache cache(model.config(), /*batch=*/1, model.dtype(), options.window, model.device(), comm);
  std::vector<int32_t> text = prompt;
  CharacterStream stream;
  // Returns rank 0's decision: the next token, or -1 for the end.
  const auto choose = [&](const Tensor& logits, int64_t index) {
    const int64_t both = std::min(tokenizer.vocab(), model.config().vocab);
    std::vector<float> known = logits.View({-1}).Slice(0, 0, both).ToVector<float>();
    PenalizeRepetition(text, options.sampling.repetition_penalty, &known);
    const int32_t token = SampleToken(known, options.sampling, index);
    const bool ends = std::count(options.ends.begin(), options.ends.end(), token) > 0;
    if (ends || token == tokenizer.end_of_text()) return -1;
    const std::string characters = stream.Append(tokenizer.Decode({token}));
    if (characters.empty() || emit(characters)) return token;
    stream.Rest();  // the rest is not needed
    return -1;
  };
  const RopeScaling& scaling = model.config().rope_scaling;
  int64_t read = 0;  // tokens of the text that the model has read
  bool stopped = false;
  for (int64_t i = 0; i < options.tokens && !stopped; ++i) {
    int64_t length = static_cast<int64_t>(text.size());
    if (cache.length() + length - read > options.context) {
      // Beyond the length of its training, the model reads the end of the text again, into an empty
      // cache.
      cache.Clear();
      read = length - std::min(length, std::max<int64_t>(1, options.context / 2));
    }
    const int64_t after = cache.length() + length - read;
    if (cache.length() > 0 && scaling.IsLong(cache.length()) != scaling.IsLong(after)) {
      // The keys of the text so far have the angles of short texts, so the model reads it again.
      read -= cache.length();
      cache.Clear();
    }
    const std::vector<int32_t> unread(text.begin() + read, text.end());
    Tensor logits;
    if (comm != nullptr && cache.length() == 0) {
      BURST_ASSIGN_OR_RETURN(logits, Prefill(model, *ranks, unread, &cache));
    } else {
      BURST_ASSIGN_OR_RETURN(logits,
                             model.Decode(cache, Tensor::FromVector(unread, {1, length - read})));
    }
    read = length;
    int32_t token = comm == nullptr || comm->rank() == 0 ? choose(logits, i) : 0;
    if (comm != nullptr) BURST_RETURN_IF_ERROR(comm->Broadcast(&token, sizeof(token), /*root=*/0));
    stopped = token < 0;
    if (!stopped) text.push_back(token);
  }
  const std::string rest = stream.Rest();
  if (!rest.empty()) emit(rest);
  return absl::OkStatus();
}

}  // namespace burst
