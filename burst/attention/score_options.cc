#include "burst/attention/score_options.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"

namespace burst {
namespace {

template <typename T>
Tensor OnDevice(const std::vector<T>& values, DeviceType device) {
  return Tensor::FromVector(values, {static_cast<int64_t>(values.size())}, device);
}

}  // namespace

const char* NameOfFirst(const ScoreOptions& options) {
  return options.softcap != 0            ? "softcap"
         : !options.alibi_slopes.empty() ? "alibi_slopes"
         : options.dropout != 0          ? "dropout"
                                         : "max_logits";
}

absl::Status CheckScoreOptions(const ScoreOptions& options) {
  if (!std::isfinite(options.softcap) || options.softcap < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("softcap: must be finite and at least 0; got ", options.softcap));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("dropout: must be in [0, 1); got ", options.dropout));
  }
  for (float slope : options.alibi_slopes) {
    if (std::isfinite(slope)) continue;
    return absl::InvalidArgumentError(absl::StrCat("alibi_slopes: must be finite; got ", slope));
  }
  return absl::OkStatus();
}

absl::Status MaxOverRanks(Communicator* comm, const Tensor& own) {
  if (comm == nullptr || comm->world_size() == 1) return absl::OkStatus();
  const int64_t n = own.numel();
  const Tensor all = Tensor::Empty({comm->world_size() * n}, own.dtype());
  BURST_RETURN_IF_ERROR(
      comm->PostAllGatherParts(own, std::vector<int64_t>(comm->world_size(), n), all));
  BURST_RETURN_IF_ERROR(comm->Wait(Channel::kCollective));
  float* const largest = own.data<float>();
  for (int64_t i = 0; i < all.numel(); ++i) {
    largest[i % n] = std::max(largest[i % n], all.data<float>()[i]);
  }
  return absl::OkStatus();
}

absl::Status CheckScores(const ScoreOptions& options, bool is_cross, int64_t num_heads,
                         const AttentionKernels& kernels) {
  if (!options.any()) return absl::OkStatus();
  if (!kernels.ChangesScores()) {
    return absl::InvalidArgumentError(
        absl::StrCat(NameOfFirst(options),
                     ": these attention kernels do not change scores; those of CPUs and GPUs do"));
  }
  if (options.alibi_slopes.empty()) return absl::OkStatus();
  if (is_cross) {
    return absl::InvalidArgumentError(
        "alibi_slopes: the queries and keys of cross-attention are of two sequences, which have no "
        "distances");
  }
  if (static_cast<int64_t>(options.alibi_slopes.size()) != num_heads) {
    return absl::InvalidArgumentError(absl::StrCat("alibi_slopes: ", options.alibi_slopes.size(),
                                                   " slopes for ", num_heads, " query heads"));
  }
  return absl::OkStatus();
}

RankScores::RankScores(const ScoreOptions& options, const WeightDropout& dropout,
                       const RankGroup& group, int64_t num_heads, DeviceType device)
    : options_(options),
      dropout_(dropout),
      rank_head_(dropout.first_head + group.group_rank * num_heads),
      device_(device),
      slopes_(options.alibi_slopes.empty() ? Tensor() : OnDevice(options.alibi_slopes, device)) {}

ScoreChanges RankScores::For(const std::vector<int32_t>& q_positions,
                             const std::vector<int32_t>& k_positions, int64_t first_head) {
  ScoreChanges changes;
  if (!options_.any()) return changes;
  changes.softcap = options_.softcap;
  changes.dropout = dropout_.enabled ? options_.dropout : 0;
  changes.seed = dropout_.seed;
  changes.first_row = dropout_.first_row;
  changes.first_head = rank_head_ + first_head;
  if (!slopes_.null()) {
    changes.alibi_slopes = static_cast<const float*>(slopes_.raw_data()) + changes.first_head;
  }
  if (slopes_.null() && changes.dropout == 0) return changes;
  q_positions_ = OnDevice(q_positions, device_);
  k_positions_ = OnDevice(k_positions, device_);
  changes.q_positions = static_cast<const int32_t*>(q_positions_.raw_data());
  changes.k_positions = static_cast<const int32_t*>(k_positions_.raw_data());
  return changes;
}

}  // namespace burst
