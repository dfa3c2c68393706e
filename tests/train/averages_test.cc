// Tests the average of a run's weights: in checkpoints, over a resume, and in a validation. The
// test runs on the CPU and, compiled once more, on a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "model/transformer.h"
#include "tests/testing/test_device.h"
#include "tests/train/trainer_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/checkpoint_set.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/huggingface/export.h"
#include "train/huggingface/pretrained.h"
#include "train/optimizer/adamw.h"

namespace burst {
namespace {

absl::Status Train(Trainer& trainer) { return trainer.Train(); }

// Reads one matrix of a checkpoint, whose name has a prefix there.
std::vector<double> ReadDown(const std::string& path, const std::string& prefix) {
  const auto info = ReadCheckpointInfo(path);
  const auto file = CheckpointReader::Open(path);
  EXPECT_EQ(info.status(), absl::OkStatus());
  EXPECT_EQ(file.status(), absl::OkStatus());
  const auto parameters = Transformer::ParametersOf(info->model.WithDefaults());
  EXPECT_EQ(parameters.status(), absl::OkStatus());
  for (const Parameter& parameter : *parameters) {
    if (parameter.name != "layers.0.ffn.down.weight") continue;
    const Tensor whole = Tensor::Empty(parameter.full_shape, DType::kFloat32);
    const CheckpointReader::Wanted wanted = {prefix + parameter.name, whole,
                                             PartOfParameter(parameter, 0, whole.numel())};
    EXPECT_EQ(file->Read({&wanted, 1}), absl::OkStatus());
    return whole.ToVector<double>();
  }
  ADD_FAILURE() << "no such matrix";
  return {};
}

class AveragesTest : public TrainerRunTest {
 protected:
  AveragesTest() : TrainerRunTest(/*sentences=*/120) {}

  TrainConfig Options(const std::string& out) const {
    return TwelveSteps(folder_, out, kTestDevice);
  }
};

// The average of a checkpoint follows from the weights of every step's checkpoint.
TEST_F(AveragesTest, AveragesTheWeights) {
  for (const int64_t zero : {0, 1}) {
    if (zero > 0 && kTestDevice == DeviceType::kCuda && CudaDeviceCount() < 2) continue;
    TrainConfig options = Options(absl::StrCat("ema", zero));
    options.ema = 0.75;
    options.schedule = LrShape::kConstant;
    options.steps = 4;
    options.checkpoint_every = 1;
    options.keep = 4;
    options.zero = zero;
    options.ranks = zero > 0 ? 2 : 1;
    options.dp = options.ranks;
    EXPECT_EQ(WithTrainer(options, Train), absl::OkStatus());
    std::vector<double> expected, largest;
    for (int step = 1; step <= 4; ++step) {
      const std::string path =
          step == 4 ? CheckpointPath(options.out)
                    : absl::StrCat(options.out, "/checkpoint-", step, ".safetensors");
      const std::vector<double> weights = ReadDown(path, "");
      if (step == 1) {
        expected = weights;
        largest.resize(weights.size());
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        expected[i] = 0.75 * expected[i] + 0.25 * weights[i];
        largest[i] = std::max(largest[i], std::abs(weights[i]));
      }
    }
    const std::vector<double> average = ReadDown(CheckpointPath(options.out), kAveragePrefix);
    ASSERT_EQ(average.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(average[i], expected[i], 8 * 0x1p-24 * largest[i]) << i;  // two roundings a step
    }
    const std::string exported = options.out + "_exported", again = options.out + "_again";
    ExportOptions how;
    how.average = true;
    EXPECT_EQ(ExportHuggingFace(CheckpointPath(options.out), exported, how), absl::OkStatus());
    EXPECT_EQ(ImportHuggingFace(exported, again), absl::OkStatus());
    EXPECT_EQ(ReadDown(CheckpointPath(again), ""), average);
    EXPECT_EQ(ExportHuggingFace(CheckpointPath(again), exported + "_2", how).code(),
              absl::StatusCode::kInvalidArgument);
  }
}

// A run in two parts ends with the average of an uninterrupted run.
TEST_F(AveragesTest, ContinuesWhereTheRunStopped) {
  for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kMuon}) {
    const bool muon = kind == OptimizerKind::kMuon;
    TrainConfig options = Options(absl::StrCat("parts", muon));
    options.schedule = LrShape::kConstant;
    options.optimizer = kind;
    options.ema = 0.9;
    TrainConfig whole = options;
    whole.out += "_whole";
    options.steps = 7;
    EXPECT_EQ(WithTrainer(options, Train), absl::OkStatus());
    options.steps = 12;
    options.resume = true;
    EXPECT_EQ(WithTrainer(options, Train), absl::OkStatus());
    EXPECT_EQ(WithTrainer(whole, Train), absl::OkStatus());
    EXPECT_EQ(ReadDown(CheckpointPath(options.out), kAveragePrefix),
              ReadDown(CheckpointPath(whole.out), kAveragePrefix));
  }
}

// A validation of the average leaves the bits of a training as they are, whoever has the weights.
// Its loss is the loss of a model whose weights are the average.
TEST_F(AveragesTest, ValidatesTheAverage) {
  struct Ranks {
    int64_t dp = 1, pp = 1, zero = 0;
  };
  for (const Ranks& ranks : {Ranks{}, {2, 1, 1}, {2, 1, 2}, {2, 1, 3}, {2, 2, 1}}) {
    if (kTestDevice == DeviceType::kCuda && ranks.dp * ranks.pp > CudaDeviceCount()) continue;
    SCOPED_TRACE(absl::StrCat("dp ", ranks.dp, ", pp ", ranks.pp, ", stage ", ranks.zero));
    TrainConfig options = Options("validated");
    std::filesystem::remove_all(folder_ + "/validated");
    options.ema = 0.75;
    options.steps = 4;
    options.ranks = -1;
    options.sp = 1;
    options.dp = ranks.dp;
    options.pp = ranks.pp;
    options.zero = ranks.zero;
    TrainConfig plain = options;
    plain.out += absl::StrCat("_not", ranks.dp, ranks.pp, ranks.zero);
    options.eval_every = 2;
    EXPECT_EQ(WithTrainer(options, Train), absl::OkStatus());
    EXPECT_EQ(WithTrainer(plain, Train), absl::OkStatus());
    const std::vector<StepMetrics> rows = Recorded(options), expected = Recorded(plain);
    ASSERT_EQ(rows.size(), expected.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i].loss, expected[i].loss) << i;
      EXPECT_EQ(rows[i].grad_norm, expected[i].grad_norm) << i;
      EXPECT_EQ(rows[i].val_loss_ema.has_value(), i % 2 == 1) << i;
    }
    for (const char* prefix : {"", kAveragePrefix}) {
      EXPECT_EQ(ReadDown(CheckpointPath(options.out), prefix),
                ReadDown(CheckpointPath(plain.out), prefix));
    }
    const std::string exported = plain.out + "_exported";
    ExportOptions how;
    how.average = true;
    ASSERT_EQ(ExportHuggingFace(CheckpointPath(options.out), exported, how), absl::OkStatus());
    TrainConfig average = Options("average");
    std::filesystem::remove_all(folder_ + "/average");
    average.model = exported;
    average.tokenizer = "char";
    average.dropout = 0;
    average.eval_every = 2;
    const auto evaluate = [&](Trainer& trainer) -> absl::Status {
      BURST_ASSIGN_OR_RETURN(const std::optional<double> loss, trainer.Evaluate());
      // Ranks add up the losses of their sequences in another order.
      EXPECT_NEAR(*rows.back().val_loss_ema, loss.value_or(0), 1e-5);
      EXPECT_GT(std::abs(*rows.back().val_loss - loss.value_or(0)), 1e-4);
      return absl::OkStatus();
    };
    EXPECT_EQ(WithTrainer(average, evaluate), absl::OkStatus());
  }
}

}  // namespace
}  // namespace burst
