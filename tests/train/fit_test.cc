// Tests what the planner proposes for a run that does not fit, and the questions that it refuses.
#include "train/plan/fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/train/plan_question.h"
#include "train/plan/gpu_models.h"
#include "train/plan/plan_options.h"

namespace burst {
namespace {

TEST(Fit, TakesTheFastestThatFits) {
  const std::vector<std::string> small = {kSmall, "--gpus=2xH200", "--seqlen=131072", "--batch=1"};
  const absl::StatusOr<Question> question = Ask(small);
  ASSERT_TRUE(question.ok()) << question.status();
  GpuModel gpu = question->gpu;
  const StepPlan given = PlanFor(small), full = PlanFor(small, {"--recompute=full", "--zero=3"});
  const MayChoose all = [](absl::string_view) { return true; };
  const auto fit = [&](int64_t memory, const MayChoose& choices) {
    gpu.memory = static_cast<double>(memory + kUnplannedBytes);
    absl::StatusOr<FittedPlan> fitted = FitStep(question->setup, gpu, 0, choices);
    EXPECT_TRUE(fitted.ok()) << fitted.status();
    return *std::move(fitted);
  };
  // With enough memory nothing is recomputed.
  EXPECT_FALSE(absl::StrContains(fit(2 * given.peak_bytes, all).options, "recompute"));
  // More memory never makes the plan slower, and the choice fits.
  double seconds = 0;
  for (double share : {1.2, 0.8, 0.6, 0.4}) {
    const FittedPlan fitted = fit(static_cast<int64_t>(share * given.peak_bytes), all);
    if (!Fits(fitted.plan, gpu)) break;
    EXPECT_GE(fitted.plan.step_seconds, seconds);
    seconds = fitted.plan.step_seconds;
  }
  EXPECT_GT(seconds, 0);
  // The search changes only options that may be chosen.
  const FittedPlan chosen =
      fit(full.peak_bytes, [](absl::string_view option) { return option == "zero"; });
  EXPECT_FALSE(absl::StrContains(chosen.options, "recompute")) << chosen.options;
  EXPECT_FALSE(Fits(chosen.plan, gpu));
}

// Chunks recompute, too, so recomputed layers without chunks may take less time than chunks alone.
TEST(Fit, RecomputesLayersWhereChunksTakeLonger) {
  const std::vector<std::string> arguments = {k8B, "--gpus=4xH100", "--seqlen=131072", "--batch=1"};
  const absl::StatusOr<Question> question = Ask(arguments);
  ASSERT_TRUE(question.ok()) << question.status();
  const auto fitted =
      FitStep(question->setup, question->gpu, 0, [](absl::string_view) { return true; });
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  const StepPlan chunks = PlanFor(arguments, {"--ffn_chunk=16384", "--head_chunk=1", "--zero=3"});
  const StepPlan layers = PlanFor(arguments, {"--recompute=selective", "--zero=3"});
  EXPECT_TRUE(Fits(chunks, question->gpu) && Fits(layers, question->gpu));
  EXPECT_LT(layers.step_seconds, chunks.step_seconds);
  EXPECT_LE(fitted->plan.step_seconds, layers.step_seconds);
}

// The model is much larger than its step. It fits only without the optimizer's state, at a cost. It
// does not fit if the host also lacks memory.
TEST(Fit, OffloadsTheOptimizerWhereNothingElseFits) {
  const absl::StatusOr<Question> question =
      Ask({kWide, "--gpus=1xH200", "--seqlen=128", "--batch=1"});
  ASSERT_TRUE(question.ok()) << question.status();
  const StepPlan given = *PlanStep(question->setup, question->gpu, 0);
  Question offloaded = *question;
  offloaded.setup.config.offload = Offload::kOptimizer;
  const StepPlan smaller = *PlanStep(offloaded.setup, question->gpu, 0);
  ASSERT_LT(smaller.peak_bytes, given.peak_bytes);
  const MayChoose all = [](absl::string_view) { return true; };
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

// The plan of a chosen ZeRO stage is the plan that the stage has as an option. Ranks that divide
// the state each copy a part of it for a save, into the host's memory.
TEST(Fit, AChosenStagePlansAsItsOption) {
  const std::vector<std::string> arguments = {kWide, "--gpus=2xH200", "--seqlen=128", "--batch=1"};
  const absl::StatusOr<Question> question = Ask(arguments);
  ASSERT_TRUE(question.ok()) << question.status();
  GpuModel gpu = question->gpu;
  const MayChoose stage = [](absl::string_view option) { return option == "zero"; };
  const FittedPlan fitted = *FitStep(question->setup, gpu, 8, stage);
  ASSERT_TRUE(absl::StartsWith(fitted.options, "--zero=")) << fitted.options;
  const StepPlan given = PlanFor(arguments, {fitted.options});
  EXPECT_EQ(fitted.plan.host_bytes, given.host_bytes);
  EXPECT_EQ(fitted.plan.peak_bytes, given.peak_bytes);
  EXPECT_EQ(fitted.plan.step_seconds, given.step_seconds);
  EXPECT_GT(given.host_bytes, 0);
  gpu.host_memory = static_cast<double>(given.host_bytes - 1);
  EXPECT_FALSE(Fits(FitStep(question->setup, gpu, 8, stage)->plan, gpu));
}

// What the step leaves of the GPU's memory holds a part of the optimizer's state, in whole GiB.
TEST(Fit, KeepsOfAnOffloadedOptimizerWhatTheGpuHasRoomFor) {
  const std::vector<std::string> arguments = {k8B, "--gpus=1xH200", "--seqlen=8192", "--batch=1"};
  const absl::StatusOr<Question> question = Ask(arguments);
  ASSERT_TRUE(question.ok()) << question.status();
  const auto fit = [&](absl::string_view fixed) {
    return *FitStep(question->setup, question->gpu, 0, [fixed](absl::string_view option) {
      return option == "offload" || (option == "offload_resident" && option != fixed);
    });
  };
  const FittedPlan none = fit("offload_resident"), some = fit("");
  EXPECT_EQ(none.options, "--offload=optimizer");
  EXPECT_TRUE(absl::StartsWith(some.options, "--offload=optimizer --offload_resident="))
      << some.options;
  EXPECT_TRUE(Fits(some.plan, question->gpu));
  StepPlan one_more = some.plan;
  one_more.peak_bytes += int64_t{1} << 30;
  EXPECT_FALSE(Fits(one_more, question->gpu));
  EXPECT_LT(some.plan.step_seconds, 0.8 * none.plan.step_seconds);

  // An error about more says how much there is room for. Two GiB more do not fit.
  const std::string fits = some.options.substr(some.options.rfind(' ') + 1);
  const int64_t most = std::stoll(fits.substr(fits.find('=') + 1));
  Question fuller = *Ask({k8B, "--gpus=1xH200", "--seqlen=8192", "--batch=1", "--offload=optimizer",
                          absl::StrCat("--offload_resident=", most + 2)});
  const absl::Status status =
      CheckFits(fuller.setup, *PlanStep(fuller.setup, fuller.gpu, 0), fuller.gpu, 0);
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("; with ", fits, " it needs ")))
      << status;
}

// If the host has no room for all layers' inputs, several layers keep one input.
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
  const FittedPlan fitted = *FitStep(question->setup, gpu, 0, [](absl::string_view option) {
    return option == "recompute" || option == "recompute_segment";
  });
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
      const auto fitted = FitStep(question->setup, gpu, 8, [](absl::string_view) { return true; });
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

// Two sequences on four GPUs take four GPUs each, or two groups of two. The model has two heads,
// which four ranks cannot divide.
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
  // The micro-batches are enough for three stages, and the layers for two.
  options.train.accumulate = 3;
  options.train.model =
      R"({"family":"llama","layers":2,"width":128,"heads":2,"kv_heads":2,"ffn":128,"vocab":64})";
  EXPECT_EQ(meshes(true, false), (Texts{"", "--dp=1 --sp=1 --pp=2 --tp=2", "--dp=1 --sp=2 --pp=2",
                                        "--dp=1 --sp=2 --tp=2", "--dp=2 --sp=1 --pp=2",
                                        "--dp=2 --sp=1 --tp=2", "--dp=2 --sp=2"}));
  // Chunks have one layer each, for micro-batches in groups of two.
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
  EXPECT_EQ(unknown.message(), "must be a GPU of known rates, H200, H100; got V100");
}

TEST(PlanOptions, AreRefusedByName) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--gpus=four"}, "--gpus: must be a number and a kind; got four"},
      {{"--gpus=0xH200"}, "--gpus: must be a number and a kind; got 0xH200"},
      {{"--gpus=4xV100"}, "--gpus: must be a GPU of known rates, H200, H100; got V100"},
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
