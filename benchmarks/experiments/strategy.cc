#include "benchmarks/experiments/strategy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "burst/attention/schedule.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace {

constexpr Strategy kStrategies[] = {Strategy::kSingle, Strategy::kBurst, Strategy::kRing,
                                    Strategy::kAuto};

BackwardDirection Direction(Strategy strategy) {
  switch (strategy) {
    case Strategy::kBurst:
      return BackwardDirection::kBurst;
    case Strategy::kRing:
      return BackwardDirection::kRing;
    case Strategy::kSingle:
    case Strategy::kAuto:
      break;
  }
  return BackwardDirection::kAuto;
}

}  // namespace

const char* Name(Strategy strategy) {
  switch (strategy) {
    case Strategy::kSingle:
      return "single";
    case Strategy::kBurst:
      return "burst";
    case Strategy::kRing:
      return "ring";
    case Strategy::kAuto:
      return "auto";
  }
  return "?";
}

absl::StatusOr<Strategy> ParseStrategy(absl::string_view name) {
  std::string names;
  for (Strategy strategy : kStrategies) {
    if (name == Name(strategy)) return strategy;
    absl::StrAppend(&names, names.empty() ? "" : ", ", Name(strategy));
  }
  return absl::InvalidArgumentError(absl::StrCat("'", name, "' is none of ", names));
}

double AttentionProblem::forward_flops() const {
  const double n = static_cast<double>(seqlen);
  const double pairs = causal ? n * (n + 1) / 2 : n * n;
  return 4 * pairs * static_cast<double>(batch * heads * head_dim);
}

std::vector<int64_t> RanksFor(Strategy strategy, const std::vector<int64_t>& ranks) {
  return strategy == Strategy::kSingle ? std::vector<int64_t>{1} : ranks;
}

absl::Status CheckStrategy(Strategy strategy, const AttentionProblem& problem, int ranks) {
  if (problem.heads % problem.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--kv_heads: ", problem.kv_heads, " does not divide the ", problem.heads, " of --heads"));
  }
  BURST_CHECK(strategy != Strategy::kSingle || ranks == 1) << ranks;
  if (!problem.tiles && problem.device != DeviceType::kCpu) {
    return absl::InvalidArgumentError("--tiles: attention without tiles is there on the CPU only");
  }
  const absl::Status served = CheckFlashAttention(problem.device, problem.dtype, problem.head_dim);
  if (served.ok()) return served;
  return absl::InvalidArgumentError(absl::StrCat("--dtype, --head_dim: ", served.message()));
}

absl::StatusOr<std::unique_ptr<BurstAttention>> MakeAttention(Strategy strategy,
                                                              const AttentionProblem& problem,
                                                              Communicator* comm) {
  BURST_RETURN_IF_ERROR(CheckStrategy(strategy, problem, comm == nullptr ? 1 : comm->world_size()));
  BurstAttentionOptions options;
  options.layout = problem.layout;
  options.mask.causal = problem.causal;
  options.tiles = problem.tiles;
  options.backward = Direction(strategy);
  options.deterministic = false;  // as the published figures are
  return BurstAttention::Create(options, strategy == Strategy::kSingle ? nullptr : comm);
}

//   forward:         2 Hk                    a token and hop of K, V
//   backward, ring:  2 Hk                    of K, V        + 2 Hk sums   of dK, dV
//   backward, burst: 2 Hq + 2 heads sums     of Q, dO, lse, delta + Hq sums   of dQ
absl::StatusOr<AttentionBytes> FormulaBytes(Strategy strategy, const AttentionProblem& problem,
                                            int ranks) {
  AttentionBytes bytes;
  if (strategy == Strategy::kSingle || ranks == 1) return bytes;
  AttentionMask mask;
  mask.causal = problem.causal;
  BURST_ASSIGN_OR_RETURN(
      const RingSchedule schedule,
      RingSchedule::Create(/*rank=*/0, ranks, problem.layout, problem.seqlen, mask));
  const int64_t size = SizeOf(problem.dtype), sum_size = SizeOf(SumDType(problem.dtype));
  const int64_t q = problem.heads * problem.head_dim, k = problem.kv_heads * problem.head_dim;
  const RingPass& keys = schedule.key_pass();
  const RingPass& queries = schedule.query_pass();
  const int64_t ring =
      problem.batch * (keys.block_tokens * 2 * k * size + keys.gradient_tokens * 2 * k * sum_size);
  const int64_t burst =
      problem.batch * (queries.block_tokens * (2 * q * size + 2 * problem.heads * sum_size) +
                       queries.gradient_tokens * q * sum_size);
  bytes.forward = problem.batch * keys.block_tokens * 2 * k * size;
  bytes.backward = strategy == Strategy::kRing    ? ring
                   : strategy == Strategy::kBurst ? burst
                                                  : std::min(burst, ring);
  return bytes;
}

}  // namespace burst
