// Tests --exact. Runs on any number of ranks, in any layout, have the same bits of losses, gradient
// norms, weights and moments. The test runs on the CPU and, compiled once more, on GPUs.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/device/device.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/subprocess.h"
#include "tests/testing/test_device.h"
#include "tests/train/trainer_run.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSteps = kThreadSanitizer ? 5 : 50;
constexpr char kLlama[] =
    R"({"family":"llama","layers":2,"width":32,"heads":4,"kv_heads":2,"ffn":48,"dropout":0.1})";
constexpr char kGpt2[] =
    R"({"family":"gpt2","layers":2,"width":32,"heads":4,"ffn":64,"tied_embeddings":true,)"
    R"("attention_sinks":true})";

class ExactTraining : public TrainerRunTest {
 protected:
  ExactTraining() : TrainerRunTest(/*sentences=*/1000) {}

  TrainConfig Options() const {
    TrainConfig options = SmallTraining(folder_, "run", kTestDevice);
    options.model = kLlama;
    options.exact = true;
    options.seqlen = 128;  // 8 chunks of 16
    options.batch = 24;
    options.lr = 4e-3;
    options.schedule = LrShape::kConstant;
    options.steps = kSteps;
    options.warmup = 2;
    options.eval_every = kSteps / 2;
    options.eval_batches = 2;
    options.threads = 1;
    options.checkpoint_files = CheckpointFiles::kOne;
    options.ranks = -1;
    return options;
  }

  struct Results {
    std::vector<double> losses, norms, validation;
    std::string state;  // weights and both moments of the last checkpoint, as they are in the file

    bool operator==(const Results& other) const {
      return losses == other.losses && norms == other.norms && validation == other.validation &&
             state == other.state;
    }
  };

  // Returns the results of the run so far.
  static Results Train(const TrainConfig& options) {
    if (!options.resume) fs::remove_all(options.out);
    EXPECT_EQ(WithTrainers(options,
                           [](Trainer& trainer, int) -> absl::Status { return trainer.Train(); }),
              absl::OkStatus());
    Results results;
    std::istringstream lines(ReadAll(options.out + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const auto row = nlohmann::json::parse(line);
      results.losses.push_back(row["loss"]);
      results.norms.push_back(row["grad_norm"]);
      if (row.contains("val_loss")) results.validation.push_back(row["val_loss"]);
    }
    const std::string file = ReadAll(options.out + "/checkpoint.safetensors");
    uint64_t header = 0;
    EXPECT_GT(file.size(), sizeof(header));
    std::memcpy(&header, file.data(), sizeof(header));
    results.state = file.substr(sizeof(header) + header);
    return results;
  }

  static bool Runs(int64_t ranks) {
    return kTestDevice == DeviceType::kCpu || ranks <= CudaDeviceCount();
  }
};

struct MeshOption {
  int64_t dp, sp;
  Layout layout = Layout::kZigzag;
  int64_t zero = 0;
};

TEST_F(ExactTraining, HasTheSameBitsOnAnyRanks) {
  TrainConfig options = Options();
  options.ranks = 1;
  const Results one = Train(options);
  ASSERT_EQ(one.losses.size(), size_t{kSteps});
  EXPECT_EQ(one.validation.size(), 2u);
  if (!kThreadSanitizer) {
    EXPECT_LT(one.losses.back(), 0.8 * one.losses.front()) << "it learns";
  }
  options.ranks = -1;
  const MeshOption meshes[] = {{1, 2},
                               {1, 3, Layout::kStriped},
                               {1, 4},
                               {1, 8, Layout::kContiguous},
                               {2, 1},
                               {3, 1},
                               {4, 1},
                               {8, 1},
                               {2, 3},
                               {3, 2, Layout::kStriped},
                               {2, 2, Layout::kContiguous, /*zero=*/1}};
  for (const MeshOption& mesh : meshes) {
    if (!Runs(mesh.dp * mesh.sp)) continue;
    SCOPED_TRACE(absl::StrCat(mesh.dp, " x ", mesh.sp, ", ", Name(mesh.layout)));
    options.dp = mesh.dp;
    options.sp = mesh.sp;
    options.layout = mesh.layout;
    options.zero = mesh.zero;
    EXPECT_TRUE(Train(options) == one);
  }
}

// Muon's updates of whole matrices, and the average of the weights, depend on the gradient alone. A
// resumed run may have another number of ranks.
TEST_F(ExactTraining, ByMuonHasTheSameBits) {
  for (const char* model : {kLlama, kGpt2}) {
    TrainConfig options = Options();
    options.model = model;
    options.optimizer = OptimizerKind::kMuon;
    options.ema = 0.9;
    options.steps = 6;
    options.eval_every = 3;
    options.batch = 6;
    options.ranks = 1;
    const Results one = Train(options);
    ASSERT_EQ(one.losses.size(), 6u);
    options.ranks = -1;
    for (const MeshOption& mesh :
         {MeshOption{1, 3, Layout::kStriped}, {3, 1}, {2, 2, Layout::kZigzag, 1}}) {
      if (!Runs(mesh.dp * mesh.sp)) continue;
      SCOPED_TRACE(absl::StrCat(mesh.dp, " x ", mesh.sp, ", ", Name(mesh.layout)));
      options.dp = mesh.dp;
      options.sp = mesh.sp;
      options.layout = mesh.layout;
      options.zero = mesh.zero;
      EXPECT_TRUE(Train(options) == one);
    }
    options.steps = 3;
    Train(options);
    options.steps = 6;
    options.dp = options.sp = 1;
    options.zero = 0;
    options.resume = true;
    EXPECT_TRUE(Train(options) == one);
  }
}

// The balanced layout deals packed documents to ranks, with micro-batches, recomputation and a
// window.
TEST_F(ExactTraining, OfPackedDocumentsHasTheSameBits) {
  TrainConfig options = Options();
  options.model = kGpt2;
  options.steps = 10;
  options.eval_every = 5;
  options.batch = 6;
  options.packed = true;
  options.accumulate = 2;
  options.window = 40;
  options.ranks = 1;
  const Results one = Train(options);
  options.ranks = -1;
  options.recompute = Recompute::kSelective;
  if (kTestDevice == DeviceType::kCuda) options.offload = Offload::kAll;
  for (const MeshOption& mesh :
       {MeshOption{1, 1}, {1, 3, Layout::kBalanced}, {2, 2, Layout::kBalanced}, {3, 2}}) {
    if (!Runs(mesh.dp * mesh.sp)) continue;
    SCOPED_TRACE(absl::StrCat(mesh.dp, " x ", mesh.sp, ", ", Name(mesh.layout)));
    options.dp = mesh.dp;
    options.sp = mesh.sp;
    options.layout = mesh.layout;
    EXPECT_TRUE(Train(options) == one);
  }
}

TEST_F(ExactTraining, IsThePlainRunToRounding) {
  TrainConfig options = Options();
  options.ranks = 1;
  options.steps = 20;
  options.eval_every = 10;
  const Results exact = Train(options);
  options.exact = false;
  const Results plain = Train(options);
  // bf16 rounds activations at other places, because chunks' gradients are not added in the GEMM.
  const double tolerance = kTestDevice == DeviceType::kCuda ? 5e-3 : 1e-5;
  for (size_t i = 0; i < plain.losses.size(); ++i) {
    EXPECT_NEAR(exact.losses[i], plain.losses[i], tolerance * plain.losses[i]) << i;
  }
}

// Chunks hold whole sequences, for data parallel ranks. A validation of 15 sequences ends with a
// shorter chunk.
TEST_F(ExactTraining, InChunksOfSequencesHasTheSameBits) {
  TrainConfig options = Options();
  options.steps = 10;
  options.eval_every = 5;
  options.exact_chunk = 2 * options.seqlen;
  options.packed = true;
  options.ranks = 1;
  const Results one = Train(options);
  options.ranks = -1;
  for (const int64_t dp : {2, 3, 4}) {
    if (!Runs(dp)) continue;
    options.dp = dp;
    EXPECT_TRUE(Train(options) == one) << dp;
  }
}

// The order of the data is the same, too.
TEST_F(ExactTraining, ResumedOnOtherRanksHasTheSameBits) {
  TrainConfig options = Options();
  options.steps = 15;
  options.eval_every = 5;
  options.ranks = 1;
  const Results straight = Train(options);
  options.out = folder_ + "/moved";
  const auto train_to = [&](int64_t steps, int64_t dp, int64_t sp) {
    options.steps = steps;
    options.ranks = -1;
    options.dp = Runs(dp * sp) ? dp : 1;
    options.sp = Runs(dp * sp) ? sp : 1;
    const Results results = Train(options);
    options.resume = true;
    return results;
  };
  (void)train_to(5, 2, 2);
  (void)train_to(10, 1, 3);
  EXPECT_TRUE(train_to(15, 8, 1) == straight);
}

// Another chunk gives other bits, so the run is another one, and a resume says so.
TEST_F(ExactTraining, DependsOnTheChunk) {
  TrainConfig options = Options();
  options.steps = 4;
  options.eval_every = 0;
  options.ranks = 1;
  const Results sixteen = Train(options);
  options.exact_chunk = 32;
  const Results thirtytwo = Train(options);
  EXPECT_FALSE(thirtytwo == sixteen);
  EXPECT_NEAR(thirtytwo.losses.back(), sixteen.losses.back(), 1e-2);
  options.exact_chunk = 64;
  options.resume = true;
  options.steps = 6;
  const absl::Status status =
      WithTrainers(options, [](Trainer& trainer, int) -> absl::Status { return trainer.Train(); });
  EXPECT_TRUE(absl::StrContains(status.message(), "exact_chunk")) << status;
}

}  // namespace
}  // namespace burst
