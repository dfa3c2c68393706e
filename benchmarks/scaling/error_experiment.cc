#include "benchmarks/scaling/error_experiment.h"

#include <array>
#include <cmath>

#include "benchmarks/scaling/ranks.h"
#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// Returns standard normal numbers by (stream, element), rounded to the dtype, on the CPU.
Tensor RandomNormal(const Shape& shape, DType dtype, uint64_t stream) {
  const Tensor tensor = Tensor::Empty(shape, DType::kFloat64);
  double* data = tensor.data<double>();
  ParallelFor(tensor.numel(), 1 << 12, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const PhiloxCounter bits = Philox(/*key=*/2, stream, i);
      data[i] = NormalFromBits(bits[0], bits[1])[0];
    }
  });
  return tensor.To(DType::kFloat32).To(dtype);
}

// Returns the rows `positions` of a [batch, seqlen, ...] tensor.
Tensor TakeRows(const Tensor& global, const std::vector<int32_t>& positions) {
  Shape shape = global.shape();
  shape[1] = static_cast<int64_t>(positions.size());
  const Tensor local = Tensor::Empty(shape, global.dtype());
  for (size_t i = 0; i < positions.size(); ++i) {
    local.Slice(1, i, 1).CopyFrom(global.Slice(1, positions[i], 1));
  }
  return local;
}

// Holds sums of squares.
struct Squares {
  double error = 0, reference = 0;
};

Squares SquaresOf(const Tensor& actual, const Tensor& reference) {
  const Tensor a = actual.To(DeviceType::kCpu).To(DType::kFloat64).Contiguous();
  const Tensor e = reference.Contiguous();
  Squares squares;
  for (int64_t i = 0; i < a.numel(); ++i) {
    const double difference = a.data<double>()[i] - e.data<double>()[i];
    squares.error += difference * difference;
    squares.reference += e.data<double>()[i] * e.data<double>()[i];
  }
  return squares;
}

}  // namespace

class ErrorReference {
 public:
  AttentionProblem problem;
  Tensor q, k, v, dout;    // [batch, seqlen, heads, head_dim] of the problem's dtype, on the CPU
  Tensor out, dq, dk, dv;  // of the same shapes, float64
};

absl::StatusOr<std::shared_ptr<const ErrorReference>> MakeErrorReference(
    const AttentionProblem& problem, int threads) {
  const ScopedThreadPool pool(threads);
  const auto reference = std::make_shared<ErrorReference>();
  ErrorReference& r = *reference;
  r.problem = problem;
  const auto random = [&](int64_t heads, uint64_t stream) {
    return RandomNormal({problem.batch, problem.seqlen, heads, problem.head_dim}, problem.dtype,
                        stream);
  };
  r.q = random(problem.heads, 0);
  r.k = random(problem.kv_heads, 1);
  r.v = random(problem.kv_heads, 2);
  r.dout = random(problem.heads, 3);

  AttentionProblem in_double = problem;
  in_double.dtype = DType::kFloat64;
  in_double.device = DeviceType::kCpu;
  in_double.tiles = true;
  in_double.tile_keys = 0;
  BURST_ASSIGN_OR_RETURN(const auto attention,
                         BurstAttention::Create(in_double.options(Strategy::kSingle), nullptr));
  BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                         attention->Schedule(problem.seqlen, problem.mask()));
  const AttentionCall call = {&schedule, r.q.To(DType::kFloat64), r.k.To(DType::kFloat64),
                              r.v.To(DType::kFloat64)};
  AttentionResult result;
  BURST_RETURN_IF_ERROR(attention->Forward(call, &result));
  AttentionGradients gradients = {r.dout.To(DType::kFloat64)};
  BURST_RETURN_IF_ERROR(attention->Backward(call, result, &gradients));
  r.out = result.out;
  r.dq = gradients.dq;
  r.dk = gradients.dk;
  r.dv = gradients.dv;
  return std::shared_ptr<const ErrorReference>(reference);
}

absl::StatusOr<AttentionErrors> MeasureErrors(Method method, const ErrorReference& reference,
                                              int ranks, int threads, int64_t tile_keys) {
  AttentionProblem problem = reference.problem;
  problem.tile_keys = tile_keys;
  std::vector<std::array<Squares, 4>> squares(ranks);
  const auto body = [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto attention, MakeAttention(method, problem, &comm));
    BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                           attention->Schedule(problem.seqlen, problem.mask()));
    const std::vector<int32_t>& positions = schedule.shard().local_positions();
    const auto own = [&](const Tensor& global) {
      return TakeRows(global, positions).To(problem.device);
    };
    const AttentionCall call = {&schedule, own(reference.q), own(reference.k), own(reference.v)};
    AttentionResult result;
    BURST_RETURN_IF_ERROR(attention->Forward(call, &result));
    AttentionGradients gradients = {own(reference.dout)};
    BURST_RETURN_IF_ERROR(attention->Backward(call, result, &gradients));
    squares[comm.rank()] = {SquaresOf(result.out, TakeRows(reference.out, positions)),
                            SquaresOf(gradients.dq, TakeRows(reference.dq, positions)),
                            SquaresOf(gradients.dk, TakeRows(reference.dk, positions)),
                            SquaresOf(gradients.dv, TakeRows(reference.dv, positions))};
    return absl::OkStatus();
  };
  BURST_RETURN_IF_ERROR(RunBenchmarkRanks(problem.device, ranks, threads,
                                          /*share_gpus=*/true, /*processes=*/nullptr, body));
  const auto error = [&](int tensor) {
    Squares sum;
    for (const auto& rank : squares) {
      sum.error += rank[tensor].error;
      sum.reference += rank[tensor].reference;
    }
    return std::sqrt(sum.error / sum.reference);
  };
  return AttentionErrors{error(0), error(1), error(2), error(3)};
}

std::vector<ReportColumn> ErrorColumns(const ScalingOptions& options) {
  std::vector<ReportColumn> columns = {{"strategy", "strategy"},   {"ranks", "ranks"},
                                       {"batch", "batch"},         {"seqlen", "tokens"},
                                       {"out", "out e-9", 2, 1e9}, {"dq", "dq e-9", 2, 1e9},
                                       {"dk", "dk e-9", 2, 1e9},   {"dv", "dv e-9", 2, 1e9}};
  if (options.tile_keys[0] != 0) columns.insert(columns.begin() + 4, {"tile_keys", "tile"});
  return columns;
}

absl::StatusOr<std::vector<ReportRow>> RunErrorExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row) {
  std::vector<ReportRow> rows;
  for (int64_t batch : options.batches) {
    for (int64_t seqlen : options.seqlens) {
      AttentionProblem problem = options.problem;
      problem.batch = batch;
      problem.seqlen = seqlen;
      BURST_ASSIGN_OR_RETURN(const auto reference, MakeErrorReference(problem, NumCores()));
      for (Method method : options.strategies) {
        for (int64_t ranks : RanksFor(method, options.ranks)) {
          for (int64_t tile_keys : options.tile_keys) {
            BURST_ASSIGN_OR_RETURN(const AttentionErrors errors,
                                   MeasureErrors(method, *reference, static_cast<int>(ranks),
                                                 options.threads, tile_keys));
            ReportRow row;
            row["strategy"] = Name(method);
            row["ranks"] = ranks;
            row["batch"] = batch;
            row["seqlen"] = seqlen;
            if (tile_keys != 0) row["tile_keys"] = tile_keys;
            row["out"] = errors.out;
            row["dq"] = errors.dq;
            row["dk"] = errors.dk;
            row["dv"] = errors.dv;
            rows.push_back(row);
            on_row(row);
          }
        }
      }
    }
  }
  return rows;
}

}  // namespace burst
