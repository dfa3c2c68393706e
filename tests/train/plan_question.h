// Asks the planner, for its tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/base/status.h"
#include "train/plan/gpu_models.h"
#include "train/plan/plan.h"
#include "train/plan/plan_options.h"

namespace burst {

inline constexpr double kGiB = double{1 << 30};
// A small Llama, whose text does not matter.
inline constexpr char kSmall[] =
    "--model={\"family\":\"llama\",\"layers\":4,\"width\":256,\"heads\":4,\"kv_heads\":2,"
    "\"ffn\":1024,\"vocab\":512,\"dropout\":0}";

// Llama 3.1 8B.
inline constexpr char k8B[] =
    "--model={\"family\":\"llama\",\"layers\":32,\"width\":4096,\"heads\":32,\"kv_heads\":8,"
    "\"ffn\":14336,\"vocab\":128256}";
// A model whose state is large compared with the activations of a step on few tokens.
inline constexpr char kWide[] =
    "--model={\"family\":\"llama\",\"layers\":4,\"width\":1024,\"heads\":8,\"kv_heads\":2,"
    "\"ffn\":4096,\"vocab\":512,\"dropout\":0}";

struct Question {
  TrainingSetup setup;
  GpuModel gpu;
};

// Returns the question that options of //train:plan ask.
inline absl::StatusOr<Question> Ask(const std::vector<std::string>& arguments) {
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

// Returns the plan of one step, for GPUs in nodes of eight.
inline StepPlan PlanFor(const std::vector<std::string>& arguments) {
  const absl::StatusOr<Question> question = Ask(arguments);
  EXPECT_TRUE(question.ok()) << question.status();
  absl::StatusOr<StepPlan> plan = PlanStep(question->setup, question->gpu, /*gpus_per_node=*/8);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

inline StepPlan PlanFor(std::vector<std::string> arguments, const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return PlanFor(arguments);
}

}  // namespace burst
