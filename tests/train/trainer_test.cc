// Tests the order in which the trainer gives steps to a device, and the metrics it reports. The
// metrics do not depend on whether the device gets the next step before the host waits for the
// results of this one. The test runs on the CPU and, compiled once more, on a GPU.
#include "train/trainer/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "model/transformer.h"
#include "tests/testing/test_device.h"
#include "tests/train/trainer_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/optimizer/adamw.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

class TrainerTest : public TrainerRunTest {
 protected:
  // The text has some 60 sequences: steps see it more than once.
  TrainerTest() : TrainerRunTest(/*sentences=*/120) {}

  TrainConfig Options(const std::string& out) const {
    return TwelveSteps(folder_, out, kTestDevice);
  }

  // Returns the rows of a trainer that waits for every step, and evaluates where Train does.
  static std::vector<StepMetrics> OneAtATime(const TrainConfig& options) {
    std::vector<StepMetrics> rows;
    EXPECT_EQ(WithTrainer(options,
                          [&](Trainer& trainer) -> absl::Status {
                            for (int64_t step = 0; step < options.steps; ++step) {
                              BURST_ASSIGN_OR_RETURN(StepMetrics row, trainer.Step(step));
                              const int64_t every = options.eval_every, steps = step + 1;
                              if (every > 0 && (steps % every == 0 || steps == options.steps)) {
                                BURST_ASSIGN_OR_RETURN(row.val_loss, trainer.Evaluate());
                              }
                              rows.push_back(row);
                            }
                            return absl::OkStatus();
                          }),
              absl::OkStatus());
    return rows;
  }

  static void ExpectSame(const std::vector<StepMetrics>& rows,
                         const std::vector<StepMetrics>& expected) {
    ASSERT_EQ(rows.size(), expected.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i].step, static_cast<int64_t>(i) + 1);
      EXPECT_EQ(rows[i].tokens, expected[i].tokens) << i;
      EXPECT_EQ(rows[i].loss, expected[i].loss) << i;
      EXPECT_EQ(rows[i].lr, expected[i].lr) << i;
      EXPECT_EQ(rows[i].grad_norm, expected[i].grad_norm) << i;
      EXPECT_EQ(rows[i].val_loss, expected[i].val_loss) << i;
      EXPECT_EQ(rows[i].val_loss_ema, expected[i].val_loss_ema) << i;
      EXPECT_GT(rows[i].step_ms, 0) << i;
    }
  }
};

// Evaluations and checkpoints come between some steps and not between others.
TEST_F(TrainerTest, TrainsAsOneStepAtATime) {
  for (const bool packed : {false, true}) {
    TrainConfig options = Options("train");
    options.packed = packed;
    options.dropout = packed ? 0.2 : 0;
    options.eval_every = 5;
    options.eval_batches = 1;
    options.checkpoint_every = 3;
    fs::remove_all(options.out);
    EXPECT_EQ(WithTrainer(options, [](Trainer& trainer) { return trainer.Train(); }),
              absl::OkStatus());
    const std::vector<StepMetrics> rows = Recorded(options);
    options.out += "_expected";
    ExpectSame(rows, OneAtATime(options));
    EXPECT_LT(rows.back().loss, 0.95 * rows.front().loss) << "it learns";
  }
}

TEST_F(TrainerTest, EnqueuesTheNextStepOrWaits) {
  const TrainConfig options = Options("on");
  std::vector<StepMetrics> rows;
  EXPECT_EQ(WithTrainer(options,
                        [&](Trainer& trainer) -> absl::Status {
                          for (int64_t step = 0; step < options.steps; ++step) {
                            const bool enqueue_next = step % 4 < 2 && step + 1 < options.steps;
                            BURST_ASSIGN_OR_RETURN(rows.emplace_back(),
                                                   trainer.Step(step, enqueue_next));
                          }
                          return absl::OkStatus();
                        }),
            absl::OkStatus());
  ExpectSame(rows, OneAtATime(Options("expected")));
}

// A step's time is measured on the device, from end to end. The times of successive steps add up to
// the loop's time. The last step, which nothing follows, takes as long as the others.
TEST_F(TrainerTest, StepTimesAddUpToTheTimeOfTheLoop) {
  TrainConfig options = Options("times");
  options.seqlen = 64;
  options.steps = 20;
  if (kTestDevice == DeviceType::kCuda) {  // enough work to keep the host far ahead of the device
    options.model = "d12";
    options.seqlen = 512;
    options.batch = 32;
  }
  std::vector<double> step_ms;
  double wall_ms = 0;
  EXPECT_EQ(WithTrainer(options,
                        [&](Trainer& trainer) -> absl::Status {
                          // The warm-up takes new memory and loads kernels.
                          BURST_RETURN_IF_ERROR(trainer.Step(0).status());
                          const auto start = std::chrono::steady_clock::now();
                          for (int64_t step = 1; step < options.steps; ++step) {
                            BURST_ASSIGN_OR_RETURN(const StepMetrics row,
                                                   trainer.Step(step, step + 1 < options.steps));
                            step_ms.push_back(row.step_ms);
                          }
                          wall_ms = std::chrono::duration<double, std::milli>(
                                        std::chrono::steady_clock::now() - start)
                                        .count();
                          return absl::OkStatus();
                        }),
            absl::OkStatus());
  double sum = 0;
  for (const double ms : step_ms) sum += ms;
  EXPECT_LE(sum,
            kTestDevice == DeviceType::kCuda ? 1.01 * wall_ms : wall_ms);  // two clocks, or one
  EXPECT_GE(sum, 0.9 * wall_ms);
  if (kTestDevice == DeviceType::kCpu) return;  // on the CPU, other work makes steps differ
  const double last = step_ms.back();
  std::nth_element(step_ms.begin(), step_ms.begin() + step_ms.size() / 2, step_ms.end());
  const double median = step_ms[step_ms.size() / 2];
  EXPECT_NEAR(last, median, 0.1 * median);
}

// A rank whose step begins late exposes that time on the other rank. The figure is the mean of both
// ranks' waits, and none waits longer than its step takes.
TEST_F(TrainerTest, ExposedTimeHasTheLatenessOfARank) {
  constexpr double kLateMs = 400;
  constexpr int64_t kLateStep = 4;
  struct Ranks {
    int64_t dp, sp, tp;
  };
  for (const Ranks& ranks : {Ranks{2, 1, 1}, {1, 2, 1}, {1, 1, 2}}) {
    if (kTestDevice == DeviceType::kCuda && CudaDeviceCount() < 2) GTEST_SKIP() << "two GPUs";
    SCOPED_TRACE(absl::StrCat("dp ", ranks.dp, ", sp ", ranks.sp, ", tp ", ranks.tp));
    TrainConfig options = Options(absl::StrCat("late", ranks.dp, ranks.sp));
    options.ranks = 2;
    options.dp = ranks.dp;
    options.sp = ranks.sp;
    options.tp = ranks.tp;
    std::array<std::vector<StepMetrics>, 2> rows;
    const auto body = [&](Trainer& trainer, int rank) -> absl::Status {
      for (int64_t step = 0; step < 8; ++step) {
        if (rank == 1 && step == kLateStep) {
          std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(kLateMs));
        }
        BURST_ASSIGN_OR_RETURN(rows[rank].emplace_back(), trainer.Step(step));
      }
      return absl::OkStatus();
    };
    ASSERT_EQ(WithTrainers(options, body), absl::OkStatus());
    for (int64_t step = 1; step < 8; ++step) {
      const StepMetrics &one = rows[0][step], &other = rows[1][step];
      ASSERT_TRUE(one.exposed_ms.has_value());
      EXPECT_EQ(one.exposed_ms, other.exposed_ms);
      EXPECT_LE(*one.exposed_ms, (one.step_ms + other.step_ms) / 2);
      EXPECT_GE(*one.exposed_ms, step == kLateStep ? 0.9 * kLateMs / 2 : 0);
    }
  }
}

// A run in two parts sees the batches and takes the steps of an uninterrupted run.
TEST_F(TrainerTest, ResumesWhereItStopped) {
  for (const char* kind : {"plain", "changed_scores", "muon"}) {
    const bool muon = std::string(kind) == "muon";
    TrainConfig options = Options(absl::StrCat("parts_", kind));
    options.schedule = LrShape::kConstant;
    options.steps = 7;
    if (muon) options.optimizer = OptimizerKind::kMuon;
    if (std::string(kind) == "changed_scores") {
      options.attention_dropout = 0.2;
      options.attention_softcap = 2;
      options.attention_sinks = true;
    }
    const TrainConfig first = options;
    const auto train = [](Trainer& trainer) { return trainer.Train(); };
    EXPECT_EQ(WithTrainer(options, train), absl::OkStatus());
    options.steps = 12;
    options.resume = true;
    options.recompute = Recompute::kSelective;  // changes only time and memory
    EXPECT_EQ(WithTrainer(options, train), absl::OkStatus());
    TrainConfig whole = first;
    whole.out = Options(absl::StrCat("whole_", kind)).out;
    whole.steps = 12;
    ExpectSame(Recorded(options), OneAtATime(whole));
  }
}

// Ranks that have parts of a matrix update all of it. Five steps of Newton and Schulz amplify
// roundings of gradients up to 485 times, and more so from step to step.
TEST_F(TrainerTest, MuonOverRanksTakesTheStepsOfOne) {
  if (kTestDevice == DeviceType::kCuda) GTEST_SKIP() << "zero_test has the GPUs' part";
  struct Ranks {
    int64_t dp = 1, sp = 1, pp = 1, tp = 1, zero = 0;
  };
  const auto losses = [&](const Ranks& ranks) {
    TrainConfig options = Options(absl::StrCat("muon", ranks.dp, ranks.sp, ranks.pp, ranks.tp));
    options.optimizer = OptimizerKind::kMuon;
    options.ranks = -1;
    options.dp = ranks.dp;
    options.sp = ranks.sp;
    options.pp = ranks.pp;
    options.tp = ranks.tp;
    options.zero = ranks.zero;
    options.steps = 6;
    EXPECT_EQ(WithTrainer(options, [](Trainer& trainer) { return trainer.Train(); }),
              absl::OkStatus());
    std::vector<double> values;
    for (const auto& row : Recorded(options)) values.push_back(row.loss);
    return values;
  };
  const std::vector<double> one = losses({});
  EXPECT_LT(one.back(), one.front());
  for (const Ranks& ranks :
       {Ranks{2}, {1, 2}, {1, 1, 2}, {1, 1, 1, 2}, {2, 1, 1, 2, 2}, {2, 1, 2, 1, 1}}) {
    const std::vector<double> several = losses(ranks);
    ASSERT_EQ(several.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(several[i], one[i], 1e-3 * one[i]) << i;
  }
}

// Changed data is refused: one changed digit in a text of 200,000 characters. The original text is
// accepted again.
TEST_F(TrainerTest, ChangedDataIsNotTheRuns) {
  std::string text;
  while (text.size() < 200'000) text += "line " + std::to_string(text.size()) + " of a text\n";
  const auto write = [&] { std::ofstream(folder_ + "/text.txt", std::ios::binary) << text; };
  write();
  TrainConfig options = SmallTraining(folder_, "digits", kTestDevice);
  options.steps = options.checkpoint_every = 1;
  options.seqlen = 32;
  const auto train = [](Trainer& trainer) { return trainer.Train(); };
  ASSERT_EQ(WithTrainer(options, train), absl::OkStatus());
  options.resume = true;
  options.steps = 2;
  char& digit = text[text.find("of a text", 54'321) - 2];
  ASSERT_TRUE('0' <= digit && digit <= '9');
  const char before = digit;
  digit = before == '5' ? '6' : '5';
  write();
  const absl::Status changed = WithTrainer(options, train);
  EXPECT_EQ(changed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(changed.message(), "; got others from ")) << changed;
  digit = before;
  write();
  EXPECT_EQ(WithTrainer(options, train), absl::OkStatus());

  // Earlier checkpoints hold a number that follows from samples of the data. This is the number for
  // this text.
  const std::string path = CheckpointPath(options.out);
  CheckpointInfo info = *ReadCheckpointInfo(path);
  const auto model = *Transformer::Create(info.model, DType::kFloat32, /*seed=*/1);
  const AdamW optimizer({}, model->parameters().numel(), DType::kFloat32, {});
  options.steps = 3;
  for (const char* fingerprint : {"2714d71290a5a3ee", "2714d71290a5a3ef"}) {
    info.data_fingerprint = fingerprint;
    ASSERT_EQ(SaveCheckpoint(path, info, model->parameters(), optimizer), absl::OkStatus());
    const absl::Status status = WithTrainer(options, [](Trainer&) { return absl::OkStatus(); });
    EXPECT_EQ(status.ok(), info.data_fingerprint.back() == 'e') << status;
  }
}

// An evaluation reads as many sequences as its batches have, also where a part of a batch is left
// of the validation data.
TEST_F(TrainerTest, AnEvaluationHasItsNumberOfBatches) {
  int runs = 0;
  const auto loss = [&](int64_t batch, int64_t eval_batches) {
    TrainConfig options = Options(absl::StrCat("batches", ++runs));
    options.batch = batch;
    options.eval_every = 1;
    options.eval_batches = eval_batches;
    double result = 0;
    EXPECT_EQ(WithTrainer(options,
                          [&](Trainer& trainer) -> absl::Status {
                            BURST_ASSIGN_OR_RETURN(const auto validation, trainer.Evaluate());
                            result = validation.value();
                            return absl::OkStatus();
                          }),
              absl::OkStatus());
    return result;
  };
  const double all = loss(4, 0), four = loss(1, 4);
  EXPECT_GT(std::abs(four - all), 1e-4);
  EXPECT_NEAR(loss(4, 1), four, 1e-6 * four);
  EXPECT_EQ(loss(4, 2), all);
}

// Training drops attention's weights and evaluation does not; a softcap changes both. A rate of 0
// drops nothing.
TEST_F(TrainerTest, ChangedScoresInTrainingAndEvaluation) {
  int runs = 0;
  // The validation loss of the initial weights, then the loss of the first step.
  const auto losses = [&](double dropout, double softcap) {
    TrainConfig options = Options(absl::StrCat("changed", ++runs));
    options.eval_every = 1;
    options.eval_batches = 2;
    options.attention_dropout = dropout;
    options.attention_softcap = softcap;
    std::pair<double, double> result;
    EXPECT_EQ(WithTrainer(options,
                          [&](Trainer& trainer) -> absl::Status {
                            BURST_ASSIGN_OR_RETURN(const auto validation, trainer.Evaluate());
                            BURST_ASSIGN_OR_RETURN(const StepMetrics row, trainer.Step(0));
                            result = {validation.value(), row.loss};
                            return absl::OkStatus();
                          }),
              absl::OkStatus());
    return result;
  };
  const auto plain = losses(-1, -1), dropped = losses(0.5, -1), capped = losses(-1, 0.01);
  EXPECT_EQ(losses(0, 0), plain);
  EXPECT_EQ(dropped.first, plain.first);
  EXPECT_NE(dropped.second, plain.second);
  EXPECT_NE(capped.first, plain.first);
  EXPECT_NE(capped.second, plain.second);
}

// The squared logsumexp is a term of training alone. A model begins with logits near 0, so with V
// tokens the logsumexp is near log V.
TEST_F(TrainerTest, ZLossIsATermOfTraining) {
  if (kTestDevice == DeviceType::kCuda) GTEST_SKIP() << "the CPU's";
  const auto losses = [&](double z) {
    TrainConfig options = Options(absl::StrCat("z", z));
    options.z_loss = z;
    options.eval_every = 1;
    options.eval_batches = 2;
    std::array<double, 3> result;  // validation, the first step, and what it should be above z = 0
    EXPECT_EQ(
        WithTrainer(options,
                    [&](Trainer& trainer) -> absl::Status {
                      BURST_ASSIGN_OR_RETURN(const auto validation, trainer.Evaluate());
                      BURST_ASSIGN_OR_RETURN(const StepMetrics row, trainer.Step(0));
                      const auto vocab = static_cast<double>(trainer.model().config().vocab);
                      result = {validation.value(), row.loss, z * std::pow(std::log(vocab), 2)};
                      return absl::OkStatus();
                    }),
        absl::OkStatus());
    return result;
  };
  const auto plain = losses(0), with = losses(0.1);
  EXPECT_EQ(with[0], plain[0]);
  EXPECT_NEAR(with[1] - plain[1], with[2], 0.1 * with[2]);
}

// Three steps have two micro-batches each. The test compares every rank's losses, reduced gradients
// and parameters.
TEST_F(TrainerTest, RecomputationTakesTheSameSteps) {
  const char* const models[] = {
      R"({"family":"llama","layers":2,"width":64,"heads":4,"kv_heads":2,"ffn":128,"dropout":0.2})",
      R"({"family":"gpt2","layers":2,"width":64,"heads":4,"ffn":128,"dropout":0.2})",
      R"({"family":"llama","layers":2,"width":64,"heads":4,"kv_heads":2,"ffn":128,)"
      R"("attention_dropout":0.2,"attention_softcap":2})",
      R"({"family":"llama","layers":2,"width":64,"heads":4,"kv_heads":2,"ffn":128,)"
      R"("attention_sinks":true})"};
  const struct {
    Strategy strategy;
    int dp, sp, tp = 1;
  } cases[] = {{Strategy::kSingle, 1, 1},
               {Strategy::kBurst, 1, 2},
               {Strategy::kRing, 2, 2},
               {Strategy::kSingle, 1, 1, 2},
               {Strategy::kBurst, 2, 1}};
  int compared = 0;
  for (const auto& c : cases) {
    if (kTestDevice == DeviceType::kCuda && c.dp * c.sp * c.tp > CudaDeviceCount()) continue;
    for (const std::string model : models) {
      TrainConfig options = Options("recompute");
      options.model = model;
      options.packed = true;
      options.steps = 3;
      options.strategy = c.strategy;
      options.ranks = c.dp * c.sp * c.tp;
      options.dp = c.dp;
      options.tp = c.tp;
      options.threads = 1;
      using Values = std::vector<double>;
      const auto run = [&](Recompute recompute) {
        options.recompute = recompute;
        fs::remove_all(options.out);
        std::vector<std::vector<Values>> ranks(options.ranks);
        EXPECT_EQ(WithTrainers(options,
                               [&](Trainer& trainer, int rank) -> absl::Status {
                                 const ParameterList& parameters = trainer.model().parameters();
                                 for (int64_t step = 0; step < options.steps; ++step) {
                                   BURST_ASSIGN_OR_RETURN(const auto row, trainer.Step(step));
                                   ranks[rank].push_back({row.loss, row.grad_norm});
                                   ranks[rank].push_back(
                                       parameters.grads().To(DType::kFloat64).ToVector<double>());
                                 }
                                 ranks[rank].push_back(
                                     parameters.masters().To(DType::kFloat64).ToVector<double>());
                                 return absl::OkStatus();
                               }),
                  absl::OkStatus());
        return ranks;
      };
      const auto stored = run(Recompute::kNone);
      EXPECT_GT(stored[0][0][1], 0) << "the norm of the first gradient";
      for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
        EXPECT_TRUE(run(recompute) == stored)
            << Name(recompute) << ", " << Name(c.strategy) << ", dp " << c.dp << ", sp " << c.sp
            << ", " << model;
        ++compared;
        if (kTestDevice == DeviceType::kCpu) continue;
        options.offload = Offload::kActivations;
        EXPECT_TRUE(run(recompute) == stored) << Name(recompute) << ", offloaded, " << model;
        options.offload = Offload::kNone;
      }
    }
  }
  EXPECT_GE(compared, 4);
}

// Five steps without an update end the run, without a row of the next step.
TEST_F(TrainerTest, EndsAfterStepsThatAreNotFinite) {
  TrainConfig options = Options("diverging");
  options.lr = 1e30;
  options.schedule = LrShape::kConstant;
  options.warmup = 0;
  const absl::Status status =
      WithTrainer(options, [](Trainer& trainer) { return trainer.Train(); });
  const std::vector<StepMetrics> rows = Recorded(options);
  ASSERT_GE(rows.size(), 6u);
  ASSERT_LT(rows.size(), 12u);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("to step ", rows.size(), ";")))
      << status;
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].skipped, i + 5 >= rows.size()) << i;
  }
}

}  // namespace
}  // namespace burst
