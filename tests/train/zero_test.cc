// Ranks that divide a model's state (--zero) train as those that do not, in less memory. Results
// have the same bits where sums have the same order, else they are equal to rounding. On the CPU
// and, compiled once more, on GPUs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/device/memory.h"
#include "tests/testing/test_device.h"
#include "tests/train/zero_run.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

// The results of a run.
struct Results {
  std::vector<double> losses, norms;
  // The masters of every parameter for each tensor parallel rank, joined from the ranks' pieces.
  std::vector<std::vector<std::vector<float>>> weights;

  bool operator==(const Results& other) const {
    return losses == other.losses && norms == other.norms && weights == other.weights;
  }
};

class Zero : public ZeroRunTest {
 protected:
  static Results Train(TrainConfig options, int64_t zero, Offload offload = Offload::kNone) {
    options.zero = zero;
    fs::remove_all(options.out);
    Results results;
    const int64_t parts = std::max<int64_t>(1, options.tp);
    results.weights.resize(parts);
    std::atomic<int> sized{0};
    EXPECT_EQ(WithTrainers(
                  options,
                  [&](Trainer& trainer, int rank) -> absl::Status {
                    const ParameterList& parameters = trainer.model().parameters();
                    if (rank == 0) {
                      for (auto& part : results.weights) {
                        for (const Parameter& p : parameters.all()) {
                          part.emplace_back(p.numel());
                        }
                      }
                      sized = 1;
                    }
                    for (int64_t step = 0; step < options.steps; ++step) {
                      BURST_ASSIGN_OR_RETURN(
                          const StepMetrics row,
                          trainer.Step(step, step % 2 == 0 && step + 1 < options.steps));
                      if (rank != 0) continue;
                      results.losses.push_back(row.loss);
                      results.norms.push_back(row.grad_norm);
                    }
                    // Every rank has made its steps with rank 0.
                    EXPECT_EQ(sized, 1);
                    for (int i = 0; i < parameters.size(); ++i) {
                      const ParameterPiece piece =
                          parameters.PieceOf(i, parameters.sharding().rank);
                      const std::vector<float> own = parameters.Masters(i).ToVector<float>();
                      const bool first_replica = zero > 0 || rank < parts;
                      if (!first_replica) continue;
                      std::copy(own.begin(), own.end(),
                                results.weights[rank % parts][i].begin() + piece.begin);
                    }
                    return absl::OkStatus();
                  },
                  [&](ResolvedConfig* config) { config->offload = offload; }),
              absl::OkStatus());
    return results;
  }

  // The bound is for sums of some thousand products in another order
  // (tests/integration/random_training_test.cc).
  static void ExpectEqualToRounding(const Results& results, const Results& expected) {
    ASSERT_EQ(results.losses.size(), expected.losses.size());
    for (size_t i = 0; i < results.losses.size(); ++i) {
      EXPECT_NEAR(results.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << i;
      EXPECT_NEAR(results.norms[i], expected.norms[i], 1e-3 * expected.norms[i]) << i;
    }
  }
};

struct Case {
  Strategy strategy;
  int64_t dp, sp;
  const char* model = kLlama;
  int64_t accumulate = 1;
  Recompute recompute = Recompute::kNone;
  bool packed = false;
  int64_t segment = 1;
  int64_t tp = -1;
};

// Stage 1 reduces what an undivided run reduces, in the same order, and updates every element once.
// The stages 2 and 3 reduce the same as each other.
TEST_F(Zero, EveryStageTakesTheSameSteps) {
  const Case cases[] = {
      {Strategy::kBurst, 1, 2},
      {Strategy::kBurst, 3, 1, kTiedGpt2, /*accumulate=*/2, Recompute::kFull},
      {Strategy::kRing, 2, 2, kLlama, 2, Recompute::kSelective, /*packed=*/true},
      {Strategy::kUlysses, 1, 2, kTiedGpt2},
      {Strategy::kBurst, 2, 2, kLlama, 2, Recompute::kFull, false, /*segment=*/2},
      {Strategy::kBurst, 2, 1, kTiedGpt2, 1, Recompute::kSelective, false, /*segment=*/2},
      {Strategy::kBurstUlysses, 1, 4, kLlama, 1, Recompute::kNone, true},
      {Strategy::kSingle, 2, 1, kTiedGpt2, 1, Recompute::kFull, false, 1, /*tp=*/2},
      {Strategy::kSingle, 2, 1,
       R"({"family":"llama","layers":1,"width":32,"heads":4,"kv_heads":1,"ffn":48})", 1,
       Recompute::kNone, false, 1, /*tp=*/4},
      {Strategy::kBurst, 2, 2, kTiedGpt2, 2, Recompute::kSelective, false, 1, /*tp=*/2},
  };
  for (const Case& c : cases) {
    if (kTestDevice == DeviceType::kCuda &&
        c.dp * c.sp * std::max<int64_t>(1, c.tp) > CudaDeviceCount()) {
      continue;
    }
    SCOPED_TRACE(absl::StrCat(Name(c.strategy), ", dp ", c.dp, ", sp ", c.sp));
    TrainConfig options = Options();
    options.strategy = c.strategy;
    options.dp = c.dp;
    options.sp = c.sp;
    options.tp = c.tp;
    options.model = c.model;
    options.accumulate = c.accumulate;
    options.recompute = c.recompute;
    options.recompute_segment = c.segment;
    options.packed = c.packed;
    const Results whole = Train(options, 0);
    EXPECT_LT(whole.losses.back(), 0.9 * whole.losses.front()) << "it learns";
    EXPECT_TRUE(Train(options, 1) == whole);
    const Results second = Train(options, 2);
    ExpectEqualToRounding(second, whole);
    EXPECT_TRUE(Train(options, 3) == second);
  }
}

// Two ranks' sums have one order. The norm is left out, because stages 2 and 3 add it up in another
// order.
TEST_F(Zero, TwoRanksHaveTheSameBitsInEveryStage) {
  if (kTestDevice == DeviceType::kCuda && CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  for (const auto& [dp, optimizer] :
       {std::pair(1, OptimizerKind::kAdamW), std::pair(2, OptimizerKind::kAdamW),
        std::pair(2, OptimizerKind::kMuon)}) {
    TrainConfig options = Options();
    options.optimizer = optimizer;
    options.dp = dp;
    options.sp = 2 / dp;
    options.clip = 0;
    std::vector<Precision> precisions = {Precision::kFp32};
    if (kTestDevice == DeviceType::kCuda && dp == 2) {
      precisions = {Precision::kBf16, Precision::kFp8};
    }
    for (const Precision precision : precisions) {
      options.precision = precision;
      const Results whole = Train(options, 0);
      for (const int64_t zero : {1, 2, 3}) {
        const Results divided = Train(options, zero);
        EXPECT_EQ(divided.losses, whole.losses) << zero;
        EXPECT_TRUE(divided.weights == whole.weights) << zero;
      }
    }
  }
}

// A state in the host's memory, divided or not, takes the same steps.
TEST_F(Zero, AnOffloadedOptimizerTakesTheSameSteps) {
  const int most = kTestDevice == DeviceType::kCuda ? CudaDeviceCount() : 4;
  for (const int dp : {1, 2, 4}) {
    for (const OptimizerKind optimizer : {OptimizerKind::kAdamW, OptimizerKind::kMuon}) {
      if (dp > most) continue;
      TrainConfig options = Options();
      options.optimizer = optimizer;
      options.dp = dp;
      options.sp = 1;
      options.batch = 4;
      options.steps = 6;
      if (kTestDevice == DeviceType::kCuda) options.precision = Precision::kBf16;
      for (int64_t zero = 0; zero <= (dp > 1 ? 3 : 0); ++zero) {
        EXPECT_TRUE(Train(options, zero, Offload::kOptimizer) == Train(options, zero))
            << NameOf(optimizer, kOptimizers) << ", " << dp << " ranks, stage " << zero;
      }
    }
  }
}

// ---- Memory.

// A rank's memory once it is ready, and the most that it uses in two steps. The CPU's memory
// belongs to all ranks, so it is their mean.
struct Memory {
  double kept = 0, peak = 0, parameters = 0;
  double told = 0;  // the kept bytes, according to ParameterList
};

Memory MemoryOf(TrainConfig options, int64_t zero) {
  options.zero = zero;
  fs::remove_all(options.out);
  const bool cuda = kTestDevice == DeviceType::kCuda;
  const int ranks = static_cast<int>(options.dp * options.sp), share = cuda ? 1 : ranks;
  const int64_t before = cuda ? 0 : GetMemoryStats(kTestDevice).bytes_in_use;
  const auto bytes = [&](int64_t in_use) { return static_cast<double>(in_use - before) / share; };
  Memory memory;
  std::atomic<int> arrived{0};
  std::atomic<bool> measured{false};
  const auto status = WithTrainers(options, [&](Trainer& trainer, int rank) -> absl::Status {
    ++arrived;
    if (rank == 0) {
      while (arrived < ranks) std::this_thread::yield();
      memory.parameters = static_cast<double>(trainer.model().parameters().numel());
      memory.kept = bytes(GetMemoryStats(kTestDevice).bytes_in_use);
      const auto told = trainer.kept_bytes();
      memory.told = static_cast<double>(told.values + told.gradients + told.optimizer);
      ResetPeakMemory(kTestDevice);
      measured = true;
    }
    while (!measured) std::this_thread::yield();
    for (int64_t step = 0; step < 2; ++step) BURST_RETURN_IF_ERROR(trainer.Step(step).status());
    if (rank == 0) memory.peak = bytes(GetMemoryStats(kTestDevice).peak_bytes);
    return absl::OkStatus();
  });
  EXPECT_EQ(status, absl::OkStatus());
  return memory;
}

// The bytes of a whole parameter and of a divided one, by stage.
struct Bytes {
  double whole, divided;
};
constexpr Bytes kFp32[] = {{16, 0}, {8, 8}, {4, 12}, {0, 16}};
constexpr Bytes kBf16[] = {{18, 0}, {6, 12}, {2, 16}, {0, 18}};

// Muon's matrices have one moment, of four bytes a number.
TEST_F(Zero, MuonKeepsOneMomentOfItsMatrices) {
  TrainConfig options = Options();
  options.model =
      R"({"family":"llama","tied_embeddings":false,"layers":4,"width":256,"heads":4,"ffn":1024})";
  const double of_matrices = 4.0 * 256 * (3 * 256 + 256 + 2048 + 1024);
  options.sp = 1;
  options.dp = 2;
  if (kTestDevice == DeviceType::kCuda && CudaDeviceCount() < 2) options.dp = 1;
  for (const int64_t zero : {0, 3}) {
    if (zero > 0 && options.dp == 1) continue;
    const double ranks = zero > 0 ? static_cast<double>(options.dp) : 1;
    const Memory adamw = MemoryOf(options, zero);
    TrainConfig by_muon = options;
    by_muon.optimizer = OptimizerKind::kMuon;
    const Memory muon = MemoryOf(by_muon, zero);
    EXPECT_NEAR(adamw.told - muon.told, 4 * of_matrices / ranks, 1e-3 * of_matrices) << zero;
    // The allocator rounds sizes up by at most an eighth.
    EXPECT_NEAR(adamw.kept - muon.kept, 4 * of_matrices / ranks, of_matrices / ranks) << zero;
  }
}

TEST_F(Zero, MemoryFallsAsTheFormulaSays) {
  const bool cuda = kTestDevice == DeviceType::kCuda;
  const int64_t width = cuda ? 1024 : 128, layers = 6;
  TrainConfig options = Options();
  options.model = absl::StrCat(R"({"family":"llama","tied_embeddings":false,"heads":8,"layers":)",
                               layers, ",\"width\":", width, ",\"ffn\":", 3 * width, "}");
  options.seqlen = 8;
  options.batch = 4;
  options.sp = 1;
  const double layer = static_cast<double>(4 * width * width + 9 * width * width + 2 * width);
  for (const int ranks : {2, 4}) {
    if (cuda && ranks > CudaDeviceCount()) continue;
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    options.dp = ranks;
    if (cuda) options.precision = Precision::kBf16;
    const Memory whole = MemoryOf(options, 0);
    // The CPU's allocator rounds all sizes up, also those of a half and of a quarter. A GPU also
    // has a workspace.
    const Bytes* const bytes = cuda ? kBf16 : kFp32;
    const double n = cuda ? whole.parameters : whole.kept / bytes[0].whole;
    const double besides = whole.kept - n * bytes[0].whole;
    EXPECT_GE(n, 0.999 * whole.parameters);
    EXPECT_LE(n, 1.125 * whole.parameters);
    EXPECT_LE(besides, 64 << 20);
    for (const int zero : {1, 2, 3}) {
      const Memory memory = MemoryOf(options, zero);
      EXPECT_NEAR(memory.kept - besides, n * (bytes[zero].whole + bytes[zero].divided / ranks),
                  0.01 * whole.kept)
          << zero;
      EXPECT_NEAR(memory.told,
                  memory.parameters * (bytes[zero].whole + bytes[zero].divided / ranks),
                  1e-3 * whole.kept)
          << zero;
      // A backward holds the gradients of two layers. One of them is on its way to ranks, which on
      // the CPU hold one piece for each rank. It also holds values of a layer, the next and the
      // last. The rest of a step's memory is at least a rank's share of the measured one, because
      // peaks may coincide or not.
      const double gradients = 4 * 3 * layer, values = (cuda ? 2 : 4) * 3 * layer;
      const double in_flight = zero == 1 ? 0 : zero == 2 ? gradients : gradients + values;
      const double of_step = (cuda ? 1 : ranks) * (whole.peak - whole.kept);
      EXPECT_LE(memory.peak, memory.kept + of_step + 1.125 * in_flight) << zero;
      EXPECT_LT(memory.peak, whole.peak) << zero;
      std::printf("%d ranks, stage %d: %.2f bytes a parameter kept, %.2f at the peak (of %.2f)\n",
                  ranks, zero, memory.kept / memory.parameters, memory.peak / memory.parameters,
                  whole.peak / memory.parameters);
    }
  }
}

}  // namespace
}  // namespace burst
