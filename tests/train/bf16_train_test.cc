// Tests training in bfloat16 on the CPU. Activations, weights and their products are rounded as on
// GPUs (tests/model/ops: ops_bf16_test, tests/model: parity_test), so that a model for GPUs can be
// studied without one.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "tests/train/trainer_run.h"

namespace burst {
namespace {

constexpr char kGpt2[] =
    R"({"family":"gpt2","layers":2,"width":32,"heads":4,"ffn":64,"tied_embeddings":true})";
constexpr char kOlmo[] = R"({"layers":2,"width":64,"heads":4,"kv_heads":2,"ffn":96,)"
                         R"("qk_norm":"all","norm_position":"after"})";
constexpr char kGemma[] =
    R"({"layers":2,"width":64,"heads":4,"kv_heads":2,"ffn":96,"qk_norm":"head",)"
    R"("norm_position":"both","unit_offset_norms":true,"gate":"gelu","scaled_embedding":true,)"
    R"("tied_embeddings":true,"full_layers":[1],"window_rope_theta":1000,"logits_softcap":30})";

class Bf16Train : public TrainerRunTest {
 protected:
  Bf16Train() : TrainerRunTest(/*sentences=*/300) {}

  TrainConfig Options(const std::string& model) const {
    TrainConfig options = SmallTraining(folder_, "run", DeviceType::kCpu);
    options.precision = Precision::kBf16;
    options.model = model;
    options.seqlen = 40;
    options.batch = 4;
    options.steps = 20;
    options.warmup = 2;
    options.lr = 2e-3;
    options.schedule = LrShape::kConstant;
    options.threads = 1;
    return options;
  }

  // Returns the losses of the steps from `first` on, as rank 0 knows them.
  static std::vector<double> Losses(const TrainConfig& options, int64_t first = 0) {
    std::vector<double> losses;
    EXPECT_EQ(WithTrainers(options,
                           [&](Trainer& trainer, int rank) -> absl::Status {
                             for (int64_t step = first; step < options.steps; ++step) {
                               BURST_ASSIGN_OR_RETURN(const StepMetrics row, trainer.Step(step));
                               if (rank == 0) losses.push_back(row.loss);
                             }
                             return absl::OkStatus();
                           }),
              absl::OkStatus());
    return losses;
  }

  // A loss in bf16 may be off by 0.5 %, as on GPUs (cuda_train_test).
  static void ExpectNear(const std::vector<double>& losses, const std::vector<double>& expected,
                         const std::string& what) {
    ASSERT_EQ(losses.size(), expected.size()) << what;
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(losses[i], expected[i], 5e-3 * expected[i]) << what << ", step " << i + 1;
    }
  }
};

TEST_F(Bf16Train, LossesFollowFloat32) {
  for (const auto& [name, model] :
       {std::pair("gpt2", kGpt2), std::pair("olmo", kOlmo), std::pair("gemma", kGemma)}) {
    for (const OptimizerKind optimizer : {OptimizerKind::kAdamW, OptimizerKind::kMuon}) {
      TrainConfig options = Options(model);
      options.optimizer = optimizer;
      const std::vector<double> losses = Losses(options);
      options.precision = Precision::kFp32;
      const std::vector<double> expected = Losses(options);
      EXPECT_LT(expected.back(), 0.95 * expected.front()) << name << " learns";
      EXPECT_NE(losses, expected) << name << ": nothing was rounded";
      ExpectNear(losses, expected, absl::StrCat(name, " ", NameOf(optimizer, kOptimizers)));
    }
  }
}

TEST_F(Bf16Train, RanksFollowOne) {
  const auto on = [&](const char* model, int64_t dp, int64_t sp, int64_t tp, int64_t pp,
                      int64_t zero) {
    TrainConfig options = Options(model);
    options.ranks = static_cast<int>(dp * sp * tp * pp);
    options.dp = dp;
    options.sp = sp;
    options.tp = tp;
    options.pp = pp;
    options.zero = zero;
    return Losses(options);
  };
  const std::vector<double> one = Losses(Options(kGemma));
  ExpectNear(on(kGemma, 1, 2, 1, 1, 0), one, "a ring");
  ExpectNear(on(kGemma, 1, 1, 2, 1, 0), one, "tensor parallel");
  ExpectNear(on(kGemma, 1, 1, 1, 2, 0), one, "a pipeline");
  ExpectNear(on(kGemma, 2, 1, 1, 1, 0), one, "data parallel");
  ExpectNear(on(kGemma, 1, 2, 1, 1, 3), one, "a ring that divides the weights");
  ExpectNear(on(kOlmo, 1, 1, 2, 1, 0), Losses(Options(kOlmo)), "a norm over the ranks");
}

TEST_F(Bf16Train, ExactRunsHaveTheSameBitsOnAnyRanks) {
  TrainConfig options = Options(kGpt2);
  options.exact = true;
  options.seqlen = 48;  // whole chunks
  const std::vector<double> one = Losses(options);
  options.ranks = 3;
  EXPECT_EQ(Losses(options), one);
}

TEST_F(Bf16Train, RecomputationAndResumeKeepTheBits) {
  TrainConfig options = Options(kGemma);
  options.dropout = 0.1;
  options.steps = 12;
  const std::vector<double> whole = Losses(options);
  options.recompute = Recompute::kFull;
  EXPECT_EQ(Losses(options), whole);

  options.steps = 7;
  EXPECT_EQ(WithTrainer(options, [](Trainer& trainer) { return trainer.Train(); }),
            absl::OkStatus());
  options.steps = 12;
  options.resume = true;
  EXPECT_EQ(Losses(options, /*first=*/7), std::vector<double>(whole.begin() + 7, whole.end()));
}

}  // namespace
}  // namespace burst
