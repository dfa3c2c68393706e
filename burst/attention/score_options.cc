#include "burst/attention/score_options.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"

namespace burst {

const char* NameOfFirst(const ScoreOptions& options, bool wants_max_logits) {
  return options.softcap != 0            ? "softcap"
         : !options.alibi_slopes.empty() ? "alibi_slopes"
         : options.dropout != 0          ? "dropout"
         : wants_max_logits              ? "max_logits"
                                         : nullptr;
}

absl::Status CheckScoreOptions(const ScoreOptions& options) {
  // Kernels divide by it and multiply with it in float32.
  if (options.softcap != 0 && !(options.softcap >= 1e-30 && options.softcap <= 1e30)) {
    return absl::InvalidArgumentError(
        absl::StrCat("softcap: must be 0, or from 1e-30 to 1e30; got ", options.softcap));
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

absl::Status CheckScoreKernels(const ScoreOptions& options, bool wants_max_logits,
                               const AttentionKernels& kernels, DType dtype,
                               const HeadWidths& widths) {
  const char* const changed = NameOfFirst(options, wants_max_logits);
  if (changed == nullptr || kernels.ChangesScores(dtype, widths)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      changed, ": these attention kernels do not change scores of ", Name(dtype), " with ",
      ToString(widths), "; those of CPUs and GPUs do, with one width of heads"));
}

absl::Status CheckScores(const ScoreOptions& options, bool is_cross, int64_t num_heads) {
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

}  // namespace burst
