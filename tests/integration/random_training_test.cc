// Trains random small configurations: model families, strategies, meshes, layouts, masks,
// recomputation, accumulation, divided states, and lengths from one token. Several ranks must train
// as one rank does, to rounding, or refuse the configuration in a sentence that names an option.
//
//   random_training_test [--first=0] [--count=200] [--steps=3]
//
// Configuration number n is a function of n alone, so a failure is repeated with --first=n
// --count=1. On GPUs (random_training_cuda_test) there are up to as many ranks as GPUs. There,
// tests/gpu/stress.sh starts the program anew for every few configurations, which also tests the
// first use of the GPUs.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/cli/options.h"
#include "burst/device/device.h"
#include "tests/testing/test_device.h"
#include "tests/train/trainer_run.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

struct StressOptions {
  int64_t first = 0, count = 200, steps = 3;
};
StressOptions stress;

// The draws of one configuration.
class Draws {
 public:
  explicit Draws(int64_t number) : number_(static_cast<uint64_t>(number)) {}

  // Returns a uniform number in [low, high].
  int64_t Between(int64_t low, int64_t high) {
    return low + Philox(/*key=*/number_, /*stream=*/0, index_++)[0] % (high - low + 1);
  }
  bool OneIn(int64_t n) { return Between(1, n) == 1; }
  template <typename T>
  T OneOf(const std::vector<T>& values) {
    return values[Between(0, static_cast<int64_t>(values.size()) - 1)];
  }

 private:
  const uint64_t number_;
  uint64_t index_ = 0;
};

struct Case {
  TrainConfig config;     // several ranks, or one
  TrainConfig reference;  // the same training on one rank, with other options at their defaults
};

// Makes both runs exact, so that they must have the same bits.
void MakeExact(Draws& draws, Case* drawn) {
  TrainConfig& c = drawn->config;
  c.exact = true;
  c.exact_chunk = 16 * draws.Between(1, 2);
  c.seqlen = c.exact_chunk * draws.Between(1, 5);
  if (c.strategy != Strategy::kSingle) c.strategy = Strategy::kBurst;
  c.ring_backward = BackwardDirection::kAuto;
  c.ring_grad_dtype = RingGradDType::kFp32;
  c.ranks_per_node = c.ulysses = c.tp = -1;
  c.deterministic = true;
  c.head_chunk = 0;
  c.zero = c.dp * c.sp > 1 ? draws.Between(0, 1) : 0;
  if (c.recompute == Recompute::kSequence) c.recompute = Recompute::kSelective;
  TrainConfig& one = drawn->reference;
  one.exact = true;
  one.exact_chunk = c.exact_chunk;
  one.seqlen = c.seqlen;
  one.ffn_chunk = c.ffn_chunk;  // changes the order of a sum
}

// The sizes of a model on which other options depend.
struct Sizes {
  int64_t kv_heads = 0, layers = 0;
  bool norms_all = false;  // one norm of all heads: not with --head_chunk
};

// Draws the model, as JSON.
Sizes DrawModel(Draws& draws, int64_t number, int64_t stages, TrainConfig* c) {
  const bool cuda = kTestDevice == DeviceType::kCuda;
  const bool gpt2 = draws.OneIn(2);
  const int64_t kv_heads = draws.OneOf<int64_t>({1, 1, 2, 2, 3, 4});
  const int64_t heads = kv_heads * draws.OneOf<int64_t>({1, 1, 2, 4});
  // With two channels LayerNorm is nearly a step function, so its gradients cannot be compared with
  // any tolerance.
  const int64_t least = heads == 1 ? 2 : 1;
  const int64_t head_dim = cuda ? 8 * draws.Between(1, 9) : 2 * draws.Between(least, 20);
  const int64_t ffn = cuda ? 8 * draws.Between(1, 9) : draws.Between(1, 50);
  // Every third Llama has the additional fields of Qwen2 and Qwen3, another third those of Gemma,
  // and a sixth those of OLMo 2.
  const bool norms_all = !gpt2 && number % 6 == 5;
  const std::string more =
      norms_all                 ? R"(,"qk_norm":"all","norm_position":"after")"
      : gpt2 || number % 3 == 2 ? ""
      : number % 3 == 1
          ? R"(,"norm_position":"both","unit_offset_norms":true,"gate":"gelu","scaled_embedding":true,)"
            R"("score_channels":20)"
          : absl::StrCat(",\"qkv_bias\":true,\"qk_norm\":\"head\",\"head_dim\":",
                         head_dim + (cuda ? 8 : 2));
  const int64_t layers = stages == 1 ? draws.Between(1, 2) : draws.Between(2, 4);
  c->model = absl::StrCat("{\"family\":\"", gpt2 ? "gpt2" : "llama", "\",\"layers\":", layers,
                          ",\"width\":", heads * head_dim, ",\"heads\":", heads,
                          ",\"kv_heads\":", kv_heads, ",\"ffn\":", ffn,
                          ",\"tied_embeddings\":", draws.OneIn(2) ? "true" : "false", more, "}");
  return {kv_heads, layers, norms_all};
}

// Draws the data and the optimization.
void DrawTraining(Draws& draws, TrainConfig* config) {
  TrainConfig& c = *config;
  const bool cuda = kTestDevice == DeviceType::kCuda;
  c.dropout = draws.OneIn(3) ? 0.1 : 0;
  c.seqlen = draws.OneIn(3) ? draws.Between(1, 8) : draws.Between(9, cuda ? 300 : 90);
  c.window = draws.OneIn(4) ? draws.Between(1, c.seqlen + 2) : 0;
  c.packed = draws.OneIn(3);
  c.accumulate = draws.Between(1, 3);
  c.clip = draws.OneIn(3) ? 0 : 1;
  c.seed = draws.Between(0, 1000);
  c.steps = stress.steps;
  // AdamW divides an element's gradient by its size. With the default of 1e-8, an element whose
  // gradient is only rounding would move by a whole step, up or down.
  c.eps = 1e-5;
  c.eval_batches = 1;
  c.eval_every = 1;
  if (cuda) {
    c.precision = draws.OneOf<Precision>({Precision::kFp32, Precision::kTf32, Precision::kBf16});
  }
}

// Draws the mesh and the strategy, for at most `most` ranks in each stage.
void DrawRanks(Draws& draws, int64_t most, int64_t stages, int64_t layers, TrainConfig* config) {
  TrainConfig& c = *config;
  c.ranks = -1;
  c.pp = stages;
  if (stages > 1 && layers == 4 && c.accumulate == 2) c.pp_chunks = draws.Between(1, 2);
  c.sp = draws.Between(1, std::max<int64_t>(1, most / c.dp));
  c.threads = draws.Between(1, 2);
  c.strategy =
      draws.OneOf<Strategy>({Strategy::kSingle, Strategy::kBurst, Strategy::kBurst, Strategy::kRing,
                             Strategy::kUlysses, Strategy::kBurstUlysses});
  if (c.strategy == Strategy::kSingle) c.sp = 1;
  const bool takes_tp = c.strategy == Strategy::kSingle || c.strategy == Strategy::kBurst ||
                        c.strategy == Strategy::kRing;
  if (takes_tp && c.dp * c.sp * 2 <= most && draws.OneIn(2)) c.tp = 2;
}

// Draws how attention is spread, and what saves memory.
void DrawExecution(Draws& draws, int64_t stages, const Sizes& sizes, TrainConfig* config) {
  TrainConfig& c = *config;
  c.layout = draws.OneOf<Layout>(
      {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kBalanced});
  c.recompute = draws.OneOf<Recompute>(
      {Recompute::kNone, Recompute::kFull, Recompute::kSelective, Recompute::kSequence});
  c.deterministic = draws.OneIn(2);
  if (HasDirections(c.strategy)) {
    c.ring_backward = draws.OneOf<BackwardDirection>(
        {BackwardDirection::kAuto, BackwardDirection::kBurst, BackwardDirection::kRing});
  }
  if (HasRing(c.strategy) && c.sp == 4 && draws.OneIn(2)) c.ranks_per_node = 2;
  if (c.strategy == Strategy::kBurstUlysses && draws.OneIn(2)) c.ulysses = draws.Between(1, c.sp);
  if (HasRing(c.strategy) && c.precision == Precision::kBf16 && draws.OneIn(2)) {
    c.ring_grad_dtype = RingGradDType::kBf16;
  }
  if (c.dp * c.sp > 1) c.zero = draws.Between(0, 3);
  if (c.recompute != Recompute::kNone) c.recompute_segment = draws.Between(1, 2);
  if (kTestDevice == DeviceType::kCuda && c.recompute != Recompute::kNone && stages == 1 &&
      draws.OneIn(2)) {
    c.offload = Offload::kActivations;
  }
  const bool tensor = c.tp > 1;
  if (!tensor && draws.OneIn(3)) {
    c.ffn_chunk = draws.Between(1, c.seqlen + 1);
  }
  if (!tensor && !sizes.norms_all && c.recompute != Recompute::kSequence && draws.OneIn(3)) {
    c.head_chunk = sizes.kv_heads % 2 == 0 && draws.OneIn(2) ? sizes.kv_heads / 2 : 1;
  }
}

// Draws what both runs do to scores and logits.
void DrawScores(Draws& draws, Case* result) {
  TrainConfig &c = result->config, &one = result->reference;
  if (!c.exact) {
    c.attention_dropout = one.attention_dropout = draws.OneIn(3) ? 0.2 : -1;
    c.attention_softcap = one.attention_softcap = draws.OneIn(3) ? 0.5 : -1;
  }
  c.attention_sinks = one.attention_sinks = draws.OneIn(3);
  if (kTestDevice == DeviceType::kCpu) {
    c.z_loss = one.z_loss = draws.OneIn(4) ? 0.01 : 0;
    c.logits_softcap = one.logits_softcap = draws.OneIn(4) ? 3 : -1;
  }
}

Case Draw(int64_t number, const std::string& folder, int max_ranks) {
  Draws draws(number);
  Case result;
  TrainConfig& c = result.config;
  c = SmallTraining(folder, "run", kTestDevice);
  const int64_t stages = max_ranks > 1 && draws.OneIn(4) ? 2 : 1;
  const int64_t most = max_ranks / stages;  // ranks of a stage

  // The model and the data are equal in both runs.
  const Sizes sizes = DrawModel(draws, number, stages, &c);
  DrawTraining(draws, &c);
  c.dp = draws.OneIn(3) ? draws.Between(1, std::min<int64_t>(3, most)) : 1;
  c.batch = c.dp * draws.Between(1, 2);
  result.reference = c;
  result.reference.dp = 1;
  result.reference.threads = 2;

  DrawRanks(draws, most, stages, sizes.layers, &c);
  DrawExecution(draws, stages, sizes, &c);
  if (stages == 1 && draws.OneIn(5)) MakeExact(draws, &result);
  DrawScores(draws, &result);
  return result;
}

// Returns the options that are not the default, which repeat the case in //train.
std::string CommandLine(TrainConfig config) {
  std::vector<std::string> words;
  TrainConfig initial;
  const OptionTable options = TrainOptions(&config), defaults = TrainOptions(&initial);
  for (const Option& option : options.options()) {
    if (option.get() == defaults[option.name].get()) continue;
    words.push_back(absl::StrCat("--", option.name, "='", option.get(), "'"));
  }
  return absl::StrJoin(words, " ");
}

struct Results {
  std::vector<double> losses, norms;
};

absl::StatusOr<Results> Train(const TrainConfig& config) {
  Results results;
  fs::remove_all(config.out);
  BURST_RETURN_IF_ERROR(WithTrainers(config, [&](Trainer& trainer, int rank) -> absl::Status {
    for (int64_t step = 0; step < config.steps; ++step) {
      BURST_ASSIGN_OR_RETURN(const StepMetrics metrics,
                             trainer.Step(step, step + 1 < config.steps));
      if (rank != 0) continue;
      results.losses.push_back(metrics.loss);
      results.norms.push_back(metrics.grad_norm);
    }
    BURST_ASSIGN_OR_RETURN(const std::optional<double> validation, trainer.Evaluate());
    if (rank == 0) results.losses.push_back(validation.value());
    return absl::OkStatus();
  }));
  return results;
}

// Bounds of the difference of two runs that add up in different orders. Sums of a few thousand
// products then differ by some 100 roundings, 2^-24 * 100 in fp32. tf32 and bf16 round factors to
// 2^-11 and 2^-9 of them. The errors of a sum's terms are independent, so a loss has about the
// error of a single product. A gradient's norm has more, because a few elements may dominate it.
//
// A loss below 1 is held to the same absolute error as a loss of 1, because the rounding of its
// logits does not shrink with it. AdamW's first steps are lr * sign(gradient). If an element's
// gradient is only rounding, it may go either way, which moves the loss by a rounding, too.
struct Tolerance {
  double loss, norm;
};
Tolerance ToleranceOf(Precision precision) {
  switch (precision) {
    case Precision::kTf32:
      return {2e-3, 2e-2};
    case Precision::kBf16:
      return {1e-2, 6e-2};
    default:
      return {1e-5, 1e-3};
  }
}

double Worst(const std::vector<double>& a, const std::vector<double>& b, double floor) {
  double worst = a.size() == b.size() ? 0 : HUGE_VAL;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::fabs(a[i] - b[i]) / std::max(floor, std::fabs(b[i]));
    worst = std::isfinite(difference) ? std::max(worst, difference) : HUGE_VAL;
  }
  return worst;
}

// The test has parts, so that test shards can share them. Configuration n is in part n mod kParts.
constexpr int kParts = 4;

class RandomTraining : public testing::TestWithParam<int> {
 protected:
  RandomTraining() : folder_(absl::StrCat(testing::TempDir(), "/random_training_", getpid())) {
    fs::create_directories(folder_);
    std::ofstream text(folder_ + "/text.txt");
    for (int i = 0; i < 400; ++i) {
      text << "sentence " << i * 7919 % 1000 << " of many\n" << (i % 4 == 3 ? "\n" : "");
    }
  }
  ~RandomTraining() override { fs::remove_all(folder_); }

  const std::string folder_;
};

TEST_P(RandomTraining, ManyRanksTrainAsOneOrRefuseInASentence) {
  const int max_ranks = kTestDevice == DeviceType::kCuda ? std::min(6, CudaDeviceCount()) : 6;
  int64_t equal = 0, refused = 0;
  double worst_loss = 0, worst_norm = 0;  // as a share of the tolerance
  for (int64_t n = stress.first; n < stress.first + stress.count; ++n) {
    if (n % kParts != GetParam()) continue;
    const Case drawn = Draw(n, folder_, max_ranks);
    const std::string words = CommandLine(drawn.config);
    SCOPED_TRACE(absl::StrCat("configuration ", n, ": ", words));
    std::printf("%lld: %s\n", static_cast<long long>(n), words.c_str());
    std::fflush(stdout);
    // Several ranks train first, so that every GPU is new to them.
    const absl::StatusOr<Results> many = Train(drawn.config);
    if (absl::IsInvalidArgument(many.status())) {
      EXPECT_EQ(many.status().message().substr(0, 2), "--") << many.status();
      std::printf("  refused: %s\n", std::string(many.status().message()).c_str());
      ++refused;
      continue;
    }
    ASSERT_TRUE(many.ok()) << many.status();
    const absl::StatusOr<Results> one = Train(drawn.reference);
    ASSERT_TRUE(one.ok()) << one.status();
    if (drawn.config.exact) {
      EXPECT_EQ(many->losses, one->losses);
      EXPECT_EQ(many->norms, one->norms);
    }
    const Tolerance tolerance = ToleranceOf(drawn.config.precision);
    const double loss = Worst(many->losses, one->losses, 1) / tolerance.loss;
    const double norm = Worst(many->norms, one->norms, 1e-3) / tolerance.norm;
    EXPECT_LE(loss, 1) << absl::StrJoin(many->losses, " ") << " instead of "
                       << absl::StrJoin(one->losses, " ");
    EXPECT_LE(norm, 1) << absl::StrJoin(many->norms, " ") << " instead of "
                       << absl::StrJoin(one->norms, " ");
    std::printf("  %.3f %.3f of the tolerances\n", loss, norm);
    worst_loss = std::max(worst_loss, loss);
    worst_norm = std::max(worst_norm, norm);
    ++equal;
  }
  std::printf("%lld equal, %lld refused; at most %.2f and %.2f of the tolerances\n",
              static_cast<long long>(equal), static_cast<long long>(refused), worst_loss,
              worst_norm);
  // More than half of many configurations must be trained.
  if (equal + refused >= 20) {
    EXPECT_GE(equal, refused);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RandomTraining, testing::Range(0, kParts));

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  burst::OptionTable table;
  table.Add("first", &burst::stress.first).Help("The first configuration's number.");
  table.Add("count", &burst::stress.count).Help("Configurations to try.");
  table.Add("steps", &burst::stress.steps).Help("Steps of each.");
  const absl::Status status = table.ParseArguments(argc, argv);
  if (!status.ok()) {
    std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  return RUN_ALL_TESTS();
}
