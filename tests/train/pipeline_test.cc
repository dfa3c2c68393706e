// Tests ranks that are stages of a pipeline (--pp), as threads in all meshes. They train as one
// rank does: losses, gradient norms and the saved state are equal to rounding.
#include "train/pipeline/pipeline.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/train/trainer_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr char kLlama[] =
    R"({"family":"llama","layers":5,"width":16,"heads":2,"kv_heads":2,"ffn":24,"dropout":0.1})";
constexpr char kTiedGpt2[] =
    R"({"family":"gpt2","layers":4,"width":16,"heads":2,"ffn":32,"tied_embeddings":true,"dropout":0.1,)"
    R"("attention_dropout":0.2,"attention_softcap":0.5})";

struct Case {
  int64_t dp, pp, sp;
  Strategy strategy = Strategy::kBurst;
  int64_t zero = 0;
  int64_t chunks = 1;
  Recompute recompute = Recompute::kNone;
  int64_t segment = 1;
  bool packed = false;
  int64_t tp = -1;
};

class PipelineTest : public TrainerRunTest {
 protected:
  PipelineTest() : TrainerRunTest(/*sentences=*/300) {}

  // With a large eps an update is a smooth function of the gradient, and rounding stays rounding.
  TrainConfig Options(const Case& c, const std::string& out) const {
    TrainConfig options = SmallTraining(folder_, out, DeviceType::kCpu);
    options.precision = Precision::kFp32;
    options.model = kLlama;
    options.seqlen = 24;
    options.batch = 4;
    options.accumulate = 4;
    options.lr = 4e-3;
    options.eps = 1e-3;
    options.steps = 4;
    options.warmup = 1;
    options.threads = 1;
    options.ranks = -1;
    options.eval_every = 2;
    options.eval_batches = 2;
    options.schedule = LrShape::kConstant;
    Set(c, &options);
    return options;
  }
  static void Set(const Case& c, TrainConfig* options) {
    options->dp = c.dp;
    options->pp = c.pp;
    options->sp = c.sp;
    options->strategy = c.strategy;
    options->zero = c.zero;
    options->pp_chunks = c.chunks;
    options->recompute = c.recompute;
    options->recompute_segment = c.segment;
    options->packed = c.packed;
    options->tp = c.tp;
  }

  struct Results {
    std::vector<double> losses, norms;       // those of training and evaluations
    std::vector<std::vector<double>> state;  // masters, and both moments
  };

  static absl::Status Train(const TrainConfig& options) {
    return WithTrainers(options, [](Trainer& trainer, int) { return trainer.Train(); });
  }

  static Results ResultsOf(const TrainConfig& options) {
    Results results;
    for (const StepMetrics& row : Recorded(options)) {
      results.losses.push_back(row.loss);
      results.norms.push_back(row.grad_norm);
      if (row.val_loss.has_value()) results.losses.push_back(*row.val_loss);
    }
    const std::string path = CheckpointPath(options.out);
    const auto info = VerifyCheckpoint(path);
    EXPECT_EQ(info.status(), absl::OkStatus());
    const auto model = Transformer::Create(info->model, DType::kFloat32, std::nullopt);
    ParameterList& parameters = (*model)->parameters();
    AdamW optimizer({}, parameters.numel(), DType::kFloat32, {});
    EXPECT_EQ(LoadCheckpoint(path, &parameters, &optimizer), absl::OkStatus());
    for (const Tensor& part :
         {parameters.masters(), optimizer.first_moment(), optimizer.second_moment()}) {
      results.state.push_back(part.ToVector<double>());
    }
    return results;
  }

  static Results RunOf(const TrainConfig& options) {
    EXPECT_EQ(Train(options), absl::OkStatus());
    for (const StepMetrics& row : Recorded(options)) {
      EXPECT_EQ(row.pipeline_bubble.has_value(), options.pp > 1);
      EXPECT_GT(row.pipeline_bubble.value_or(1), 0);
      const bool several = options.dp * options.pp * options.sp > 1 || options.tp > 1;
      EXPECT_EQ(row.exposed_ms.has_value(), several);
      EXPECT_GT(row.exposed_ms.value_or(1e-9), 0);
    }
    return ResultsOf(options);
  }

  // |a - b| / |b|
  static double RelativeDifference(const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_EQ(a.size(), b.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      difference += (a[i] - b[i]) * (a[i] - b[i]);
      norm += b[i] * b[i];
    }
    return std::sqrt(difference / norm);
  }

  // Sums of some thousand fp32 products have another order, so they differ by 2^-24 sqrt(4096) =
  // 4e-6, relative. The second moment has twice the error of the gradient. `times`: how many times
  // as many roundings follow one another.
  static void ExpectEqualToRounding(const Results& results, const Results& expected,
                                    double times = 1) {
    EXPECT_GT(expected.losses.size(), 0u);
    EXPECT_LT(RelativeDifference(results.losses, expected.losses), times * 4e-6);
    EXPECT_LT(RelativeDifference(results.norms, expected.norms), times * 1e-5);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_LT(RelativeDifference(results.state[i], expected.state[i]), times * 1e-5) << i;
    }
  }
};

std::string NameOf(const Case& c) {
  return absl::StrCat("dp ", c.dp, ", pp ", c.pp, ", sp ", c.sp, ", tp ", c.tp, ", ",
                      Name(c.strategy), ", zero ", c.zero, ", ", c.chunks, " chunks");
}

TEST_F(PipelineTest, EveryMeshEqualsOneRank) {
  for (const char* model : {kLlama, kTiedGpt2}) {
    TrainConfig options = Options({1, 1, 1}, "one");
    options.model = model;
    fs::remove_all(options.out);
    const Results one = RunOf(options);
    for (int mesh = 1; mesh < 16; ++mesh) {
      const int64_t dp = 1 + (mesh & 1), sp = 1 + (mesh >> 1 & 1), pp = 1 + (mesh >> 2 & 1);
      const int64_t tp = 1 + (mesh >> 3 & 1);
      const int64_t most = pp > 1 && model == kTiedGpt2 ? 1 : 3;
      const int64_t zero = dp * sp == 1 ? 0 : std::min<int64_t>(most, 1 + mesh % 3);
      Case c = {dp, pp, sp, Strategy::kBurst, zero, pp == 1 ? 1 : 1 + mesh % 2};
      c.tp = tp;
      SCOPED_TRACE(absl::StrCat(model, ", ", NameOf(c)));
      TrainConfig options = Options(c, "mesh");
      options.model = model;
      fs::remove_all(options.out);
      ExpectEqualToRounding(RunOf(options), one);
    }
  }
}

TEST_F(PipelineTest, OtherWaysToTrainEqualOneRank) {
  const Case cases[] = {
      {1, 4, 1},
      {2, 4, 2},  // 16 ranks
      {1, 2, 1, Strategy::kBurst, 0, /*chunks=*/2, Recompute::kFull},
      {1, 2, 1, Strategy::kBurst, 0, 1, Recompute::kSelective, /*segment=*/2},
      {1, 2, 2, Strategy::kRing, 0, 1, Recompute::kSelective, 1, /*packed=*/true},
      {2, 2, 1, Strategy::kBurst, 0, 2, Recompute::kNone, 1, /*packed=*/true},
      // A ring connects tensor groups, also with unequal lengths.
      {1, 1, 3, Strategy::kRing, 1, 1, Recompute::kSelective, 1, /*packed=*/true, /*tp=*/2},
      {2, 2, 2, Strategy::kBurst, 1, 2, Recompute::kSequence, 1, false, /*tp=*/2},
      // Stages divide gradients and values.
      {2, 2, 1, Strategy::kBurst, 3},
      {1, 2, 3, Strategy::kBurst, 2},
      {2, 2, 1, Strategy::kBurst, 3, 2, Recompute::kFull, /*segment=*/2},
      {2, 4, 1, Strategy::kBurst, 3, 1, Recompute::kSelective, 1, /*packed=*/true},
      {2, 2, 1, Strategy::kBurst, 3, 2, Recompute::kNone, 1, false, /*tp=*/2},
      {1, 1, 5, Strategy::kBurst, 2, 1, Recompute::kFull, /*segment=*/2, false, /*tp=*/2},
  };
  const auto changed_scores = [&](const Case& c, const std::string& out) {
    TrainConfig options = Options(c, out);
    options.attention_dropout = 0.2;
    options.attention_softcap = 0.5;
    options.attention_sinks = true;
    return options;
  };
  Results one[2];
  for (const bool packed : {false, true}) {
    Case c = {1, 1, 1};
    c.packed = packed;
    one[packed] = RunOf(changed_scores(c, absl::StrCat("one", packed)));
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(NameOf(c));
    const TrainConfig options = changed_scores(c, "other");
    fs::remove_all(options.out);
    ExpectEqualToRounding(RunOf(options), one[c.packed]);
  }
}

// The first and the last stage have pieces of the same table. Norms after the branches would
// amplify roundings of small branches, so the weights are large.
TEST_F(PipelineTest, TiedEmbeddingsAreDividedOnBothStages) {
  constexpr char kTiedLlama[] =
      R"({"family":"llama","layers":4,"width":16,"heads":2,"kv_heads":2,"ffn":24,"tied_embeddings":true,)"
      R"("norm_position":"both","qk_norm":"head","gate":"gelu","scaled_embedding":true,"init_std":0.6})";
  TrainConfig options = Options({1, 1, 1}, "one");
  options.model = kTiedLlama;
  const Results one = RunOf(options);
  const Case cases[] = {{2, 2, 1, Strategy::kBurst, 3},
                        {1, 2, 3, Strategy::kBurst, 2, /*chunks=*/2},
                        {2, 2, 1, Strategy::kBurst, 3, 2, Recompute::kFull, /*segment=*/2},
                        {2, 2, 1, Strategy::kBurst, 3, 1, Recompute::kNone, 1, false, /*tp=*/2}};
  for (const Case& c : cases) {
    SCOPED_TRACE(NameOf(c));
    TrainConfig options = Options(c, "divided");
    options.model = kTiedLlama;
    fs::remove_all(options.out);
    ExpectEqualToRounding(RunOf(options), one, /*times=*/2);  // twice the normalizations
  }
}

// One run has parts on different meshes. The model's first and last stage share a table.
TEST_F(PipelineTest, ResumesOnAnyMesh) {
  TrainConfig straight = Options({1, 1, 1}, "straight");
  straight.model = kTiedGpt2;
  straight.steps = 14;
  const Results expected = RunOf(straight);
  const Case parts[] = {{1, 2, 1},
                        {2, 1, 1, Strategy::kBurst, 3},
                        {1, 4, 1},
                        {1, 2, 1, Strategy::kBurst, 0, 1, Recompute::kNone, 1, false, /*tp=*/2},
                        {1, 1, 2, Strategy::kBurst, 0, 1, Recompute::kNone, 1, false, /*tp=*/2},
                        {2, 2, 1, Strategy::kBurst, 1, 2},
                        {1, 1, 1}};
  TrainConfig options = Options(parts[0], "parts");
  options.model = kTiedGpt2;
  options.steps = 0;
  for (const Case& part : parts) {
    SCOPED_TRACE(NameOf(part));
    Set(part, &options);
    options.resume = options.steps > 0;
    options.steps += 2;
    ASSERT_EQ(Train(options), absl::OkStatus());
  }
  ExpectEqualToRounding(ResultsOf(options), expected);
}

// The copy of the embeddings on the last stage stays the same, to the bit.
TEST_F(PipelineTest, TiedEmbeddingsAreTheSameOnBothStages) {
  TrainConfig options = Options({3, 2, 1, Strategy::kBurst, 1}, "tied");
  options.model = kTiedGpt2;
  options.batch = 6;
  options.eval_every = 0;
  std::vector<std::vector<float>> tables(6);
  ASSERT_EQ(WithTrainers(options,
                         [&](Trainer& trainer, int rank) -> absl::Status {
                           for (int64_t step = 0; step < options.steps; ++step) {
                             BURST_RETURN_IF_ERROR(trainer.Step(step).status());
                           }
                           const Parameter& table = trainer.model().parameters()[0];
                           EXPECT_EQ(table.name, "embedding.tokens");
                           EXPECT_EQ(table.copy, rank % 2 == 1);
                           tables[rank] = table.variable.value().ToVector<float>();
                           return absl::OkStatus();
                         }),
            absl::OkStatus());
  for (int rank = 1; rank < 6; ++rank) EXPECT_EQ(tables[rank], tables[0]) << rank;
}

}  // namespace
}  // namespace burst
