// Tests the parts of //benchmarks:scaling: its formulas, its counters and its tables.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/scaling/attention_experiment.h"
#include "benchmarks/scaling/error_experiment.h"
#include "benchmarks/scaling/options.h"
#include "benchmarks/scaling/problem.h"
#include "benchmarks/scaling/quiet_communicator.h"
#include "benchmarks/scaling/report.h"
#include "benchmarks/scaling/tensor_parallel_layer.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"

namespace burst {
namespace {

AttentionProblem SmallProblem() {
  AttentionProblem problem;
  problem.batch = 2;
  problem.seqlen = 48;
  problem.heads = 4;
  problem.kv_heads = 4;
  problem.head_dim = 8;
  return problem;
}

// ---- Formulas.

TEST(FormulaBytes, IsTheTableOfTheDesign) {
  AttentionProblem problem = SmallProblem();
  constexpr int kRanks = 4;
  for (const int64_t kv_heads : {1, 4}) {
    problem.kv_heads = kv_heads;
    const int64_t tokens = problem.batch * problem.seqlen;  // s tokens on each of G ranks
    const int64_t hq = problem.heads * problem.head_dim, hk = kv_heads * problem.head_dim;
    // A token in a transfer has K and V, or also dK and dV, or Q, dO and two statistics, or dQ. All
    // have four bytes, and there are G - 1 transfers.
    const int64_t transfer = 4 * (kRanks - 1) * tokens;
    const auto ring = FormulaBytes(Strategy::kRing, problem, kRanks);
    ASSERT_TRUE(ring.ok()) << ring.status();
    EXPECT_EQ(ring->forward, transfer * 2 * hk);
    EXPECT_EQ(ring->backward, transfer * (2 * hk + 2 * hk));
    problem.backward = BackwardDirection::kBurst;
    const auto burst = FormulaBytes(Strategy::kBurst, problem, kRanks);
    EXPECT_EQ(burst->forward, ring->forward);
    EXPECT_EQ(burst->backward, transfer * (2 * hq + 2 * problem.heads + hq));
    problem.backward = BackwardDirection::kAuto;
    const auto least = FormulaBytes(Strategy::kBurst, problem, kRanks);
    EXPECT_EQ(least->backward, std::min(ring->backward, burst->backward));
  }
  EXPECT_EQ(FormulaBytes(Strategy::kSingle, problem, 1)->forward, 0);
  // There are two nodes of two ranks, and one of three transfers crosses.
  problem.ranks_per_node = 2;
  for (const Strategy strategy : {Strategy::kBurst, Strategy::kRing}) {
    const auto bytes = FormulaBytes(strategy, problem, kRanks);
    EXPECT_EQ(3 * bytes->forward_between_nodes, bytes->forward);
    EXPECT_EQ(3 * bytes->backward_between_nodes, bytes->backward);
  }
  problem.ranks_per_node = 0;
  // With Ulysses, three quarters of q, k and v go to others, and three quarters of the results come
  // back.
  EXPECT_EQ(FormulaBytes(Strategy::kUlysses, problem, kRanks)->forward,
            4 * problem.batch * problem.seqlen * (2 * 4 + 2 * 4) * problem.head_dim * 3 / 4);
  // Tensor parallelism gathers and reduce-scatters [tokens, width]. Each moves three quarters on
  // each of four ranks, and an all-reduce is two of them.
  const int64_t exchange = 3 * 4 * problem.batch * problem.seqlen * problem.heads * 8;
  const auto tp = FormulaBytes(Megatron::kTp, problem, kRanks);
  EXPECT_EQ(tp->forward, 2 * exchange);
  EXPECT_EQ(tp->backward, 2 * exchange);
  const auto tp_sp = FormulaBytes(Megatron::kTpSp, problem, kRanks);
  EXPECT_EQ(tp_sp->forward, 2 * exchange);
  EXPECT_EQ(tp_sp->backward, 3 * exchange);
  EXPECT_EQ(FormulaBytes(Megatron::kTp, problem, 1)->forward, 0);
  // bfloat16 halves everything but lse, delta and the accumulators.
  problem.dtype = DType::kBFloat16;
  problem.kv_heads = 4;
  const int64_t transfers = (kRanks - 1) * problem.batch * problem.seqlen;
  const int64_t h = problem.heads * problem.head_dim;
  EXPECT_EQ(FormulaBytes(Strategy::kRing, problem, kRanks)->backward, transfers * 12 * h);
  EXPECT_EQ(FormulaBytes(Strategy::kBurst, problem, kRanks)->backward,
            transfers * (8 * h + 8 * problem.heads));
  // Ring gradients in bfloat16 halve dQ, dK and dV.
  problem.ring_grad_dtype = RingGradDType::kBf16;
  EXPECT_EQ(FormulaBytes(Strategy::kRing, problem, kRanks)->backward, transfers * 8 * h);
  EXPECT_EQ(FormulaBytes(Strategy::kBurst, problem, kRanks)->backward,
            transfers * (6 * h + 8 * problem.heads));
}

TEST(Flops, CountVisiblePairs) {
  AttentionProblem problem = SmallProblem();
  EXPECT_EQ(problem.forward_flops(), 4.0 * 2 * 48 * 48 * 4 * 8);
  problem.causal = true;
  EXPECT_EQ(problem.forward_flops(), 4.0 * 2 * (48 * 49 / 2) * 4 * 8);
  EXPECT_EQ(problem.forward_backward_flops(), 3.5 * problem.forward_flops());
}

// ---- Measurements.

TEST(MeasureAttention, CountsTheBytesOfTheFormula) {
  for (const Method method :
       {Method(Strategy::kBurst), Method(Strategy::kRing), Method(Strategy::kUlysses),
        Method(Strategy::kBurstUlysses), Method(Megatron::kTp), Method(Megatron::kTpSp)}) {
    for (const int ranks : {1, 2, 3, 4}) {
      const bool all_share_heads = method == Strategy::kUlysses || method.tensor_parallel();
      if (all_share_heads && ranks == 3) continue;  // 4 heads do not divide
      for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
        AttentionProblem problem = SmallProblem();
        problem.seqlen = 50;  // which 3 does not divide
        problem.kv_heads = 2;
        problem.causal = true;  // contiguous ranks skip rounds
        problem.layout = layout;
        problem.tiles = ranks == 2;
        if (ranks == 4 && HasRing(method.strategy)) problem.ranks_per_node = 2;
        const auto measured = MeasureAttention(method, problem, ranks, 1, 1);
        ASSERT_TRUE(measured.ok()) << measured.status();
        const auto formula = FormulaBytes(method, problem, ranks);
        EXPECT_EQ(measured->bytes_sent.forward, formula->forward);
        EXPECT_EQ(measured->bytes_sent.backward, formula->backward);
        EXPECT_EQ(measured->bytes_sent.forward_between_nodes, formula->forward_between_nodes);
        EXPECT_EQ(measured->bytes_sent.backward_between_nodes, formula->backward_between_nodes);
        EXPECT_EQ(formula->backward_between_nodes > 0, problem.ranks_per_node > 0);
        EXPECT_EQ(formula->forward > 0, ranks > 1);
        EXPECT_GT(measured->whole.forward, 0);
        EXPECT_EQ(measured->quiet.forward_backward > 0, ranks > 1);
        EXPECT_EQ(measured->alone.forward_backward > 0, ranks > 1);
        // There are eight tensors [batch, length, heads, head_dim], half of them with half the
        // heads.
        EXPECT_GT(measured->peak_bytes, 6 * 2 * (problem.seqlen / ranks) * 4 * 8 * 4);
      }
    }
  }
}

// The measured layer computes attention. Its joined results equal those of one rank.
TEST(TensorParallelLayer, ComputesAttention) {
  AttentionProblem problem = SmallProblem();
  problem.seqlen = 13;
  problem.kv_heads = 2;
  problem.causal = true;
  problem.dtype = DType::kFloat64;
  const auto numbers = [&](int64_t heads, int seed) {
    const Tensor tensor =
        Tensor::Empty({problem.batch, problem.seqlen, heads, problem.head_dim}, problem.dtype);
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.data<double>()[i] = std::sin(static_cast<double>(1 + i * (2 * seed + 1)));
    }
    return tensor;
  };
  const Tensor q = numbers(problem.heads, 1), k = numbers(problem.kv_heads, 2);
  const Tensor v = numbers(problem.kv_heads, 3), dout = numbers(problem.heads, 4);
  const auto attention = *BurstAttention::Create(problem.options(Strategy::kSingle), nullptr);
  const AttentionSchedule schedule = *attention->Schedule(problem.seqlen, problem.mask());
  const AttentionCall call = {&schedule, q, k, v};
  AttentionResult result;
  ASSERT_TRUE(attention->Forward(call, &result).ok());
  AttentionGradients gradients = {dout};
  ASSERT_TRUE(attention->Backward(call, result, &gradients).ok());
  const auto near = [](const Tensor& actual, const Tensor& expected) {
    const auto a = actual.ToVector<double>(), e = expected.ToVector<double>();
    ASSERT_EQ(a.size(), e.size());
    // Both are in double, and dot products have 13 terms of order 1.
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], e[i], 1e-13);
  };
  for (const Megatron megatron : {Megatron::kTp, Megatron::kTpSp}) {
    const absl::Status status = RunRanks(2, [&](Communicator& comm) -> absl::Status {
      BURST_ASSIGN_OR_RETURN(const auto own, MakeAttention(megatron, problem, &comm));
      BURST_ASSIGN_OR_RETURN(AttentionSchedule own_schedule,
                             own->Schedule(problem.seqlen, problem.mask()));
      TensorParallelLayer layer(megatron, problem, *own, std::move(own_schedule), &comm);
      const auto tokens = [&](const Tensor& all) {
        if (megatron == Megatron::kTp) return all;
        return TokenExchange::Own(layer.shard(), all);
      };
      const auto keys = [&](const Tensor& all) { return all.Slice(2, comm.rank(), 1).Clone(); };
      layer.SetInputs({tokens(q), keys(k), keys(v), tokens(dout)});
      for (int pass = 0; pass < 2; ++pass) {  // the second pass runs with what the first has left
        BURST_RETURN_IF_ERROR(layer.Forward());
        BURST_RETURN_IF_ERROR(layer.Backward());
      }
      near(layer.results().y, tokens(result.out));
      near(layer.results().dx, tokens(gradients.dq));
      near(layer.results().dk, keys(gradients.dk));
      near(layer.results().dv, keys(gradients.dv));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(MeasureErrors, AreThoseOfSinglePrecision) {
  AttentionProblem problem = SmallProblem();
  problem.causal = true;
  problem.kv_heads = 2;
  const auto reference = MakeErrorReference(problem, 2);
  ASSERT_TRUE(reference.ok()) << reference.status();
  for (const int ranks : {1, 2, 8}) {
    for (const Strategy strategy : {Strategy::kBurst, Strategy::kRing, Strategy::kBurstUlysses}) {
      const auto errors = MeasureErrors(strategy, **reference, ranks, 1);
      ASSERT_TRUE(errors.ok()) << errors.status();
      for (const double error : {errors->out, errors->dq, errors->dk, errors->dv}) {
        EXPECT_GT(error, 0);
        EXPECT_LT(error, 1e-5);  // 48 roundings of 2^-24, with room
      }
    }
  }
}

TEST(MeasureErrors, OfTilesOfAnySize) {
  AttentionProblem problem = SmallProblem();
  problem.causal = true;
  const auto reference = MakeErrorReference(problem, 2);
  ASSERT_TRUE(reference.ok()) << reference.status();
  const auto own = MeasureErrors(Strategy::kBurst, **reference, 2, 1);
  const auto single_keys = MeasureErrors(Strategy::kBurst, **reference, 2, 1, /*tile_keys=*/1);
  ASSERT_TRUE(own.ok() && single_keys.ok()) << own.status() << single_keys.status();
  EXPECT_NE(own->out, single_keys->out) << "another order of additions";
  for (const double error : {single_keys->out, single_keys->dq}) EXPECT_LT(error, 1e-5);
}

TEST(CheckProblem, OfTiles) {
  AttentionProblem problem = SmallProblem();
  problem.tile_keys = 32;
  EXPECT_TRUE(CheckProblem(Strategy::kBurst, problem, 2).ok());
  problem.device = DeviceType::kCuda;
  const absl::Status gpu = CheckProblem(Strategy::kBurst, problem, 2);
  EXPECT_TRUE(absl::StartsWith(gpu.message(), "--tile_keys: ")) << gpu;
  EXPECT_TRUE(absl::StrContains(gpu.message(), "192 keys")) << gpu;
}

TEST(QuietCommunicator, LeavesMessagesOutAndCountsTheOthers) {
  const absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    QuietCommunicator quiet(&comm);
    BURST_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> group, quiet.Split(0, 0));
    const int peer = 1 - comm.rank();
    for (Communicator* by : {static_cast<Communicator*>(&quiet), group.get()}) {
      for (const bool silent : {false, true, false}) {
        quiet.set_quiet(silent);
        const int64_t before = quiet.bytes_sent();
        const int sent = 10 + comm.rank();
        int received = -1;
        const SendBuffer send = {&sent, sizeof(sent), peer};
        const ReceiveBuffer receive = {&received, sizeof(received), peer};
        BURST_RETURN_IF_ERROR(by->Post(Channel::kRead, {&send, 1}, {&receive, 1}));
        BURST_RETURN_IF_ERROR(by->Wait(Channel::kRead));
        EXPECT_EQ(received, silent ? -1 : 10 + peer);
        const Tensor sum = Tensor::FromVector<float>({1}, {1});
        BURST_RETURN_IF_ERROR(by->AllReduceSum(sum));
        EXPECT_EQ(sum.data<float>()[0], silent ? 1 : 2);
        EXPECT_EQ(quiet.bytes_sent() - before, silent ? 0 : 8);
        BURST_RETURN_IF_ERROR(by->Barrier());
        EXPECT_EQ(quiet.bytes_sent() - before, silent ? 0 : 8);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// ---- Tables.

std::vector<ReportRow> SomeRows() {
  std::vector<ReportRow> rows;
  for (const char* strategy : {"burst", "a \"b\", c"}) {
    for (const int ranks : {4, 2}) {
      ReportRow row;
      row["strategy"] = strategy;
      row["ranks"] = ranks;
      row["batch"] = 1;
      row["speed"] = 0.25 * ranks;
      row["share"] = nullptr;
      rows.push_back(row);
    }
  }
  return rows;
}

TEST(Report, TableAndCsv) {
  const std::vector<ReportRow> rows = SomeRows();
  EXPECT_EQ(TableHeader({{"strategy", "strategy"}, {"speed", "m/s"}, {"share", "share"}}),
            "strategy       m/s     share\n");
  EXPECT_EQ(TableLine(rows[0],
                      {{"strategy", "strategy"}, {"speed", "mm/s", 1, 1000}, {"share", "share"}}),
            "burst       1000.0         -\n");
  EXPECT_EQ(Csv(rows),
            "strategy,ranks,batch,speed,share\n"
            "burst,4,1,1.0,\n"
            "burst,2,1,0.5,\n"
            "\"a \"\"b\"\", c\",4,1,1.0,\n"
            "\"a \"\"b\"\", c\",2,1,0.5,\n");
}

TEST(Report, PlotRunsOverWhatVaries) {
  const LinePlot plot = PlotOf(SomeRows(), {"batch", "ranks"}, "speed", 10);
  EXPECT_EQ(plot.x_label, "ranks");
  ASSERT_EQ(plot.series.size(), 2u);
  EXPECT_EQ(plot.series[0].label, "burst");
  ASSERT_EQ(plot.series[0].points.size(), 2u);
  EXPECT_EQ(plot.series[0].points[0].x, 2);
  EXPECT_EQ(plot.series[0].points[0].y, 5);
  const std::string svg = LinePlotSvg(plot);
  EXPECT_TRUE(absl::StrContains(svg, "</svg>"));
  EXPECT_FALSE(absl::StrContains(svg, "nan") || absl::StrContains(svg, "inf"));
  // A second variable is in the legend, and rows without a value are left out.
  const LinePlot other = PlotOf(SomeRows(), {"ranks", "batch"}, "share", 1);
  EXPECT_TRUE(other.series.empty());
  EXPECT_TRUE(absl::StrContains(LinePlotSvg(other), "</svg>"));
}

absl::StatusOr<ScalingOptions> Parse(std::vector<std::string> arguments) {
  std::vector<char*> argv = {const_cast<char*>("scaling")};
  for (std::string& argument : arguments) argv.push_back(argument.data());
  return ScalingOptionsFromArguments(static_cast<int>(argv.size()), argv.data(), {1, 8});
}

TEST(Options, ListsOfNumbers) {
  const auto options = Parse({"--seqlens=8,2,16"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->seqlens, (std::vector<int64_t>{8, 2, 16}));
  for (const char* text : {"1,", "0", "-1", "1.5", "2,x", "2,2"}) {
    const absl::Status refused = Parse({absl::StrCat("--seqlens=", text)}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_TRUE(absl::StartsWith(refused.message(), "--seqlens: ")) << refused;
  }
}

}  // namespace
}  // namespace burst
