#include "benchmarks/scaling/attention_experiment.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "benchmarks/harness/harness.h"
#include "benchmarks/scaling/quiet_communicator.h"
#include "benchmarks/scaling/ranks.h"
#include "benchmarks/scaling/tensor_parallel_layer.h"
#include "burst/base/status.h"
#include "burst/device/memory.h"

namespace burst {
namespace {

// Holds one rank's attention, its inputs, and the results of the last call.
class RankAttention : public AttentionWork {
 public:
  RankAttention(const AttentionProblem& problem, SequenceParallelAttention& attention,
                AttentionSchedule schedule, int rank)
      : attention_(attention), schedule_(std::move(schedule)) {
    const int64_t length = schedule_.shard().local_length();
    const auto random = [&](int64_t heads, uint64_t tensor) {
      const uint64_t stream = tensor + 4 * static_cast<uint64_t>(rank);
      return RandomForTiming({problem.batch, length, heads, problem.head_dim}, problem.dtype,
                             problem.device, stream);
    };
    call_ = {&schedule_, random(problem.heads, 0), random(problem.kv_heads, 1),
             random(problem.kv_heads, 2)};
    call_.wants_lse = false;
    gradients_.dout = random(problem.heads, 3);
  }

  absl::Status Forward() override { return attention_.Forward(call_, &result_); }
  absl::Status Backward() override { return attention_.Backward(call_, result_, &gradients_); }

 private:
  SequenceParallelAttention& attention_;
  const AttentionSchedule schedule_;
  AttentionCall call_;
  AttentionResult result_;
  AttentionGradients gradients_;
};

// Makes a strategy's work on random inputs.
std::unique_ptr<AttentionWork> MakeWork(Method method, const AttentionProblem& problem,
                                        SequenceParallelAttention& attention,
                                        AttentionSchedule schedule, Communicator* comm) {
  if (!method.tensor_parallel()) {
    return std::make_unique<RankAttention>(problem, attention, std::move(schedule), comm->rank());
  }
  auto layer = std::make_unique<TensorParallelLayer>(method.megatron, problem, attention,
                                                     std::move(schedule), comm);
  const auto random = [&](const Shape& shape, uint64_t tensor) {
    const uint64_t stream = tensor + 4 * static_cast<uint64_t>(comm->rank());
    return RandomForTiming(shape, problem.dtype, problem.device, stream);
  };
  layer->SetInputs({random(layer->InputShape(), 0), random(layer->KeyShape(), 1),
                    random(layer->KeyShape(), 2), random(layer->InputShape(), 3)});
  return layer;
}

// The measurements of one rank.
struct RankMeasurement {
  std::vector<AttentionTimes> whole, quiet, alone;  // one entry for each repetition
  AttentionBytes bytes_sent;
  int64_t peak_bytes = 0;
};

// Runs a rank's share of the problem's tokens on that rank alone.
class AloneWork {
 public:
  static absl::StatusOr<std::unique_ptr<AloneWork>> Create(AttentionProblem problem,
                                                           Communicator& comm) {
    auto alone = std::make_unique<AloneWork>();
    problem.seqlen = std::max<int64_t>(1, problem.seqlen / comm.world_size());
    problem.ranks_per_node = 0;
    BURST_ASSIGN_OR_RETURN(alone->self_, comm.Split(/*color=*/comm.rank(), /*key=*/0));
    BURST_ASSIGN_OR_RETURN(alone->attention_,
                           MakeAttention(Strategy::kSingle, problem, alone->self_.get()));
    BURST_ASSIGN_OR_RETURN(AttentionSchedule schedule,
                           alone->attention_->Schedule(problem.seqlen, problem.mask()));
    alone->work_ = MakeWork(Strategy::kSingle, problem, *alone->attention_, std::move(schedule),
                            alone->self_.get());
    BURST_RETURN_IF_ERROR(alone->work_->Forward());  // allocates
    BURST_RETURN_IF_ERROR(alone->work_->Backward());
    return alone;
  }
  AttentionWork& work() { return *work_; }

 private:
  std::unique_ptr<Communicator> self_;
  std::unique_ptr<SequenceParallelAttention> attention_;
  std::unique_ptr<AttentionWork> work_;
};

// An idle GPU runs faster at first than it can sustain, so it works for about this long before the
// first measurement.
constexpr double kWarmUpSeconds = 0.5;
constexpr int kMostWarmUps = 50;

// `shared_memory` says that the ranks share one process, whose host memory is counted for all.
absl::Status MeasureRank(Method method, const AttentionProblem& problem, int64_t repeats,
                         bool compare, bool shared_memory, Communicator& comm,
                         RankMeasurement* result) {
  QuietCommunicator quiet(&comm);
  BURST_ASSIGN_OR_RETURN(const auto attention, MakeAttention(method, problem, &quiet));
  BURST_ASSIGN_OR_RETURN(AttentionSchedule schedule,
                         attention->Schedule(problem.seqlen, problem.mask()));
  const auto work = MakeWork(method, problem, *attention, std::move(schedule), &quiet);
  AttentionWork& rank = *work;

  // The first call allocates and counts.
  int64_t before = quiet.bytes_sent();
  BURST_RETURN_IF_ERROR(rank.Forward());
  result->bytes_sent.forward = quiet.bytes_sent() - before;
  before = quiet.bytes_sent();
  BURST_RETURN_IF_ERROR(rank.Backward());
  result->bytes_sent.backward = quiet.bytes_sent() - before;
  const SequenceParallelAttention::BytesSent sent = attention->bytes_sent();
  result->bytes_sent.forward_between_nodes = sent.forward_between_nodes;
  result->bytes_sent.backward_between_nodes = sent.backward_between_nodes;
  SynchronizeDevice(problem.device);

  const bool counted_together = shared_memory && problem.device == DeviceType::kCpu;
  BURST_RETURN_IF_ERROR(comm.Barrier());
  if (comm.rank() == 0 || !counted_together) ResetPeakMemory(problem.device);
  BURST_RETURN_IF_ERROR(comm.Barrier());
  BURST_RETURN_IF_ERROR(rank.Forward());
  BURST_RETURN_IF_ERROR(rank.Backward());
  SynchronizeDevice(problem.device);
  BURST_RETURN_IF_ERROR(comm.Barrier());
  result->peak_bytes = GetMemoryStats(problem.device).peak_bytes;
  if (counted_together) result->peak_bytes /= comm.world_size();
  BURST_RETURN_IF_ERROR(comm.Barrier());

  std::unique_ptr<AloneWork> alone;
  if (compare && comm.world_size() > 1) {
    BURST_ASSIGN_OR_RETURN(alone, AloneWork::Create(problem, comm));
  }
  const auto measure = [&](AttentionWork& work, int calls, bool backward,
                           double* seconds) -> absl::Status {
    BURST_RETURN_IF_ERROR(comm.Barrier());
    const Stopwatch stopwatch;
    for (int call = 0; call < calls; ++call) BURST_RETURN_IF_ERROR(work.Forward());
    for (int call = 0; backward && call < calls; ++call) BURST_RETURN_IF_ERROR(work.Backward());
    SynchronizeDevice(problem.device);
    *seconds = stopwatch.Seconds();
    return comm.Barrier();
  };
  if (compare && problem.device != DeviceType::kCpu) {
    double seconds = 0;
    BURST_RETURN_IF_ERROR(measure(rank, 1, true, &seconds));
    BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm.AllGather(seconds));
    const double slowest = *std::max_element(all.begin(), all.end());
    const int warm_ups = static_cast<int>(std::min<double>(kMostWarmUps, kWarmUpSeconds / slowest));
    for (int i = 0; i < warm_ups; ++i) {
      BURST_RETURN_IF_ERROR(measure(rank, 1, true, &seconds));
    }
  }
  // The sides take turns, so that a machine that slows down slows all of them.
  const auto repeat = [&](AttentionWork& work, int calls, std::vector<AttentionTimes>* times) {
    AttentionTimes& measured = times->emplace_back();
    BURST_RETURN_IF_ERROR(measure(work, calls, false, &measured.forward));
    return measure(work, calls, true, &measured.forward_backward);
  };
  for (int64_t i = 0; i < repeats; ++i) {
    BURST_RETURN_IF_ERROR(repeat(rank, 1, &result->whole));
    if (alone == nullptr) continue;
    quiet.set_quiet(true);
    BURST_RETURN_IF_ERROR(repeat(rank, 1, &result->quiet));
    quiet.set_quiet(false);
    BURST_RETURN_IF_ERROR(repeat(alone->work(), comm.world_size(), &result->alone));
  }
  return absl::OkStatus();
}

// Returns the time of the slowest rank in the median repetition. Collective.
absl::StatusOr<double> Slowest(const std::vector<AttentionTimes>& own, double AttentionTimes::*time,
                               Communicator& comm) {
  std::vector<double> slowest;
  for (const AttentionTimes& repetition : own) {
    BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm.AllGather(repetition.*time));
    slowest.push_back(*std::max_element(all.begin(), all.end()));
  }
  return slowest.empty() ? 0.0 : Median(std::move(slowest));
}

absl::StatusOr<AttentionTimes> Slowest(const std::vector<AttentionTimes>& own, Communicator& comm) {
  AttentionTimes times;
  BURST_ASSIGN_OR_RETURN(times.forward, Slowest(own, &AttentionTimes::forward, comm));
  BURST_ASSIGN_OR_RETURN(times.forward_backward,
                         Slowest(own, &AttentionTimes::forward_backward, comm));
  return times;
}

// Combines the measurements of all ranks; returns the same on every rank. Collective.
absl::StatusOr<AttentionMeasurement> Combine(const RankMeasurement& own, Communicator& comm) {
  AttentionMeasurement all;
  BURST_ASSIGN_OR_RETURN(all.whole, Slowest(own.whole, comm));
  BURST_ASSIGN_OR_RETURN(all.quiet, Slowest(own.quiet, comm));
  BURST_ASSIGN_OR_RETURN(all.alone, Slowest(own.alone, comm));
  for (int64_t AttentionBytes::*bytes :
       {&AttentionBytes::forward, &AttentionBytes::backward, &AttentionBytes::forward_between_nodes,
        &AttentionBytes::backward_between_nodes}) {
    BURST_ASSIGN_OR_RETURN(const std::vector<double> sent,
                           comm.AllGather(static_cast<double>(own.bytes_sent.*bytes)));
    for (double rank : sent) all.bytes_sent.*bytes += static_cast<int64_t>(rank);
  }
  BURST_ASSIGN_OR_RETURN(const std::vector<double> peaks,
                         comm.AllGather(static_cast<double>(own.peak_bytes)));
  all.peak_bytes = static_cast<int64_t>(*std::max_element(peaks.begin(), peaks.end()));
  return all;
}

absl::StatusOr<ReportRow> MeasureRow(Method method, const AttentionProblem& problem, int ranks,
                                     const ScalingOptions& options) {
  BURST_ASSIGN_OR_RETURN(const AttentionMeasurement measured,
                         MeasureAttention(method, problem, ranks, options.threads, options.repeats,
                                          options.compare, options.processes));
  BURST_ASSIGN_OR_RETURN(const AttentionBytes formula, FormulaBytes(method, problem, ranks));
  const AttentionTimes& whole = measured.whole;
  const AttentionTimes& quiet = measured.quiet;
  const double forward_rate = problem.forward_flops() / ranks / whole.forward;
  const double both_rate = problem.forward_backward_flops() / ranks / whole.forward_backward;
  const auto per_rank = [&](int64_t bytes) { return static_cast<double>(bytes) / ranks; };
  ReportRow row;
  row["strategy"] = Name(method);
  row["ranks"] = ranks;
  row["batch"] = problem.batch;
  row["seqlen"] = problem.seqlen;
  if (problem.tile_keys != 0) row["tile_keys"] = problem.tile_keys;
  row["forward_ms"] = 1e3 * whole.forward;
  row["forward_gflops_per_rank"] = 1e-9 * forward_rate;
  row["forward_backward_ms"] = 1e3 * whole.forward_backward;
  row["forward_backward_gflops_per_rank"] = 1e-9 * both_rate;
  row["peak_mib_per_rank"] = static_cast<double>(measured.peak_bytes) / (1 << 20);
  row["forward_bytes_per_rank"] = per_rank(measured.bytes_sent.forward);
  row["forward_bytes_formula"] = per_rank(formula.forward);
  row["backward_bytes_per_rank"] = per_rank(measured.bytes_sent.backward);
  row["backward_bytes_formula"] = per_rank(formula.backward);
  if (problem.ranks_per_node > 0) {
    row["between_nodes_bytes_per_rank"] = per_rank(measured.bytes_sent.forward_between_nodes +
                                                   measured.bytes_sent.backward_between_nodes);
    row["between_nodes_bytes_formula"] =
        per_rank(formula.forward_between_nodes + formula.backward_between_nodes);
  }
  // One rank has no communication to expose, and is its own peer.
  for (const char* key : {"forward_exposed", "forward_backward_exposed", "forward_efficiency",
                          "forward_backward_efficiency"}) {
    row[key] = nullptr;
  }
  if (ranks == 1 || !options.compare) return row;
  row["forward_exposed"] = (whole.forward - quiet.forward) / whole.forward;
  row["forward_backward_exposed"] =
      (whole.forward_backward - quiet.forward_backward) / whole.forward_backward;
  // A call alone computes 1 / ranks of a rank's pairs, so `ranks` calls do a rank's part.
  row["forward_efficiency"] = measured.alone.forward / whole.forward;
  row["forward_backward_efficiency"] = measured.alone.forward_backward / whole.forward_backward;
  return row;
}

}  // namespace

absl::StatusOr<AttentionMeasurement> MeasureAttention(Method method,
                                                      const AttentionProblem& problem, int ranks,
                                                      int threads, int64_t repeats, bool compare,
                                                      Communicator* processes) {
  AttentionMeasurement result;
  BURST_RETURN_IF_ERROR(RunBenchmarkRanks(
      problem.device, ranks, threads, /*share_gpus=*/false, processes,
      [&](Communicator& comm) -> absl::Status {
        RankMeasurement own;
        BURST_RETURN_IF_ERROR(MeasureRank(method, problem, repeats, compare,
                                          /*shared_memory=*/processes == nullptr, comm, &own));
        BURST_ASSIGN_OR_RETURN(const AttentionMeasurement all, Combine(own, comm));
        if (comm.rank() == 0) result = all;
        return absl::OkStatus();
      }));
  return result;
}

std::vector<ReportColumn> AttentionColumns(const ScalingOptions& options) {
  const AttentionProblem& problem = options.problem;
  const bool cuda = problem.device == DeviceType::kCuda;
  const std::string rate = cuda ? "TFLOP/s" : "GFLOP/s";
  const double scale = cuda ? 1e-3 : 1;
  std::vector<ReportColumn> columns = {{"strategy", "strategy"},
                                       {"ranks", "ranks"},
                                       {"batch", "batch"},
                                       {"seqlen", "tokens"},
                                       {"forward_ms", "fwd ms", 2},
                                       {"forward_gflops_per_rank", rate, 1, scale},
                                       {"forward_backward_ms", "f+b ms", 2},
                                       {"forward_backward_gflops_per_rank", rate, 1, scale},
                                       {"peak_mib_per_rank", "peak MiB", 1},
                                       {"forward_bytes_per_rank", "fwd MB", 3, 1e-6},
                                       {"forward_bytes_formula", "formula", 3, 1e-6},
                                       {"backward_bytes_per_rank", "bwd MB", 3, 1e-6},
                                       {"backward_bytes_formula", "formula", 3, 1e-6},
                                       {"forward_exposed", "expos f%", 1, 100},
                                       {"forward_backward_exposed", "f+b%", 1, 100},
                                       {"forward_efficiency", "effic f%", 1, 100},
                                       {"forward_backward_efficiency", "f+b%", 1, 100}};
  if (options.tile_keys[0] != 0) columns.insert(columns.begin() + 4, {"tile_keys", "tile"});
  if (problem.ranks_per_node > 0) {
    columns.push_back({"between_nodes_bytes_per_rank", "inter MB", 3, 1e-6});
    columns.push_back({"between_nodes_bytes_formula", "formula", 3, 1e-6});
  }
  return columns;
}

absl::StatusOr<std::vector<ReportRow>> RunAttentionExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row) {
  std::vector<ReportRow> rows;
  for (int64_t batch : options.batches) {
    for (int64_t seqlen : options.seqlens) {
      for (Method method : options.strategies) {
        for (int64_t ranks : RanksFor(method, options.ranks)) {
          for (int64_t tile_keys : options.tile_keys) {
            AttentionProblem problem = options.problem;
            problem.batch = batch;
            problem.seqlen = seqlen;
            problem.tile_keys = tile_keys;
            BURST_ASSIGN_OR_RETURN(rows.emplace_back(),
                                   MeasureRow(method, problem, static_cast<int>(ranks), options));
            on_row(rows.back());
          }
        }
      }
    }
  }
  return rows;
}

}  // namespace burst
