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
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/simulated/simulated_communicator.h"
#include "burst/comm/thread/thread_communicator.h"
#include "tests/train/plan_question.h"
#include "train/pipeline/schedule.h"
#include "train/plan/gpu_models.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

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

// Stages compute for the same time: all layers are alike, and the other work of the first and the
// last stage is 1/500. A step of m micro-batches takes m t, the bubble, and an update. One GPU
// gives the update's part of m t, because it has no bubble and p times the layers. Messages cost
// half a hundredth of a pass.
TEST(Plan, ThePipelinesBubbleIsThatOfTheFormula) {
  constexpr int kFew = 4, kMany = 12;
  // Returns the time of a step in addition to m t, divided by m t.
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

// The metrics of a step have the bubble, over links that take only a message's shortest time.
// Without a pipeline there is none. The last stage's work outside its layers is 1/500 of the whole,
// or p/500 of a stage's, and the p - 1 others wait for it. A hundredth is for messages.
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

// With slow links, a pipeline is the fastest mesh for many micro-batches, and each stage holds a
// part of the model.
TEST(Plan, APipelineIsFasterOverSlowLinks) {
  const std::vector<std::string> step = {kWide, "--seqlen=4096", "--batch=1", "--accumulate=16"};
  const auto on = [&](const std::vector<std::string>& mesh) {
    std::vector<std::string> options = {"--gpus=2xH200", "--links=10"};
    options.insert(options.end(), mesh.begin(), mesh.end());
    return PlanFor(step, options);
  };
  const StepPlan stages = on({"--pp=2", "--sp=1"});
  const StepPlan tensor = on({"--tp=2"});
  const StepPlan one = PlanFor(step, {"--gpus=1xH200"});
  EXPECT_LT(stages.step_seconds, 0.8 * tensor.step_seconds);
  EXPECT_LT(stages.step_seconds, 0.9 * one.step_seconds);
  EXPECT_NEAR(static_cast<double>(stages.parameters) / one.parameters, 0.5, 0.02);
}

// An average of the weights takes 4 bytes in addition to the optimizer's 12. Scales of parts and
// layers in bf16 take more memory than fp8.
TEST(Plan, TakesWhatChangesMemory) {
  const auto plan = [](const std::vector<std::string>& more) {
    return PlanFor({kWide, "--seqlen=4096", "--batch=1", "--gpus=1xH200"}, more);
  };
  EXPECT_EQ(plan({"--ema=0.99"}).optimizer * 3, plan({}).optimizer * 4);
  const int64_t fp8 = plan({"--precision=fp8"}).peak_bytes;
  EXPECT_GT(plan({"--precision=fp8", "--fp8_recipe=rowwise"}).peak_bytes, fp8);
  EXPECT_GT(plan({"--precision=fp8", "--bf16_layers=1"}).peak_bytes, fp8);
}

// Ranks without tokens multiply nothing, also where a factor is already in fp8.
TEST(Plan, RanksMayHaveNoTokensInFp8) {
  const char* const gpt2 =
      "--model={\"family\":\"gpt2\",\"layers\":2,\"width\":64,\"heads\":4,\"vocab\":512}";
  for (const char* model : {kSmall, gpt2}) {
    for (const char* more : {"--zero=0", "--zero=3", "--recompute=full", "--tp=2"}) {
      const StepPlan plan =
          PlanFor({model, "--seqlen=1", "--batch=1", "--precision=fp8", "--gpus=4xH200", more});
      EXPECT_GT(plan.step_seconds, 0) << model << more;
    }
  }
}

using Sent = std::vector<std::array<int64_t, kNumChannels>>;  // an entry for each rank

// Makes two steps, and counts what a rank sends in the second one.
absl::Status CountSent(Communicator& comm, const TrainingSetup& setup, Sent* sent) {
  const ScopedThreadPool pool(1);
  BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
  BURST_RETURN_IF_ERROR(trainer->Step(0).status());
  comm.ResetStats();
  BURST_RETURN_IF_ERROR(trainer->Step(1).status());
  (*sent)[comm.rank()] = comm.stats().bytes_sent;
  return absl::OkStatus();
}

absl::Status CountSimulated(const Question& question, const TrainingSetup& setup, Sent* sent) {
  sent->resize(setup.config.ranks);
  return RunSimulatedRanks(
      setup.config.ranks, 0, question.gpu,
      [&](Communicator& comm, SimulatedGpu&) { return CountSent(comm, setup, sent); });
}

// With ZeRO-3 a rank sends its piece of a layer's weights for the forward and for the backward, and
// of the last layer's once. An element takes two bytes in bf16 and one in fp8.
TEST(Plan, WeightsOfFp8TravelInOneByte) {
  double sent[2] = {};
  for (const bool fp8 : {false, true}) {
    const absl::StatusOr<Question> question =
        Ask({kSmall, "--gpus=4xH200", "--dp=4", "--seqlen=64", "--batch=4", "--zero=3",
             fp8 ? "--precision=fp8" : "--precision=bf16"});
    ASSERT_TRUE(question.ok()) << question.status();
    Sent of_ranks;
    ASSERT_EQ(CountSimulated(*question, question->setup, &of_ranks), absl::OkStatus());
    for (const auto& bytes : of_ranks) {
      sent[fp8] += static_cast<double>(bytes[static_cast<int>(Channel::kCollective)]);
    }
  }
  const double layer = 256 * (512 + 256 + 2 * 1024 + 1024), gathers = 2 * 3 + 1;
  EXPECT_NEAR(sent[false] - sent[true], 3 * gathers * layer, 0.01 * gathers * layer);
}

// A run without evaluations and checkpoints has kernels for its steps, and none for a step after
// the last one.
TEST(Plan, NoStepFollowsTheLast) {
  absl::StatusOr<Question> question = Ask({kSmall, "--gpus=1xH200", "--seqlen=64", "--batch=4"});
  ASSERT_TRUE(question.ok()) << question.status();
  question->setup.config.steps = 2;
  question->setup.config.eval_every = 0;
  question->setup.config.checkpoint_files = CheckpointFiles::kNone;
  double seconds[2] = {};
  for (const bool whole_run : {false, true}) {
    const auto train = [&](Communicator& comm, SimulatedGpu& gpu) {
      const ScopedThreadPool pool(1);
      BURST_ASSIGN_OR_RETURN(const auto trainer,
                             Trainer::Create(question->setup, &comm, /*verbose=*/false));
      if (whole_run) BURST_RETURN_IF_ERROR(trainer->Train());
      for (int64_t step = 0; step < (whole_run ? 0 : 2); ++step) {
        BURST_RETURN_IF_ERROR(trainer->Step(step).status());
      }
      for (const auto& [_, own] : gpu.KernelSeconds()) seconds[whole_run] += own;
      return absl::OkStatus();
    };
    ASSERT_EQ(RunSimulatedRanks(1, 0, question->gpu, train), absl::OkStatus());
  }
  EXPECT_GT(seconds[false], 0);
  EXPECT_DOUBLE_EQ(seconds[true], seconds[false]);
}

// The simulated step sends the bytes of the real one on CPUs. Muon exchanges parts of matrices.
TEST(Plan, SendsWhatTheRealStepSends) {
  const std::vector<std::vector<std::string>> cases = {
      {"--strategy=burst"},
      {"--strategy=ring"},
      {"--strategy=burst", "--layout=striped", "--recompute=selective"},
      {"--strategy=burst", "--recompute=full", "--accumulate=2"},
      {"--strategy=burst", "--window=20", "--layout=contiguous"},
      {"--strategy=burst", "--ring_backward=ring", "--zero=1"},
      {"--strategy=burst", "--zero=2"},
  };
  for (const std::vector<std::string>& options : cases) {
    std::vector<std::string> arguments = {kSmall, "--gpus=4xH200", "--seqlen=64", "--batch=4",
                                          "--precision=fp32"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const absl::StatusOr<Question> question = Ask(arguments);
    ASSERT_TRUE(question.ok()) << question.status();
    TrainingSetup setup = question->setup;
    setup.config.optimizer = OptimizerKind::kMuon;
    const int ranks = setup.config.ranks;
    Sent simulated, real(ranks);
    ASSERT_EQ(CountSimulated(*question, setup, &simulated), absl::OkStatus());
    setup.config.device = DeviceType::kCpu;
    ASSERT_EQ(RunRanks(ranks, [&](Communicator& comm) { return CountSent(comm, setup, &real); }),
              absl::OkStatus());
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

  // The matrices of four layers (queries, keys and values, output, gate and up, down) have one
  // moment with Muon.
  const StepPlan muon = PlanFor(small, {"--optimizer=muon"});
  const int64_t of_matrices = 4 * 256 * (512 + 256 + 2048 + 1024);
  EXPECT_EQ(muon.optimizer, 12 * n - 4 * of_matrices);
  EXPECT_EQ(muon.gradients, 4 * n);
  const StepPlan muon3 = PlanFor(small, {"--optimizer=muon", "--zero=3"});
  EXPECT_NEAR(muon3.optimizer, muon.optimizer / 4.0, 0.01 * n);
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
  // Selective recomputation keeps more than full: out in bf16 and lse in fp32 of four layers.
  const double kept = 4 * 32768 * (256 * 2 + 4 * 4);
  EXPECT_NEAR(selective.peak_bytes - full.peak_bytes, kept, 0.3 * kept);
}

// Each layer but the last keeps two bf16 tensors in the host's memory until the backward. With fast
// links, nobody waits for them.
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

// The host's memory that a strategy needs is reserved before the first step. A step that needs more
// would reserve it, and fail this test.
TEST(Plan, OffloadsMemoryIsMadeAtTheStart) {
  constexpr int64_t kTokens = 4096, kLayers = 3, kBytes = 2;  // all layers but the last one, bf16
  const auto host_bytes = [](const std::string& ranks, const std::string& recompute) {
    const std::vector<std::string> step = {
        kSmall, "--gpus=2xH200", "--seqlen=4096", "--batch=1", ranks, "--recompute=" + recompute};
    return static_cast<double>(PlanFor(step, {"--offload=activations"}).host_bytes -
                               PlanFor(step).host_bytes);
  };
  const double half = kLayers * kTokens / 2 * 256 * kBytes;  // width, and channels of all heads
  const std::string ulysses = "--strategy=ulysses", both = "--strategy=burst+ulysses";
  for (const std::string ranks : {"--strategy=burst", "--strategy=ring", "--tp=2"}) {
    EXPECT_NEAR(host_bytes(ranks, "full") / half, 1, 0.01) << ranks;
    // --tp: half of the heads, all tokens.
    EXPECT_NEAR(host_bytes(ranks, "selective") / half, 2, 0.01) << ranks;
  }
  for (const std::string& ranks : {ulysses, both}) {
    EXPECT_NEAR(host_bytes(ranks, "full") / half, 1, 0.01) << ranks;
    EXPECT_NEAR(host_bytes(ranks, "selective") / half, 3, 0.01) << ranks;
  }
}

// Plans of a step with the optimizer's state on the GPU, and in the host's memory.
struct OffloadPlans {
  StepPlan kept, streamed;  // `streamed` over a link of 1 GB/s
  Question away;            // the question of `streamed`
  double link_seconds = 0;  // in which the link moves the state one way
};

OffloadPlans PlanOffload(const std::string& optimizer) {
  const std::vector<std::string> wide = {kWide,      "--gpus=2xH200", "--seqlen=256", "--batch=2",
                                         "--zero=1", "--sp=1",        optimizer};
  const Question here = *Ask(wide);
  OffloadPlans plans = {*PlanStep(here.setup, here.gpu, 0), {}, here};
  plans.away.setup.config.offload = Offload::kOptimizer;
  plans.away.gpu.host_link = 1e9;
  plans.streamed = *PlanStep(plans.away.setup, plans.away.gpu, 0);
  plans.link_seconds = static_cast<double>(plans.kept.optimizer) / 1e9;
  EXPECT_EQ(plans.streamed.optimizer, 0);
  EXPECT_EQ(plans.streamed.host_bytes, plans.kept.optimizer);
  EXPECT_EQ(plans.kept.host_bytes, plans.kept.optimizer);
  return plans;
}

// 12 bytes of a parameter are in the host's memory and are not copied for a save. They use the
// host's link in both directions at once.
TEST(Plan, AnOffloadedOptimizerIsInTheHostsMemory) {
  OffloadPlans plans = PlanOffload("--optimizer=adamw");
  const StepPlan &kept = plans.kept, &streamed = plans.streamed;
  EXPECT_NEAR(kept.optimizer, 12 * kept.gradients / 4 / 2, 1e4);
  EXPECT_LT(streamed.peak_bytes, kept.peak_bytes - kept.optimizer * 9 / 10);
  EXPECT_NEAR((streamed.step_seconds - kept.step_seconds) / plans.link_seconds, 1, 0.05);
  plans.away.gpu.host_link = 1e15;
  // Each piece takes a launch, in place of one for all.
  EXPECT_LE(PlanStep(plans.away.setup, plans.away.gpu, 0)->step_seconds,
            kept.step_seconds + 65 * plans.away.gpu.kernel_seconds);
}

// What stays on the GPU does not move. A GiB holds the whole state.
TEST(Plan, AResidentOptimizerMovesNothing) {
  OffloadPlans plans = PlanOffload("--optimizer=adamw");
  plans.away.setup.config.offload_resident = 1;
  const StepPlan resident = *PlanStep(plans.away.setup, plans.away.gpu, 0);
  EXPECT_EQ(resident.host_bytes, plans.streamed.host_bytes);
  EXPECT_NEAR(resident.optimizer, plans.kept.optimizer, 0.02 * plans.kept.optimizer);
  EXPECT_NEAR(resident.step_seconds, plans.kept.step_seconds, 0.05 * plans.link_seconds);
}

// Muon has whole directions on the GPU, and pieces of its momentum and of its masters.
TEST(Plan, AnOffloadedMuonIsInTheHostsMemory) {
  const OffloadPlans plans = PlanOffload("--optimizer=muon");
  const StepPlan &kept = plans.kept, &streamed = plans.streamed;
  EXPECT_LT(streamed.peak_bytes, kept.peak_bytes - kept.optimizer / 2);
  EXPECT_NEAR((streamed.step_seconds - kept.step_seconds) / plans.link_seconds, 1, 0.05);
}

// If all ranks have the whole state, one of them copies it for a save. The ranks share the host.
TEST(Plan, TheCopyOfASaveCountsOnce) {
  const std::vector<std::string> wide = {kWide, "--seqlen=256", "--batch=4", "--sp=1"};
  const StepPlan one = PlanFor(wide, {"--gpus=1xH200"}), four = PlanFor(wide, {"--gpus=4xH200"});
  EXPECT_EQ(one.host_bytes, one.optimizer);
  EXPECT_EQ(four.optimizer, one.optimizer);
  EXPECT_EQ(four.host_bytes, one.optimizer / 4);
}

// Returns options of Llama 3.1 8B's shape. The window makes a step take minutes, and does not
// change the memory.
std::vector<std::string> LongContext(std::vector<std::string> more) {
  more.insert(
      more.end(),
      {"--model={\"family\":\"llama\",\"layers\":32,\"width\":4096,\"heads\":32,\"kv_heads\":8,"
       "\"ffn\":14336,\"vocab\":128256,\"tied_embeddings\":false,\"rope_theta\":500000}",
       "--batch=1", "--window=8192", "--recompute=full", "--ffn_chunk=16384"});
  return more;
}

// Two runs had 786,432 tokens on an H200 of 139.3 GiB. With 129.4 GiB in use, one found no room for
// 6 GiB, because no gap was as large. The other one, with 12 GiB less, ran.
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

// docs/training/long_sequences.md says this of four GPUs.
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

// The plan makes a double ring if all nodes have the same number of GPUs, as a launcher's job does.
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

// With contiguous parts and a causal mask, the last rank has the most work, and the others wait for
// it.
TEST(Plan, WaitsForTheBusiestRank) {
  const std::vector<std::string> small = {kSmall, "--gpus=4xH200", "--seqlen=65536", "--batch=1"};
  const StepPlan even = PlanFor(small, {"--layout=zigzag"}),
                 uneven = PlanFor(small, {"--layout=contiguous"});
  EXPECT_GT(uneven.step_seconds, 1.3 * even.step_seconds);
}

}  // namespace
}  // namespace burst
