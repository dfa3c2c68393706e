// Tests training on tokens of which only some count in the loss, against transformers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"
#include "tests/train/huggingface_fixture.h"
#include "tests/train/trainer_run.h"
#include "train/data/batch.h"
#include "train/data/shard_writer.h"

namespace burst {
namespace {

nlohmann::json Fixture(const std::string& name) {
  return nlohmann::json::parse(Content("tests/train/testdata/" + name));
}

class MasksTest : public TrainerRunTest {
 protected:
  MasksTest() : TrainerRunTest(/*sentences=*/0) {}

  void SetUp() override {
    TrainerRunTest::SetUp();
    const FakeDirectory model(Fixture("huggingface.json")["models"]["llama"]);
    model.WriteConfig(folder_ + "/model");
    FakeDirectory::WriteTensors(folder_ + "/model/model.safetensors", model.tensors);
    const std::vector<int32_t> tokens = fixture_["tokens"];
    std::vector<uint8_t> marks = fixture_["counts"];
    for (const int64_t begin : fixture_["begins"]) marks[begin] |= kBegins;
    // Three shards, the middle one with an odd number of tokens.
    ShardWriter writer(folder_ + "/train", ShardHeader::For(11, -1), /*shard_tokens=*/61);
    ASSERT_EQ(writer.Append(tokens, marks, /*masked=*/true), absl::OkStatus());
    ASSERT_EQ(writer.Finish(), absl::OkStatus());
  }

  TrainConfig Options(bool packed) const {
    TrainConfig options = SmallTraining(folder_, "out", DeviceType::kCpu);
    options.data = options.val_data = folder_ + "/train_*.bin";
    options.model = folder_ + "/model";
    options.packed = packed;
    options.seqlen = fixture_["seqlen"];
    options.batch = fixture_["batch"];
    options.accumulate = fixture_["accumulate"];
    options.steps = 4;
    options.lr = fixture_["lr"];
    options.schedule = LrShape::kConstant;
    options.warmup = 0;
    options.weight_decay = 0;
    options.clip = 0;
    return options;
  }

  // A loss of about 3 in float32 has a rounding of 2e-7, and the sums of a step some tens of it. A
  // token that should not count changes a loss by more than 0.001.
  void ExpectLosses(const TrainConfig& options, const std::vector<double>& expected) const {
    std::vector<double> losses;
    EXPECT_EQ(WithTrainers(options,
                           [&](Trainer& trainer, int rank) -> absl::Status {
                             for (int64_t step = 0; step < options.steps; ++step) {
                               BURST_ASSIGN_OR_RETURN(const StepMetrics row, trainer.Step(step));
                               if (rank == 0) losses.push_back(row.loss);
                             }
                             return absl::OkStatus();
                           }),
              absl::OkStatus());
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5) << i;
  }

  const nlohmann::json fixture_ = Fixture("masks.json");
};

// The fixture's sequences are the trainer's.
TEST_F(MasksTest, TheFixtureHasTheSequencesOfTheRun) {
  const auto data = LoadTrainingData(folder_ + "/train_*.bin", folder_ + "/train_*.bin",
                                     std::nullopt, folder_ + "/cache");
  ASSERT_TRUE(data.ok()) << data.status();
  const auto sampler = SequenceSampler::Create(data->train, {fixture_["seqlen"], 1, false});
  ASSERT_TRUE(sampler.ok()) << sampler.status();
  const std::vector<int64_t> expected = fixture_["starts"];
  std::vector<int64_t> starts;
  for (size_t i = 0; i < expected.size(); ++i) starts.push_back(sampler->TrainingStart(i));
  EXPECT_EQ(starts, expected);
}

// Every way to divide a step has transformers' mean over all tokens that count.
TEST_F(MasksTest, LossesEqualTransformers) {
  for (const bool packed : {true, false}) {
    const std::vector<double> expected = fixture_["losses"][packed ? "packed" : "whole"];
    const TrainConfig one = Options(packed);
    ExpectLosses(one, expected);
    TrainConfig at_once = one;
    at_once.batch = one.batch * one.accumulate;
    at_once.accumulate = 1;
    ExpectLosses(at_once, expected);
    for (const auto& mesh : {std::pair(2, 1), std::pair(1, 2), std::pair(2, 2)}) {
      SCOPED_TRACE(absl::StrCat("dp ", mesh.first, " sp ", mesh.second));
      TrainConfig ranks = one;
      ranks.dp = mesh.first, ranks.sp = mesh.second;
      ranks.ranks = mesh.first * mesh.second;
      ExpectLosses(ranks, expected);
    }
  }
}

// A step in which no token counts has no loss. It takes a gradient of zero.
TEST_F(MasksTest, AStepWithoutACountedToken) {
  const std::vector<int32_t> tokens = fixture_["tokens"];
  ShardWriter writer(folder_ + "/train", ShardHeader::For(11, -1), /*shard_tokens=*/61);
  std::vector<uint8_t> marks(tokens.size());
  std::fill(marks.begin(), marks.begin() + static_cast<int64_t>(marks.size()) / 2, kCounts);
  ASSERT_EQ(writer.Append(tokens, marks, /*masked=*/true), absl::OkStatus());
  ASSERT_EQ(writer.Finish(), absl::OkStatus());
  TrainConfig options = Options(/*packed=*/false);
  options.batch = options.accumulate = 1;
  options.steps = 8;
  const auto data = LoadTrainingData(options.data, options.data, std::nullopt, folder_ + "/cache");
  ASSERT_TRUE(data.ok()) << data.status();
  const auto sampler = SequenceSampler::Create(
      data->train, {options.seqlen, static_cast<uint64_t>(options.seed), /*packed=*/false});
  ASSERT_TRUE(sampler.ok()) << sampler.status();
  int without = 0;
  EXPECT_EQ(WithTrainer(options,
                        [&](Trainer& trainer) -> absl::Status {
                          for (int64_t step = 0; step < options.steps; ++step) {
                            BURST_ASSIGN_OR_RETURN(const StepMetrics row, trainer.Step(step));
                            const bool counts = *sampler->TrainingTargets(step, 1) > 0;
                            EXPECT_EQ(std::isnan(row.loss), !counts) << step;
                            EXPECT_EQ(row.grad_norm > 0, counts) << step;
                            EXPECT_FALSE(row.skipped) << step;
                            without += counts ? 0 : 1;
                          }
                          return absl::OkStatus();
                        }),
            absl::OkStatus());
  EXPECT_GT(without, 0);
  EXPECT_LT(without, options.steps);
}

// A shard whose marks are lost, or belong to other tokens, is refused.
TEST_F(MasksTest, MarksMustBeThere) {
  const auto load = [&] {
    return LoadTrainingData(folder_ + "/train_*.bin", "", std::nullopt, folder_ + "/cache");
  };
  const std::string marks = folder_ + "/train_000001.marks";
  std::filesystem::copy_file(folder_ + "/train_000002.marks", marks,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(absl::StrContains(load().status().message(), "must be the marks of 61 tokens"));
  std::filesystem::remove(marks);
  EXPECT_TRUE(absl::StrContains(load().status().message(), "train_000001.marks"));
}

// Other marks are other data, and data without a token that counts is refused.
TEST_F(MasksTest, MarksAreData) {
  const auto digest = [&] {
    const auto data =
        LoadTrainingData(folder_ + "/train_*.bin", "", std::nullopt, folder_ + "/cache");
    EXPECT_TRUE(data.ok()) << data.status();
    return data->train.corpus->digest();
  };
  const uint64_t before = digest();
  const std::vector<int32_t> tokens = fixture_["tokens"];
  ShardWriter writer(folder_ + "/train", ShardHeader::For(11, -1), /*shard_tokens=*/61);
  const std::vector<uint8_t> marks(tokens.size());
  ASSERT_EQ(writer.Append(tokens, marks, /*masked=*/true), absl::OkStatus());
  ASSERT_EQ(writer.Finish(), absl::OkStatus());
  EXPECT_NE(digest(), before);
  const absl::Status status =
      WithTrainer(Options(/*packed=*/true), [](Trainer&) { return absl::OkStatus(); });
  EXPECT_TRUE(absl::StrContains(status.message(), "tokens that do not count")) << status;
}

}  // namespace
}  // namespace burst
