// Tests ranks that divide a model's state (--zero). They train as ranks that do not, in less
// memory. Results have the same bits if sums have the same order, and otherwise are equal to
// rounding. Checkpoints are equal. The test runs on the CPU and, compiled once more, on GPUs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/comm/mesh.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/memory.h"
#include "model/tensor_parallel.h"
#include "tests/testing/subprocess.h"
#include "tests/testing/test_device.h"
#include "tests/train/trainer_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/checkpoint_set.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/checkpoint/safetensors.h"
#include "train/checkpoint/state_copy.h"
#include "train/report/metrics.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr char kLlama[] =
    R"({"family":"llama","layers":3,"width":32,"heads":4,"kv_heads":2,"ffn":48,"dropout":0.1})";
constexpr char kTiedGpt2[] =
    R"({"family":"gpt2","layers":2,"width":32,"heads":4,"ffn":64,"tied_embeddings":true})";

// The results of a run.
struct Results {
  std::vector<double> losses, norms;
  // The masters of every parameter for each tensor parallel rank, joined from the ranks' pieces.
  std::vector<std::vector<std::vector<float>>> weights;

  bool operator==(const Results& other) const {
    return losses == other.losses && norms == other.norms && weights == other.weights;
  }
};

class Zero : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTestFolder();
    std::ofstream text(folder_ + "/text.txt");
    for (int i = 0; i < 300; ++i) {
      text << "sentence " << i * 7919 % 1000 << " of many\n" << (i % 4 == 3 ? "\n" : "");
    }
  }
  void TearDown() override { fs::remove_all(folder_); }

  TrainConfig Options() const {
    TrainConfig options = SmallTraining(folder_, "run", kTestDevice);
    options.precision = Precision::kFp32;
    options.model = kLlama;
    options.seqlen = 40;
    options.batch = 6;
    options.lr = 4e-3;
    options.steps = 20;
    options.warmup = 2;
    options.threads = 1;
    options.ranks = -1;
    return options;
  }

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

  std::string folder_;
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
  for (const int64_t dp : {1, 2}) {
    TrainConfig options = Options();
    options.dp = dp;
    options.sp = 2 / dp;
    options.clip = 0;
    if (kTestDevice == DeviceType::kCuda && dp == 2) options.precision = Precision::kBf16;
    const Results whole = Train(options, 0);
    for (const int64_t zero : {1, 2, 3}) {
      const Results divided = Train(options, zero);
      EXPECT_EQ(divided.losses, whole.losses) << zero;
      EXPECT_TRUE(divided.weights == whole.weights) << zero;
    }
  }
}

// A state in the host's memory, divided or not, takes the same steps.
TEST_F(Zero, AnOffloadedOptimizerTakesTheSameSteps) {
  const int most = kTestDevice == DeviceType::kCuda ? CudaDeviceCount() : 4;
  for (const int dp : {1, 2, 4}) {
    if (dp > most) continue;
    TrainConfig options = Options();
    options.dp = dp;
    options.sp = 1;
    options.batch = 4;
    options.steps = 6;
    if (kTestDevice == DeviceType::kCuda) options.precision = Precision::kBf16;
    for (int64_t zero = 0; zero <= (dp > 1 ? 3 : 0); ++zero) {
      EXPECT_TRUE(Train(options, zero, Offload::kOptimizer) == Train(options, zero))
          << dp << " ranks, stage " << zero;
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
      const auto told = trainer.model().parameters().kept_bytes();
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

// ---- Checkpoints.

// Returns the names and values of a checkpoint's tensors.
std::vector<std::pair<std::string, std::vector<float>>> TensorsOf(const std::string& path) {
  std::vector<std::pair<std::string, std::vector<float>>> tensors;
  const auto file = SafetensorsFile::Open(path);
  EXPECT_EQ(file.status(), absl::OkStatus());
  for (const std::string& name : file->names()) {
    const Tensor tensor = Tensor::Empty(file->Find(name)->shape, DType::kFloat32);
    const NamedTensor named = {name, tensor};
    EXPECT_EQ(file->Read({&named, 1}), absl::OkStatus());
    tensors.emplace_back(name, tensor.ToVector<float>());
  }
  return tensors;
}

// Returns masters and moments, from a file or a set.
std::vector<std::vector<float>> StateOf(const std::string& path) {
  EXPECT_EQ(VerifyCheckpoint(path).status(), absl::OkStatus());
  const CheckpointInfo info = *ReadCheckpointInfo(path);
  const auto model =
      Transformer::Create(info.model, DType::kFloat32, std::nullopt, DeviceType::kCpu);
  EXPECT_EQ(model.status(), absl::OkStatus());
  ParameterList& parameters = (*model)->parameters();
  AdamW optimizer({}, parameters.numel(), DType::kFloat32, {});
  EXPECT_EQ(LoadCheckpoint(path, &parameters, &optimizer), absl::OkStatus());
  return {parameters.masters().ToVector<float>(), optimizer.first_moment().ToVector<float>(),
          optimizer.second_moment().ToVector<float>()};
}

// An offloaded state is written in place, so the next step's update waits. This model takes far
// longer to write than to update.
TEST_F(Zero, AnOffloadedOptimizerIsSavedBeforeTheNextUpdate) {
  TrainConfig options = Options();
  options.model =
      R"({"family":"llama","layers":1,"width":512,"heads":4,"kv_heads":2,"ffn":4096,"dropout":0})";
  options.seqlen = 8;
  options.batch = 2;
  options.steps = 5;
  options.checkpoint_every = 1;
  options.keep = 5;
  if (kTestDevice == DeviceType::kCuda) options.precision = Precision::kBf16;
  const int most = kTestDevice == DeviceType::kCuda ? CudaDeviceCount() : 2;
  for (const int dp : {1, 2}) {
    if (dp > most) continue;
    options.dp = dp;
    options.sp = 1;
    options.zero = dp > 1 ? 2 : 0;
    const auto run = [&](const std::string& out, Offload offload, int64_t steps, bool resume) {
      options.out = folder_ + "/" + out;
      options.steps = steps;
      options.resume = resume;
      options.schedule = LrShape::kConstant;
      EXPECT_EQ(WithTrainers(
                    options, [](Trainer& trainer, int) { return trainer.Train(); },
                    [&](ResolvedConfig* config) { config->offload = offload; }),
                absl::OkStatus());
    };
    const std::string here = absl::StrCat("here", dp), away = absl::StrCat("away", dp);
    run(here, Offload::kNone, 5, false);
    run(away, Offload::kOptimizer, 3, false);
    run(away, Offload::kOptimizer, 5, true);  // the run is resumed
    for (int step = 1; step <= 5; ++step) {
      const std::string name = step == 5 ? "/checkpoint.safetensors"
                                         : absl::StrCat("/checkpoint-", step, ".safetensors");
      EXPECT_TRUE(StateOf(absl::StrCat(folder_, "/", here, name)) ==
                  StateOf(absl::StrCat(folder_, "/", away, name)))
          << "step " << step << ", " << dp << " ranks";
    }
  }
}

// A run that reads a checkpoint, in any stage and on any number of ranks, writes the same one
// again.
TEST_F(Zero, ACheckpointIsTheSameWhoeverWritesIt) {
  for (const char* model : {kLlama, kTiedGpt2}) {
    TrainConfig options = Options();
    options.model = model;
    options.sp = 1;
    options.steps = 3;
    fs::remove_all(options.out);
    ASSERT_EQ(WithTrainers(options, [](Trainer& trainer, int) { return trainer.Train(); }),
              absl::OkStatus());
    const std::string path = CheckpointPath(options.out), again = folder_ + "/again";
    const auto expected = TensorsOf(path);
    const CheckpointInfo info = *ReadCheckpointInfo(path);
    const struct {
      int stage, ranks, parts;
    } cases[] = {{1, 2, 1}, {2, 3, 1}, {3, 4, 1}, {3, 7, 1}, {1, 2, 2}, {2, 3, 2}, {3, 1, 4}};
    for (const auto& c : cases) {
      SCOPED_TRACE(absl::StrCat("stage ", c.stage, ", ", c.ranks, " ranks x ", c.parts));
      const Mesh mesh{c.ranks, c.parts};
      EXPECT_EQ(
          RunRanks(c.ranks * c.parts,
                   [&](Communicator& comm) -> absl::Status {
                     BURST_ASSIGN_OR_RETURN(const auto group, SplitSequence(mesh, comm));
                     const TensorParallel parallel =
                         c.parts > 1 ? TensorParallel(group.get(), false) : TensorParallel();
                     BURST_ASSIGN_OR_RETURN(
                         const auto part,
                         Transformer::Create(info.model, DType::kFloat32, std::nullopt,
                                             DeviceType::kCpu, parallel,
                                             {c.stage, c.ranks, mesh.data_rank(comm.rank())}));
                     AdamW optimizer({}, part->parameters().shard_numel(), DType::kFloat32, {});
                     BURST_RETURN_IF_ERROR(LoadCheckpoint(path, &part->parameters(), &optimizer));
                     EXPECT_EQ(optimizer.updates(), 3);
                     return SaveCheckpoint(again, info, part->parameters(), optimizer, &comm);
                   }),
          absl::OkStatus());
      EXPECT_TRUE(TensorsOf(again) == expected);
      EXPECT_EQ(VerifyCheckpoint(again).status(), absl::OkStatus());
    }
  }
}

// A division is the stage, the ranks that divide the state (or in stage 0 have the same one), and
// the tensor parallel ranks.
struct Division {
  int stage, ranks, parts;
};

// Calls body(model, optimizer, rank of `ranks`, group, world) on ranks that load `path`.
template <typename Body>
absl::Status OnRanksThatLoad(const std::string& path, const ModelConfig& model, const Division& d,
                             const Body& body) {
  const Mesh mesh{d.ranks, d.parts};
  return RunRanks(d.ranks * d.parts, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto group, SplitSequence(mesh, comm));
    const TensorParallel parallel =
        d.parts > 1 ? TensorParallel(group.get(), false) : TensorParallel();
    const int number = mesh.data_rank(comm.rank());
    const StateSharding sharding =
        d.stage == 0 ? StateSharding() : StateSharding{d.stage, d.ranks, number};
    BURST_ASSIGN_OR_RETURN(
        const auto part, Transformer::Create(model, DType::kFloat32, std::nullopt, DeviceType::kCpu,
                                             parallel, sharding));
    AdamW optimizer({}, part->parameters().shard_numel(), DType::kFloat32, {});
    BURST_RETURN_IF_ERROR(LoadCheckpoint(path, &part->parameters(), &optimizer));
    return body(part->parameters(), optimizer, number, comm);
  });
}

// Every rank writes its part of a set, and any other ranks read the parts that they need.
TEST_F(Zero, ASetIsTheSameWhoeverWritesAndReadsIt) {
  const std::string one =
      R"({"family":"llama","layers":1,"width":32,"heads":4,"kv_heads":1,"ffn":48})";
  for (const std::string& model : {std::string(kTiedGpt2), one}) {
    TrainConfig options = Options();
    options.model = model;
    options.sp = 1;
    options.steps = 2;
    fs::remove_all(options.out);
    ASSERT_EQ(WithTrainers(options, [](Trainer& trainer, int) { return trainer.Train(); }),
              absl::OkStatus());
    const std::string path = CheckpointPath(options.out), again = folder_ + "/again",
                      index = folder_ + "/index";
    const auto expected = TensorsOf(path);
    const CheckpointInfo info = *ReadCheckpointInfo(path);
    const Division divisions[] = {{0, 1, 1}, {0, 3, 1}, {0, 1, 2}, {0, 2, 4}, {1, 2, 1},
                                  {2, 3, 2}, {3, 8, 1}, {3, 2, 2}, {3, 2, 4}};
    for (const Division& writer : divisions) {
      SCOPED_TRACE(absl::StrCat("written in stage ", writer.stage, " by ", writer.ranks, " x ",
                                writer.parts));
      const int files = writer.ranks * writer.parts;
      const std::string set = folder_ + "/" + SetName(2, 1);
      fs::remove_all(set);
      fs::create_directory(set);
      std::atomic<int64_t> most{0}, all{0};
      ASSERT_EQ(OnRanksThatLoad(path, info.model, writer,
                                [&](const ParameterList& parameters, const AdamW& optimizer,
                                    int number, Communicator& comm) {
                                  StateCopy copy(
                                      parameters,
                                      ShareOfState(parameters, number, writer.ranks,
                                                   comm.rank() % writer.parts, writer.parts));
                                  copy.Take(optimizer);
                                  int64_t own = 0;
                                  for (const StateRange& range : copy.ranges()) own += range.length;
                                  all += own;
                                  for (int64_t before = most; before < own;) {
                                    most.compare_exchange_weak(before, own);
                                  }
                                  return WriteSetFile(SetFilePath(set, comm.rank(), files), copy);
                                }),
                absl::OkStatus());
      // No rank writes much more than the others.
      EXPECT_LE(most, 1.5 * static_cast<double>(all) / files);
      ASSERT_EQ(WriteCheckpointIndex(index, info, SetName(2, 1), files), absl::OkStatus());
      EXPECT_EQ(VerifyCheckpoint(index).status(), absl::OkStatus());
      for (const Division& reader : divisions) {
        SCOPED_TRACE(absl::StrCat("read in stage ", reader.stage, " by ", reader.ranks, " x ",
                                  reader.parts));
        fs::remove(again);
        EXPECT_EQ(OnRanksThatLoad(index, info.model, reader,
                                  [&](const ParameterList& parameters, const AdamW& optimizer, int,
                                      Communicator& comm) -> absl::Status {
                                    EXPECT_EQ(optimizer.updates(), 2);
                                    if (reader.stage > 0 || reader.ranks == 1) {
                                      return SaveCheckpoint(again, info, parameters, optimizer,
                                                            &comm);
                                    }
                                    if (comm.rank() > 0 || reader.parts > 1)
                                      return absl::OkStatus();
                                    return SaveCheckpoint(again, info, parameters, optimizer);
                                  }),
                  absl::OkStatus());
        if (reader.stage == 0 && reader.ranks > 1 && reader.parts > 1) continue;
        EXPECT_TRUE(TensorsOf(again) == expected);
      }
    }
  }
}

// The run has three parts, each in another stage on other ranks.
TEST_F(Zero, ResumesInAnyStageOnAnyRanks) {
  TrainConfig options = Options();
  options.schedule = LrShape::kConstant;
  options.eval_every = 6;
  options.eval_batches = 0;
  options.seqlen = 47;  // 13 sequences of validation, so the last batch has one for several groups
  const int max_ranks = kTestDevice == DeviceType::kCuda ? CudaDeviceCount() : 4;
  const auto losses = [&](const std::string& out) {
    const auto log = MetricsLog::Open(out + "/metrics.jsonl", 100);
    std::vector<double> all;
    for (const StepMetrics& row : log->rows()) {
      all.push_back(row.loss);
      // A part of a run evaluates after its last step, too.
      const bool evaluates = row.step % options.eval_every == 0;
      EXPECT_TRUE(row.val_loss.has_value() || !evaluates);
      if (evaluates) all.push_back(row.val_loss.value_or(0));
    }
    return all;
  };
  const auto train = [](Trainer& trainer, int) { return trainer.Train(); };
  options.steps = 24;
  options.sp = 1;
  ASSERT_EQ(WithTrainers(options, train), absl::OkStatus());
  const std::vector<double> straight = losses(options.out);
  const struct {
    int64_t zero, dp, sp;
  } parts[] = {{3, 3, 1}, {0, 1, 1}, {1, 1, 2}, {2, 2, 2}, {3, 1, 2}};
  options.out += "_parts";
  options.steps = 0;
  for (const auto& part : parts) {
    if (part.dp * part.sp > max_ranks) continue;
    options.zero = part.zero;
    options.dp = part.dp;
    options.sp = part.sp;
    options.resume = options.steps > 0;
    options.steps += 4;
    EXPECT_EQ(WithTrainers(options, train), absl::OkStatus()) << part.zero;
  }
  options.steps = 24;
  options.resume = true;
  EXPECT_EQ(WithTrainers(options, train), absl::OkStatus());
  const std::vector<double> resumed = losses(options.out);
  ASSERT_EQ(resumed.size(), straight.size());
  for (size_t i = 0; i < resumed.size(); ++i) {
    EXPECT_NEAR(resumed[i], straight[i], 1e-5 * straight[i]) << i;
  }
}

}  // namespace
}  // namespace burst
