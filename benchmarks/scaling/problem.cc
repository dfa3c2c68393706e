#include "benchmarks/scaling/problem.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "benchmarks/study/study.h"
#include "burst/attention/ring/schedule.h"
#include "burst/attention/ulysses_attention.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace {

// Returns the number of ranks that share heads.
int GroupSize(Method method, const AttentionProblem& problem, int ranks) {
  if (method.tensor_parallel() || method.strategy == Strategy::kUlysses) return ranks;
  if (method.strategy != Strategy::kBurstUlysses) return 1;
  if (problem.ulysses != -1) return problem.ulysses;
  return static_cast<int>(std::gcd<int64_t>(ranks, problem.kv_heads));
}

// Returns the bytes that all ranks of a ring of groups send together, with `group` ranks a group
// and one group's share of the heads. Elements for each token and transfer:
//
//   forward          2 Hk             K, V
//   backward, ring   2 Hk             K, V                + 2 Hk dK, dV
//   backward, burst  2 Hq + 2 heads   Q, dO, lse, delta   + Hq   dQ
//
// lse and delta have SumDType. So have gradients, unless ring_grad_dtype is bfloat16.
absl::StatusOr<AttentionBytes> RingBytes(Method method, const AttentionProblem& problem, int ranks,
                                         int group) {
  BURST_ASSIGN_OR_RETURN(TokenShard shard,
                         TokenShard::Create(/*group_index=*/0, ranks / group, problem.layout,
                                            problem.seqlen, {group, /*group_rank=*/0}));
  BURST_ASSIGN_OR_RETURN(const RingSchedule schedule,
                         RingSchedule::Create(std::move(shard), problem.mask(),
                                              problem.options(method).ranks_per_node / group));
  const int64_t size = SizeOf(problem.dtype), sum_size = SizeOf(SumDType(problem.dtype));
  const bool narrow = problem.ring_grad_dtype == RingGradDType::kBf16;
  const int64_t gradient_size = narrow ? SizeOf(DType::kBFloat16) : sum_size;
  const int64_t heads = problem.heads / group;
  const int64_t kv_heads = std::max<int64_t>(1, problem.kv_heads / group);
  const int64_t q = heads * problem.head_dim, k = kv_heads * problem.head_dim;
  const RingRoute& keys = schedule.kv_route();
  const RingRoute& queries = schedule.query_route();
  const int64_t sequences = problem.batch * group;  // every rank of a group has its own ring
  AttentionBytes bytes;
  bytes.forward = sequences * keys.block_tokens.total() * 2 * k * size;
  bytes.forward_between_nodes = sequences * keys.block_tokens[Link::kInter] * 2 * k * size;
  const auto backward = [&](bool burst, int64_t block_tokens, int64_t gradient_tokens) {
    return sequences *
           (burst ? block_tokens * (2 * q * size + 2 * heads * sum_size) +
                        gradient_tokens * q * gradient_size
                  : block_tokens * 2 * k * size + gradient_tokens * 2 * k * gradient_size);
  };
  const int64_t ring = backward(false, keys.block_tokens.total(), keys.gradient_tokens.total());
  const int64_t burst =
      backward(true, queries.block_tokens.total(), queries.gradient_tokens.total());
  const BackwardDirection direction = problem.options(method).backward;
  const bool takes_burst = direction == BackwardDirection::kBurst ||
                           (direction == BackwardDirection::kAuto && burst <= ring);
  const RingRoute& route = takes_burst ? queries : keys;
  bytes.backward = takes_burst ? burst : ring;
  bytes.backward_between_nodes =
      backward(takes_burst, route.block_tokens[Link::kInter], route.gradient_tokens[Link::kInter]);
  return bytes;
}

// Returns the bytes that the all-to-alls in groups of `group` ranks send (ulysses_attention.h).
AttentionBytes ExchangeBytes(const AttentionProblem& problem, int group) {
  const int64_t kv_heads = std::max<int64_t>(problem.kv_heads, group);  // some are replicated
  const int64_t one_head =
      problem.batch * problem.seqlen * problem.head_dim * SizeOf(problem.dtype);
  // q, k and v go there and out comes back; dout goes there and dq, dk and dv come back. The group
  // divides the heads.
  const int64_t bytes = one_head * (2 * problem.heads + 2 * kv_heads) / group * (group - 1);
  return {bytes, bytes, 0, 0};
}

// Returns the bytes that tensor parallelism sends around attention (tensor_parallel_layer.h). It
// sends gathers and reduce-scatters of [tokens, width]; an all-reduce counts as one of each.
AttentionBytes TensorParallelBytes(Method method, const AttentionProblem& problem, int ranks) {
  const int64_t one = (ranks - 1) * problem.batch * problem.seqlen * problem.heads *
                      problem.head_dim * SizeOf(problem.dtype);
  AttentionBytes bytes;
  bytes.forward = 2 * one;
  bytes.backward = (method.megatron == Megatron::kTp ? 2 : 3) * one;
  return bytes;
}

// Returns the kernels for study that the problem asks for; null: the device's kernels.
const AttentionKernels* StudyKernels(const AttentionProblem& problem) {
  if (!problem.tiles) return &NaiveKernels();
  return problem.tile_keys == 0 ? nullptr : &TiledKernels(problem.tile_keys);
}

absl::Status Named(const char* option, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat("--", option, ": ", status.message()));
}

}  // namespace

BurstAttentionOptions AttentionProblem::options(Method method) const {
  BurstAttentionOptions options;
  options.layout = method.tensor_parallel() ? Layout::kContiguous : layout;
  options.kernels = StudyKernels(*this);
  if (HasDirections(method.strategy)) options.backward = backward;
  if (method.strategy == Strategy::kRing) options.backward = BackwardDirection::kRing;
  if (HasRing(method.strategy)) {
    options.ranks_per_node = ranks_per_node;
    options.ring_grad_dtype = ring_grad_dtype;
  }
  options.deterministic = false;  // the published figures are not deterministic, either
  return options;
}

double AttentionProblem::forward_flops() const {
  const double n = static_cast<double>(seqlen);
  const double pairs = causal ? n * (n + 1) / 2 : n * n;
  return 4 * pairs * static_cast<double>(batch * heads * head_dim);
}

std::vector<int64_t> RanksFor(Method method, const std::vector<int64_t>& ranks) {
  return method.single() ? std::vector<int64_t>{1} : ranks;
}

absl::Status CheckProblem(Method method, const AttentionProblem& problem, int ranks) {
  BURST_CHECK(!method.single() || ranks == 1) << ranks;
  if (problem.heads % problem.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--kv_heads: ", problem.kv_heads, " does not divide the ", problem.heads, " of --heads"));
  }
  const int group = GroupSize(method, problem, ranks);
  if (ranks % group != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ulysses: ", group, " does not divide ", ranks, " ranks"));
  }
  BURST_RETURN_IF_ERROR(CheckHeadsDivide(group == ranks ? "--ranks" : "--ulysses", problem.heads,
                                         problem.kv_heads, group));
  const int per_node = problem.options(method).ranks_per_node;
  if (per_node > 0 && ranks % per_node != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ranks_per_node: ", per_node, " does not divide ", ranks, " ranks"));
  }
  if (problem.ring_grad_dtype == RingGradDType::kBf16 && problem.dtype != DType::kBFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ring_grad_dtype: bf16 is for --dtype=bf16, not for ", Name(problem.dtype)));
  }
  if (per_node % group != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--ranks_per_node: a node of ", per_node,
                                                   " ranks does not hold whole groups of ", group,
                                                   " that share heads"));
  }
  if (!problem.tiles && problem.tile_keys != 0) {
    return absl::InvalidArgumentError("--tile_keys: there are no tiles with --tiles=off");
  }
  const auto check = [&](const AttentionKernels& kernels) {
    return kernels.Check(problem.device, problem.dtype, problem.head_dim);
  };
  if (const AttentionKernels* study = StudyKernels(problem)) {
    return Named(problem.tiles ? "tile_keys" : "tiles", check(*study));
  }
  return Named("dtype, --head_dim", check(KernelsOf(problem.device)));
}

absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> MakeAttention(
    Method method, const AttentionProblem& problem, Communicator* comm) {
  BURST_RETURN_IF_ERROR(CheckProblem(method, problem, comm->world_size()));
  return CreateAttentionOf(method, problem.options(method),
                           GroupSize(method, problem, comm->world_size()), comm);
}

absl::StatusOr<AttentionBytes> FormulaBytes(Method method, const AttentionProblem& problem,
                                            int ranks) {
  const int group = GroupSize(method, problem, ranks);
  if (method.tensor_parallel()) return TensorParallelBytes(method, problem, ranks);
  BURST_ASSIGN_OR_RETURN(AttentionBytes bytes, RingBytes(method, problem, ranks, group));
  const AttentionBytes exchange = ExchangeBytes(problem, group);  // 0 in groups of one
  bytes.forward += exchange.forward;
  bytes.backward += exchange.backward;
  return bytes;
}

}  // namespace burst
