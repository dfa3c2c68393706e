// Compares plans with measurements on GPUs, with the steps that they plan, and with formulas.
#include "train/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/simulated/simulated_communicator.h"
#include "burst/comm/thread/thread_communicator.h"
#include "train/pipeline/schedule.h"
#include "train/plan/fit.h"
#include "train/plan/gpu_models.h"
#include "train/plan/plan_options.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

constexpr double kGiB = double{1 << 30};
// A small Llama whose tokens nobody needs to read.
constexpr char kSmall[] =
    "--model={\"family\":\"llama\",\"layers\":4,\"width\":256,\"heads\":4,\"kv_heads\":2,"
    "\"ffn\":1024,\"vocab\":512,\"dropout\":0}";

// A model whose state is large compared with what a step on few tokens needs.
constexpr char kWide[] =
    "--model={\"family\":\"llama\",\"layers\":4,\"width\":1024,\"heads\":8,\"kv_heads\":2,"
    "\"ffn\":4096,\"vocab\":512,\"dropout\":0}";

struct Question {
  TrainingSetup setup;
  GpuModel gpu;
};

absl::StatusOr<Question> Ask(const std::vector<std::string>& arguments) {
  PlanOptions options;
  OptionTable table = PlanOptionTable(&options);
  std::vector<std::string> words = arguments;
  words.insert(words.begin(), "plan");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  BURST_RETURN_IF_ERROR(table.ParseArguments(static_cast<int>(argv.size()), argv.data()));
  int64_t count = 0;
  Question question;
  BURST_ASSIGN_OR_RETURN(question.gpu, GpuOf(options, &count));
  BURST_ASSIGN_OR_RETURN(const ResolvedConfig config,
                         ConfigOf(options, count, options.train.seqlen));
  BURST_ASSIGN_OR_RETURN(question.setup, PreparePlan(config));
  return question;
}

StepPlan PlanFor(const std::vector<std::string>& arguments) {
  const absl::StatusOr<Question> question = Ask(arguments);
  EXPECT_TRUE(question.ok()) << question.status();
  absl::StatusOr<StepPlan> plan = PlanStep(question->setup, question->gpu, /*gpus_per_node=*/8);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

StepPlan PlanFor(std::vector<std::string> arguments, const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return PlanFor(arguments);
}

// benchmarks/results/plan_h200.json says where each row is from.
TEST(Plan, AgreesWithWhatWasMeasured) {
  constexpr double kShortest = 0.05;  // s: below it, gaps between kernels count
  nlohmann::json results;
  std::ifstream("benchmarks/results/plan_h200.json") >> results;
  ASSERT_GE(results["rows"].size(), 12u);
  int close = 0;
  for (const auto& row : results["rows"]) {
    const std::vector<std::string> options = row["options"];
    const StepPlan plan = PlanFor(options);
    const double gib = static_cast<double>(plan.peak_bytes) / kGiB;
    const double measured = row["GiB"], rate = row["tokens_per_second"];
    std::printf("%6.1f GiB, measured %6.1f; %7.0f tokens/s, measured %7.0f: %s\n", gib, measured,
                plan.tokens_per_second, rate, absl::StrJoin(options, " ").substr(0, 100).c_str());
    EXPECT_NEAR(gib / measured, 1, 0.05) << row;
    if (plan.step_seconds < kShortest) continue;
    EXPECT_NEAR(plan.tokens_per_second / rate, 1, 0.15) << row;
    close += std::abs(plan.tokens_per_second / rate - 1) <= 0.1;
  }
  EXPECT_GE(close, 16);
}

// Stages compute equally long: all layers are alike, and the rest of the first and the last stage
// is 1/500 of the work. A step of m micro-batches takes m t, the bubble, and an update. One GPU
// tells the update's part of m t: it has no bubble, and p times the layers. Messages are not free,
// by half a hundredth of a pass.
TEST(Plan, ThePipelinesBubbleIsThatOfTheFormula) {
  constexpr int kFew = 4, kMany = 12;
  // The time of a step in addition to m t, divided by m t.
  const auto rest = [](int stages, int chunks) {
    const auto seconds = [&](int micro_batches) {
      const StepPlan plan =
          PlanFor({"--model={\"family\":\"llama\",\"layers\":16,\"width\":2048,\"heads\":16,"
                   "\"kv_heads\":16,\"ffn\":8192,\"vocab\":64,\"dropout\":0}",
                   "--seqlen=8192", "--batch=1", "--sp=1", absl::StrCat("--gpus=", stages, "xH200"),
                   absl::StrCat("--pp=", stages), absl::StrCat("--pp_chunks=", chunks),
                   absl::StrCat("--accumulate=", micro_batches)});
      return plan.step_seconds;
    };
    const double few = seconds(kFew), all = kFew * (seconds(kMany) - few) / (kMany - kFew);
    return (few - all) / all;
  };
  const double update = rest(1, 1);
  for (const auto& [stages, chunks] : {std::pair(2, 1), std::pair(4, 1), std::pair(4, 2)}) {
    const double bubble = rest(stages, chunks) - update;
    const double formula = PipelineBubble({stages, chunks, kFew});
    std::printf("%d stages, %d chunks: bubble %.4f, formula %.4f\n", stages, chunks, bubble,
                formula);
    EXPECT_NEAR(bubble, formula, 0.02 * formula) << stages << " stages, " << chunks << " chunks";
  }
}

// The bubble in a step's metrics, over links that take only a message's shortest time; without a
// pipeline there is none. The last stage's work outside its layers is 1/500 of the whole, p/500 of
// a stage's: the p - 1 others wait for it. A hundredth is for messages.
TEST(Plan, TheBubbleOfTheMetricsIsThatOfTheFormula) {
  const std::vector<std::string> step = {
      "--model={\"family\":\"llama\",\"layers\":16,\"width\":2048,\"heads\":16,\"kv_heads\":16,"
      "\"ffn\":8192,\"vocab\":64,\"dropout\":0}",
      "--seqlen=8192", "--batch=2", "--sp=1", "--links=1000000"};
  EXPECT_FALSE(PlanFor(step, {"--gpus=1xH200", "--accumulate=2"}).pipeline_bubble.has_value());
  const PipelineShape shapes[] = {{2, 1, 3}, {2, 4, 4}, {4, 1, 4}, {4, 2, 8}, {8, 1, 3}};
  for (const PipelineShape& shape : shapes) {
    for (const int dp : {1, 2}) {
      const StepPlan plan = PlanFor(
          step, {absl::StrCat("--gpus=", dp * shape.stages, "xH200"), absl::StrCat("--dp=", dp),
                 absl::StrCat("--pp=", shape.stages), absl::StrCat("--pp_chunks=", shape.chunks),
                 absl::StrCat("--accumulate=", shape.micro_batches)});
      ASSERT_TRUE(plan.pipeline_bubble.has_value());
      const double formula = PipelineBubble(shape);
      std::printf("%d stages, %d chunks, %d micro-batches: bubble %.4f, formula %.4f\n",
                  shape.stages, shape.chunks, shape.micro_batches, *plan.pipeline_bubble, formula);
      EXPECT_NEAR(*plan.pipeline_bubble, formula, (shape.stages - 1) / 500.0 + 0.01 * formula);
    }
  }
}

// Where links are slow, a pipeline is the fastest mesh of many micro-batches, and it holds a part
// of the model.
TEST(Plan, APipelineIsFasterOverSlowLinks) {
  const std::vector<std::string> step = {kWide, "--seqlen=4096", "--batch=1", "--accumulate=16"};
  const auto on = [&](const std::vector<std::string>& mesh) {
    std::vector<std::string> options = {"--gpus=2xH200", "--links=10"};
    options.insert(options.end(), mesh.begin(), mesh.end());
    return PlanFor(step, options);
  };
  const StepPlan stages = on({"--pp=2", "--sp=1"});
  const StepPlan tensor = on({"--sp=2", "--strategy=tp+sp"});
  const StepPlan one = PlanFor(step, {"--gpus=1xH200"});
  EXPECT_LT(stages.step_seconds, 0.8 * tensor.step_seconds);
  EXPECT_LT(stages.step_seconds, 0.9 * one.step_seconds);
  EXPECT_NEAR(static_cast<double>(stages.parameters) / one.parameters, 0.5, 0.02);
}

// The simulated step sends as many bytes as the real one on CPUs.
TEST(Plan, SendsWhatTheRealStepSends) {
  using Sent = std::vector<std::array<int64_t, kNumChannels>>;  // by rank
  const auto count = [](Communicator& comm, const TrainingSetup& setup, Sent* sent) {
    const ScopedThreadPool pool(1);
    BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
    BURST_RETURN_IF_ERROR(trainer->Step(0).status());
    comm.ResetStats();
    BURST_RETURN_IF_ERROR(trainer->Step(1).status());
    (*sent)[comm.rank()] = comm.stats().bytes_sent;
    return absl::OkStatus();
  };
  const std::vector<std::vector<std::string>> cases = {
      {"--strategy=burst"},
      {"--strategy=ring"},
      {"--strategy=burst", "--layout=striped", "--recompute=selective"},
      {"--strategy=burst", "--recompute=full", "--accumulate=2"},
      {"--strategy=burst", "--window=20", "--layout=contiguous"},
      {"--strategy=burst", "--ring_backward=ring", "--zero=1"},
  };
  for (const std::vector<std::string>& options : cases) {
    std::vector<std::string> arguments = {kSmall, "--gpus=4xH200", "--seqlen=64", "--batch=4",
                                          "--precision=fp32"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const absl::StatusOr<Question> question = Ask(arguments);
    ASSERT_TRUE(question.ok()) << question.status();
    TrainingSetup setup = question->setup;
    const int ranks = setup.config.ranks;
    Sent simulated(ranks), real(ranks);
    absl::Status status = RunSimulatedRanks(
        ranks, 0, question->gpu,
        [&](Communicator& comm, SimulatedGpu&) { return count(comm, setup, &simulated); });
    ASSERT_TRUE(status.ok()) << status;
    setup.config.device = DeviceType::kCpu;
    status = RunRanks(ranks, [&](Communicator& comm) { return count(comm, setup, &real); });
    ASSERT_TRUE(status.ok()) << status;
    int64_t bytes = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      bytes += real[rank][0];
      for (const Channel channel : {Channel::kRead, Channel::kGradient}) {
        const int c = static_cast<int>(channel);
        EXPECT_EQ(simulated[rank][c], real[rank][c])
            << Name(channel) << " of rank " << rank << ": " << absl::StrJoin(options, " ");
      }
    }
    EXPECT_GT(bytes, 0) << absl::StrJoin(options, " ");
  }
}

TEST(Plan, KeepsAndDividesTheState) {
  const std::vector<std::string> small = {kSmall, "--gpus=4xH200", "--seqlen=256", "--batch=1"};
  const StepPlan whole = PlanFor(small), zero1 = PlanFor(small, {"--zero=1"}),
                 zero3 = PlanFor(small, {"--zero=3"});
  const int64_t n = whole.parameters / 2;  // bf16
  EXPECT_EQ(whole.gradients, 4 * n);
  EXPECT_EQ(whole.optimizer, 12 * n);
  EXPECT_NEAR(zero1.optimizer, 3 * n, 0.01 * n);
  EXPECT_EQ(zero1.gradients, 4 * n);
  EXPECT_NEAR(zero3.parameters + zero3.gradients + zero3.optimizer, 4.5 * n, 0.02 * n);
  EXPECT_LT(zero3.peak_bytes, zero1.peak_bytes);
  EXPECT_LT(zero1.peak_bytes, whole.peak_bytes);
}

// The shapes give the bytes of a token that a layer keeps in bf16, out and lse among them.
TEST(Plan, RecomputationTradesTimeForMemory) {
  const std::vector<std::string> small = {kSmall, "--gpus=1xH200", "--seqlen=32768", "--batch=1"};
  const StepPlan none = PlanFor(small), selective = PlanFor(small, {"--recompute=selective"}),
                 sequence = PlanFor(small, {"--recompute=sequence"}),
                 full = PlanFor(small, {"--recompute=full"});
  EXPECT_GT(none.peak_bytes, selective.peak_bytes);
  EXPECT_GT(selective.peak_bytes, sequence.peak_bytes);
  EXPECT_GT(sequence.peak_bytes, full.peak_bytes);
  EXPECT_LT(none.step_seconds, selective.step_seconds);
  EXPECT_LT(selective.step_seconds, sequence.step_seconds);
  EXPECT_LT(sequence.step_seconds, full.step_seconds);
  // Selective keeps more than full: out in bf16 and lse in fp32 of four layers.
  const double kept = 4 * 32768 * (256 * 2 + 4 * 4);
  EXPECT_NEAR(selective.peak_bytes - full.peak_bytes, kept, 0.3 * kept);
}

// Q, K and V in 8 bits take more memory, whether where a step needs most or not, and their products
// take less time.
TEST(Plan, AttentionInFp8IsFaster) {
  const std::vector<std::string> arguments = {kWide, "--gpus=1xH200", "--seqlen=65536",
                                              "--batch=1"};
  const StepPlan plain = PlanFor(arguments), fp8 = PlanFor(arguments, {"--attention_fp8"});
  EXPECT_LT(fp8.step_seconds, plain.step_seconds);
  EXPECT_GE(fp8.peak_bytes, plain.peak_bytes);
}

// Two tensors a layer but the last one, in bf16, are away until the backward; behind fast links
// nobody waits for them.
TEST(Plan, OffloadedActivationsAreInTheHostsMemory) {
  const std::vector<std::string> small = {kSmall, "--gpus=1xH200", "--seqlen=131072", "--batch=1",
                                          "--recompute=selective"};
  const absl::StatusOr<Question> question = Ask(small);
  std::vector<std::string> arguments = small;
  arguments.push_back("--offload=activations");
  absl::StatusOr<Question> away = Ask(arguments);
  ASSERT_TRUE(question.ok() && away.ok()) << question.status() << away.status();
  const StepPlan here = *PlanStep(question->setup, question->gpu, 0);
  away->gpu.host_link = 1e12;
  const StepPlan fast = *PlanStep(away->setup, away->gpu, 0);
  const int64_t bytes = 3 * 2 * 131072 * 256 * 2;
  EXPECT_EQ(here.host_bytes, here.optimizer) << "the copy that a save takes";
  EXPECT_NEAR(fast.host_bytes - here.host_bytes, bytes, 0.001 * bytes);
  EXPECT_LT(fast.peak_bytes, here.peak_bytes);
  EXPECT_NEAR(fast.step_seconds / here.step_seconds, 1, 0.01);
  away->gpu.host_link = 1e9;  // there and back
  const StepPlan slow = *PlanStep(away->setup, away->gpu, 0);
  EXPECT_GT(slow.step_seconds, bytes / 1e9);
  EXPECT_EQ(slow.peak_bytes, fast.peak_bytes);
}

// The host's memory is made before the first step, as much as every strategy needs: a step that
// needs more makes it itself, and shows here.
TEST(Plan, OffloadsMemoryIsMadeAtTheStart) {
  constexpr int64_t kTokens = 4096, kLayers = 3, kBytes = 2;  // all layers but the last one, bf16
  const auto host_bytes = [](const std::string& strategy, const std::string& recompute) {
    const std::vector<std::string> step = {
        kSmall,      "--gpus=2xH200",          "--seqlen=4096",
        "--batch=1", "--strategy=" + strategy, "--recompute=" + recompute};
    return static_cast<double>(PlanFor(step, {"--offload=activations"}).host_bytes -
                               PlanFor(step).host_bytes);
  };
  const double half = kLayers * kTokens / 2 * 256 * kBytes;  // width, and channels of all heads
  for (const char* strategy : {"burst", "ring", "ulysses", "burst+ulysses", "tp+sp"}) {
    EXPECT_NEAR(host_bytes(strategy, "full") / half, 1, 0.01) << strategy;
  }
  EXPECT_NEAR(host_bytes("tp", "full") / half, 2, 0.01);
  for (const char* strategy : {"burst", "ring", "tp+sp"}) {  // tp+sp: half of the heads, all tokens
    EXPECT_NEAR(host_bytes(strategy, "selective") / half, 2, 0.01) << strategy;
  }
  EXPECT_NEAR(host_bytes("ulysses", "selective") / half, 3, 0.01);
  EXPECT_NEAR(host_bytes("burst+ulysses", "selective") / half, 3, 0.01);
  EXPECT_NEAR(host_bytes("tp", "selective") / half, 3, 0.01);
}

// 12 bytes of a parameter in the host's memory, none of them copied for a save; both ways at once
// over the host's link.
TEST(Plan, AnOffloadedOptimizerIsInTheHostsMemory) {
  const std::vector<std::string> wide = {kWide,       "--gpus=2xH200", "--seqlen=256",
                                         "--batch=2", "--zero=1",      "--sp=1"};
  absl::StatusOr<Question> here = Ask(wide), away = here;
  ASSERT_TRUE(here.ok()) << here.status();
  away->setup.config.offload = Offload::kOptimizer;
  const StepPlan kept = *PlanStep(here->setup, here->gpu, 0);
  away->gpu.host_link = 1e9;
  const StepPlan streamed = *PlanStep(away->setup, away->gpu, 0);
  EXPECT_NEAR(kept.optimizer, 12 * kept.gradients / 4 / 2, 1e4);
  EXPECT_EQ(streamed.optimizer, 0);
  EXPECT_EQ(streamed.host_bytes, kept.optimizer);
  EXPECT_EQ(kept.host_bytes, kept.optimizer);
  EXPECT_LT(streamed.peak_bytes, kept.peak_bytes - kept.optimizer * 9 / 10);
  const double link_seconds = static_cast<double>(kept.optimizer) / 1e9;
  EXPECT_NEAR((streamed.step_seconds - kept.step_seconds) / link_seconds, 1, 0.05);
  away->gpu.host_link = 1e15;
  // A launch for each piece, in place of one.
  EXPECT_LE(PlanStep(away->setup, away->gpu, 0)->step_seconds,
            kept.step_seconds + 65 * away->gpu.kernel_seconds);
}

// Where all ranks have the whole state, one of them copies it for a save; they share the host.
TEST(Plan, TheCopyOfASaveCountsOnce) {
  const std::vector<std::string> wide = {kWide, "--seqlen=256", "--batch=4", "--sp=1"};
  const StepPlan one = PlanFor(wide, {"--gpus=1xH200"}), four = PlanFor(wide, {"--gpus=4xH200"});
  EXPECT_EQ(one.host_bytes, one.optimizer);
  EXPECT_EQ(four.optimizer, one.optimizer);
  EXPECT_EQ(four.host_bytes, one.optimizer / 4);
}

// Llama 3.1 8B's shape. A window, for a step of minutes; the memory is the same without.
std::vector<std::string> LongContext(std::vector<std::string> more) {
  more.insert(
      more.end(),
      {"--model={\"family\":\"llama\",\"layers\":32,\"width\":4096,\"heads\":32,\"kv_heads\":8,"
       "\"ffn\":14336,\"vocab\":128256,\"tied_embeddings\":false,\"rope_theta\":500000}",
       "--batch=1", "--window=8192", "--recompute=full", "--ffn_chunk=16384"});
  return more;
}

// Two runs of 786,432 tokens on an H200 of 139.3 GiB. One found no room for 6 GiB, though 129.4
// were in use: no gap was as large. The other, with 12 GiB less, ran.
TEST(Plan, GapsBetweenLargeTensorsCount) {
  const std::vector<std::string> options =
      LongContext({"--gpus=1xH200", "--seqlen=786432", "--head_chunk=1"});
  const StepPlan failed = PlanFor(options, {"--recompute_segment=4", "--offload=optimizer"}),
                 ran = PlanFor(options, {"--recompute_segment=8", "--offload=all"});
  EXPECT_EQ(failed.largest_tensor / kGiB, 6);
  GpuModel gpu = Ask(options)->gpu;
  gpu.memory = 139.3 * kGiB;
  gpu.host_memory = 120.0 * kGiB;
  EXPECT_LT(failed.peak_bytes, gpu.memory);
  EXPECT_FALSE(Fits(failed, gpu));
  EXPECT_TRUE(Fits(ran, gpu));
}

// docs/training/long_sequences.md says this.
TEST(Plan, MillionsOfTokensFit) {
  const StepPlan one = PlanFor(
      LongContext({"--gpus=1xH200", "--seqlen=1572864", "--head_chunk=1", "--offload=all"}));
  const StepPlan four =
      PlanFor(LongContext({"--gpus=4xH200", "--seqlen=4194304", "--head_chunk=2",
                           "--recompute_segment=4", "--zero=3", "--offload=activations"}));
  const GpuModel gpu = Ask({kSmall, "--gpus=1xH200"})->gpu;
  EXPECT_TRUE(Fits(one, gpu) && Fits(four, gpu));
  EXPECT_LE(one.peak_bytes / kGiB, 123);
  EXPECT_LE(one.host_bytes / kGiB, 462);
  EXPECT_LE(four.peak_bytes / kGiB, 127);
  EXPECT_LE(four.host_bytes / kGiB, 79);
}

TEST(Plan, SlowLinksAndTheNetworkTakeLonger) {
  const std::vector<std::string> small = {kSmall, "--gpus=4xH200", "--seqlen=16384", "--batch=1"};
  const StepPlan fast = PlanFor(small), slow = PlanFor(small, {"--links=1"});
  EXPECT_GT(slow.step_seconds, 2 * fast.step_seconds);
  EXPECT_EQ(slow.peak_bytes, fast.peak_bytes);
  const absl::StatusOr<Question> nodes = Ask(small);
  ASSERT_TRUE(nodes.ok());
  GpuModel gpu = nodes->gpu;
  gpu.network = 1e9;
  const absl::StatusOr<StepPlan> two_nodes = PlanStep(nodes->setup, gpu, /*gpus_per_node=*/2);
  ASSERT_TRUE(two_nodes.ok());
  EXPECT_GT(two_nodes->step_seconds, 1.5 * fast.step_seconds);
}

// As a launcher's job would: a double ring where nodes have as many GPUs each.
TEST(Plan, NodesMakeADoubleRing) {
  const auto per_node = [](const std::string& gpus, const std::string& more) {
    const absl::StatusOr<Question> question =
        Ask({kSmall, "--gpus=" + gpus, "--seqlen=256", "--batch=1", more});
    EXPECT_TRUE(question.ok()) << question.status();
    return question->setup.config.ranks_per_node;
  };
  EXPECT_EQ(per_node("8xH200", "--zero=1"), 0);
  EXPECT_EQ(per_node("16xH200", "--zero=1"), 8);
  EXPECT_EQ(per_node("16xH200", "--gpus_per_node=4"), 4);
  EXPECT_EQ(per_node("12xH200", "--zero=1"), 0);
  EXPECT_EQ(per_node("16xH200", "--ranks_per_node=0"), 0);
}

// Contiguous causal: the last rank has most to do, and the others wait for it.
TEST(Plan, WaitsForTheBusiestRank) {
  const std::vector<std::string> small = {kSmall, "--gpus=4xH200", "--seqlen=65536", "--batch=1"};
  const StepPlan even = PlanFor(small, {"--layout=zigzag"}),
                 uneven = PlanFor(small, {"--layout=contiguous"});
  EXPECT_GT(uneven.step_seconds, 1.3 * even.step_seconds);
}

TEST(Fit, TakesTheFastestThatFits) {
  const std::vector<std::string> small = {kSmall, "--gpus=2xH200", "--seqlen=131072", "--batch=1"};
  const absl::StatusOr<Question> question = Ask(small);
  ASSERT_TRUE(question.ok()) << question.status();
  GpuModel gpu = question->gpu;
  const StepPlan given = PlanFor(small), full = PlanFor(small, {"--recompute=full", "--zero=3"});
  const Choices all = {true, true, true, true, true};
  const auto fit = [&](int64_t memory, const Choices& choices) {
    gpu.memory = static_cast<double>(memory + kUnplannedBytes);
    absl::StatusOr<FittedPlan> fitted = FitStep(question->setup, gpu, 0, choices);
    EXPECT_TRUE(fitted.ok()) << fitted.status();
    return *std::move(fitted);
  };
  // With enough memory nothing is recomputed.
  EXPECT_FALSE(absl::StrContains(fit(2 * given.peak_bytes, all).options, "recompute"));
  // Never slower for more memory, and what is chosen fits.
  double seconds = 0;
  for (double share : {1.2, 0.8, 0.6, 0.4}) {
    const FittedPlan fitted = fit(static_cast<int64_t>(share * given.peak_bytes), all);
    if (!Fits(fitted.plan, gpu)) break;
    EXPECT_GE(fitted.plan.step_seconds, seconds);
    seconds = fitted.plan.step_seconds;
  }
  EXPECT_GT(seconds, 0);
  // Only what may be chosen is.
  const FittedPlan chosen = fit(full.peak_bytes, {/*zero=*/true, false, false, false, false});
  EXPECT_FALSE(absl::StrContains(chosen.options, "recompute")) << chosen.options;
  EXPECT_FALSE(Fits(chosen.plan, gpu));
}

// A model that is much larger than its step: only without the optimizer's state does it fit, at a
// cost; and not if the host lacks memory, too.
TEST(Fit, OffloadsTheOptimizerWhereNothingElseFits) {
  const absl::StatusOr<Question> question =
      Ask({kWide, "--gpus=1xH200", "--seqlen=128", "--batch=1"});
  ASSERT_TRUE(question.ok()) << question.status();
  const StepPlan given = *PlanStep(question->setup, question->gpu, 0);
  Question offloaded = *question;
  offloaded.setup.config.offload = Offload::kOptimizer;
  const StepPlan smaller = *PlanStep(offloaded.setup, question->gpu, 0);
  ASSERT_LT(smaller.peak_bytes, given.peak_bytes);
  const Choices all = {true, true, true, true, true};
  GpuModel gpu = question->gpu;
  EXPECT_EQ(FitStep(question->setup, gpu, 0, all)->options, "");
  gpu.memory = static_cast<double>(smaller.peak_bytes + kUnplannedBytes);
  EXPECT_EQ(FitStep(question->setup, gpu, 0, all)->options, "--offload=optimizer");
  absl::Status status = CheckFits(question->setup, given, gpu, 0);
  EXPECT_TRUE(absl::StrContains(status.message(), "; with --offload=optimizer it needs "))
      << status;
  gpu.host_memory = static_cast<double>(smaller.host_bytes - 1);
  EXPECT_FALSE(Fits(FitStep(question->setup, gpu, 0, all)->plan, gpu));
  status = CheckFits(question->setup, given, gpu, 0);
  EXPECT_TRUE(absl::StrContains(status.message(), " of the host's memory, which has ")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "more GPUs, a shorter --seqlen")) << status;
}

// Where layers' inputs are more than the host has room for, rows of layers keep one.
TEST(Fit, KeepsAnInputOfSeveralLayersWhereTheHostLacksMemory) {
  const absl::StatusOr<Question> question =
      Ask({kSmall, "--gpus=1xH200", "--seqlen=131072", "--batch=1", "--recompute=full",
           "--offload=activations", "--ffn_chunk=16384"});
  ASSERT_TRUE(question.ok()) << question.status();
  Question rows = *question;
  rows.setup.config.recompute_segment = 2;
  const StepPlan given = *PlanStep(question->setup, question->gpu, 0);
  const StepPlan in_rows = *PlanStep(rows.setup, question->gpu, 0);
  ASSERT_LT(in_rows.host_bytes, given.host_bytes);
  GpuModel gpu = question->gpu;
  gpu.memory = static_cast<double>(in_rows.peak_bytes + kUnplannedBytes);
  gpu.host_memory = static_cast<double>(in_rows.host_bytes);
  const FittedPlan fitted =
      *FitStep(question->setup, gpu, 0, {false, /*recompute=*/true, false, false, false});
  EXPECT_EQ(fitted.options, "--recompute_segment=2");
  const absl::Status status = CheckFits(question->setup, given, gpu, 0);
  EXPECT_TRUE(absl::StrContains(status.message(), " it needs ")) << status;
}

TEST(Fit, NamesTheSmallestChange) {
  const std::vector<std::string> small = {kSmall, "--gpus=1xH200", "--seqlen=32768", "--batch=1"};
  const absl::StatusOr<Question> question = Ask(small);
  ASSERT_TRUE(question.ok()) << question.status();
  GpuModel gpu = question->gpu;
  const StepPlan plan = PlanFor(small), selective = PlanFor(small, {"--recompute=selective"});
  gpu.memory = static_cast<double>(plan.peak_bytes + kUnplannedBytes);
  EXPECT_TRUE(CheckFits(question->setup, plan, gpu, 0).ok());
  gpu.memory = static_cast<double>(selective.peak_bytes + kUnplannedBytes);
  absl::Status status = CheckFits(question->setup, plan, gpu, 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(status.message(), "; with --recompute=selective it needs "))
      << status;
  gpu.memory = kUnplannedBytes;
  status = CheckFits(question->setup, plan, gpu, 0);
  EXPECT_TRUE(absl::StrContains(status.message(), "more GPUs, a shorter --seqlen")) << status;
}

// A GPU without memory makes the search try everything.
TEST(Fit, ProposesNothingThatConflicts) {
  for (const std::vector<std::string>& given :
       std::vector<std::vector<std::string>>{{"--tp=2", "--dp=2"},
                                             {"--pp=2", "--accumulate=2"},
                                             {"--exact"},
                                             {"--head_chunk=1"},
                                             {"--recompute=sequence"},
                                             {"--recompute=full", "--offload=all"},
                                             {"--strategy=ulysses", "--sp=2"},
                                             {"--pp=2", "--model=d12"}}) {
    std::vector<std::string> all = {kSmall, "--gpus=4xH200", "--seqlen=16384", "--batch=4"};
    all.insert(all.end(), given.begin(), given.end());
    if (given.back() == "--model=d12") all.push_back("--seqlen=1024");
    const absl::StatusOr<Question> question = Ask(all);
    ASSERT_TRUE(question.ok()) << given[0] << ": " << question.status();
    for (const double memory : {double{kUnplannedBytes}, 1.5 * kUnplannedBytes, 80 * kGiB}) {
      GpuModel gpu = question->gpu;
      gpu.memory = memory;
      const auto fitted = FitStep(question->setup, gpu, 8, {true, true, true, true, true});
      ASSERT_TRUE(fitted.ok()) << fitted.status();
      std::vector<std::string> again = all;
      for (absl::string_view option : absl::StrSplit(fitted->options, ' ', absl::SkipEmpty())) {
        again.emplace_back(option);
      }
      EXPECT_TRUE(Ask(again).ok())
          << given[0] << " " << fitted->options << ": " << Ask(again).status();
    }
  }
}

// Two sequences on four GPUs: four GPUs for each, or two groups of two. The model has two heads, so
// four ranks cannot divide them.
TEST(Meshes, AreThoseThatTheTrainerTakes) {
  PlanOptions options;
  options.gpus = "4xH200";
  options.train.batch = 2;
  options.train.seqlen = 256;
  options.train.model =
      R"({"family":"llama","layers":1,"width":128,"heads":2,"kv_heads":2,"ffn":128,"vocab":64})";
  const auto meshes = [&](bool mesh, bool strategy) {
    const auto choices = MeshesOf(options, 4, 256, mesh, strategy);
    EXPECT_TRUE(choices.ok()) << choices.status();
    std::vector<std::string> texts;
    for (const MeshChoice& choice : *choices) {
      EXPECT_EQ(choice.config.ranks, 4);
      EXPECT_EQ(choice.config.batch, 2);
      texts.push_back(choice.options);
    }
    std::sort(texts.begin(), texts.end());
    return texts;
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(meshes(false, false), (Texts{""}));
  EXPECT_EQ(meshes(true, false),
            (Texts{"", "--dp=1 --sp=2 --tp=2", "--dp=2 --sp=1 --tp=2", "--dp=2 --sp=2"}));
  EXPECT_EQ(meshes(false, true), (Texts{"", "--strategy=burst+ulysses"}));
  EXPECT_EQ(meshes(true, true),
            (Texts{"", "--dp=1 --sp=2 --tp=2", "--dp=2 --sp=1 --tp=2", "--dp=2 --sp=2",
                   "--dp=2 --sp=2 --strategy=burst+ulysses", "--dp=2 --sp=2 --strategy=ulysses",
                   "--strategy=burst+ulysses"}));
  // Micro-batches for three stages, layers for two.
  options.train.accumulate = 3;
  options.train.model =
      R"({"family":"llama","layers":2,"width":128,"heads":2,"kv_heads":2,"ffn":128,"vocab":64})";
  EXPECT_EQ(meshes(true, false), (Texts{"", "--dp=1 --sp=1 --pp=2 --tp=2", "--dp=1 --sp=2 --pp=2",
                                        "--dp=1 --sp=2 --tp=2", "--dp=2 --sp=1 --pp=2",
                                        "--dp=2 --sp=1 --tp=2", "--dp=2 --sp=2"}));
  // Chunks of a layer each, for micro-batches in groups of two.
  options.train.accumulate = 2;
  options.train.model =
      R"({"family":"llama","layers":8,"width":128,"heads":2,"kv_heads":2,"ffn":128,"vocab":64})";
  EXPECT_EQ(meshes(true, false),
            (Texts{"", "--dp=1 --sp=1 --pp=2 --pp_chunks=2 --tp=2",
                   "--dp=1 --sp=1 --pp=2 --pp_chunks=4 --tp=2", "--dp=1 --sp=1 --pp=2 --tp=2",
                   "--dp=1 --sp=2 --pp=2", "--dp=1 --sp=2 --pp=2 --pp_chunks=2",
                   "--dp=1 --sp=2 --pp=2 --pp_chunks=4", "--dp=1 --sp=2 --tp=2",
                   "--dp=2 --sp=1 --pp=2", "--dp=2 --sp=1 --pp=2 --pp_chunks=2",
                   "--dp=2 --sp=1 --pp=2 --pp_chunks=4", "--dp=2 --sp=1 --tp=2", "--dp=2 --sp=2"}));
  options.train.sp = 3;
  EXPECT_FALSE(MeshesOf(options, 4, 256, true, true).ok()) << "what is given is refused";
}

TEST(GpuModels, AreKnownByName) {
  EXPECT_EQ(FindGpuModel("H200")->name, "H200");
  EXPECT_EQ(FindGpuModelOf("NVIDIA H100 80GB HBM3")->name, "H100");
  const absl::Status unknown = FindGpuModel("V100").status();
  EXPECT_EQ(unknown.message(), "the rates of V100 are not known; known are H200, H100");
}

TEST(PlanOptions, AreRefusedByName) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--gpus=four"}, "--gpus: must be a number and a kind; got four"},
      {{"--gpus=0xH200"}, "--gpus: must be a number and a kind; got 0xH200"},
      {{"--gpus=4xV100"}, "--gpus: the rates of V100 are not known"},
      {{"--gpus=257xH200"}, "--gpus: must be at most 256; got 257"},
      {{"--links=0"}, "--links: must be -1, or above 0 (GB/s); got 0"},
      {{"--memory=-3"}, "--memory: must be -1, or above 0 (GiB); got -3"},
      {{"--host_memory=0"}, "--host_memory: must be -1, or above 0 (GiB); got 0"},
      {{"--gpus_per_node=0"}, "--gpus_per_node: must be at least 1; got 0"},
      {{"--zero=3"}, "--zero: must be 0 on one rank"},
      {{"--offload=activations"}, "give --recompute"},
      {{"--steps=3"}, "steps"},
      {{"--model=/nowhere"}, "--model"},
  };
  for (const auto& [arguments, message] : cases) {
    std::vector<std::string> all = {kSmall};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const absl::Status status = Ask(all).status();
    EXPECT_TRUE(absl::StrContains(status.message(), message)) << arguments[0] << ": " << status;
  }
}

}  // namespace
}  // namespace burst
