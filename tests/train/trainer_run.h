// Runs trainers in a test's own process. Each rank owns one.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/device/device.h"
#include "tests/testing/subprocess.h"
#include "train/config/config.h"
#include "train/report/metrics.h"
#include "train/run/launch.h"
#include "train/run/setup.h"
#include "train/trainer/trainer.h"

namespace burst {

// A fixture whose tests have a folder with text.txt.
class TrainerRunTest : public testing::Test {
 protected:
  explicit TrainerRunTest(int sentences) : sentences_(sentences) {}
  void SetUp() override {
    folder_ = FreshTestFolder();
    std::ofstream text(folder_ + "/text.txt");
    for (int i = 0; i < sentences_; ++i) {
      text << "sentence " << i * 7919 % 1000 << " of many\n" << (i % 4 == 3 ? "\n" : "");
    }
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string folder_;

 private:
  const int sentences_;
};

// Returns the options of one rank and a small model on FOLDER/text.txt. The run takes only steps,
// and writes to FOLDER/OUT.
inline TrainConfig SmallTraining(const std::string& folder, const std::string& out,
                                 DeviceType device) {
  TrainConfig options;
  options.data = folder + "/text.txt";
  options.out = absl::StrCat(folder, "/", out);
  options.model = "nanogpt_cpu";
  options.lr = 1e-3;
  options.ranks = 1;
  options.device = device == DeviceType::kCuda ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  options.eval_every = 0;
  options.checkpoint_every = 0;
  options.sample = 0;
  return options;
}

// Returns SmallTraining with twelve steps of two micro-batches, which see a text of 120 sentences
// more than once.
inline TrainConfig TwelveSteps(const std::string& folder, const std::string& out,
                               DeviceType device) {
  TrainConfig options = SmallTraining(folder, out, device);
  options.seqlen = 32;
  options.batch = 4;
  options.accumulate = 2;
  options.steps = 12;
  options.warmup = 2;
  return options;
}

// Returns the rows that a run wrote.
inline std::vector<StepMetrics> Recorded(const TrainConfig& options) {
  const auto log = MetricsLog::Open(options.out + "/metrics.jsonl", options.steps);
  EXPECT_EQ(log.status(), absl::OkStatus());
  return log->rows();
}

// Runs body(trainer, rank) on every rank, and returns the first error. `change` may change the
// resolved options to values that are refused on a CPU.
inline absl::Status WithTrainers(const TrainConfig& options,
                                 const std::function<absl::Status(Trainer&, int rank)>& body,
                                 const std::function<void(ResolvedConfig*)>& change = nullptr) {
  Launch launch;
  launch.cores = NumCores();
  launch.gpus = CudaDeviceCount();
  BURST_ASSIGN_OR_RETURN(ResolvedConfig config, ResolveConfig(options, launch));
  if (change != nullptr) change(&config);
  BURST_ASSIGN_OR_RETURN(TrainingSetup setup, PrepareTraining(config));
  BURST_RETURN_IF_ERROR(FindResumed(&setup));
  return RunRanksInProcess(config, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
    return body(*trainer, comm.rank());
  });
}

// Runs the trainer of a single rank.
inline absl::Status WithTrainer(const TrainConfig& options,
                                const std::function<absl::Status(Trainer&)>& body) {
  return WithTrainers(options, [&](Trainer& trainer, int) { return body(trainer); });
}

}  // namespace burst
