// Ranks that divide a model's state (--zero) write and read the checkpoints of ranks that do not.
// On the CPU and, compiled once more, on GPUs.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/comm/mesh.h"
#include "burst/comm/thread/thread_communicator.h"
#include "model/tensor_parallel.h"
#include "tests/testing/test_device.h"
#include "tests/train/zero_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/checkpoint_set.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/checkpoint/safetensors.h"
#include "train/checkpoint/state_copy.h"
#include "train/optimizer/muon_matrices.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

using ZeroCheckpoints = ZeroRunTest;

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

// A division is the stage, the ranks that divide the state (or in stage 0 have the same one), and
// the tensor parallel ranks.
struct Division {
  int stage, ranks, parts;
};

// Calls body(model, optimizer, rank of `ranks`, world) on ranks that load `path`.
template <typename Body>
absl::Status OnRanksThatLoad(const std::string& path, const ModelConfig& model, OptimizerKind kind,
                             const Division& d, const Body& body) {
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
    ParameterList& parameters = part->parameters();
    std::unique_ptr<Muon> muon;
    if (kind == OptimizerKind::kMuon) {
      Communicator* const ranks = d.stage > 0 ? &comm : d.parts > 1 ? group.get() : nullptr;
      muon = std::make_unique<Muon>(MuonMatrices(parameters, model), /*momentum=*/0.9, ranks);
    }
    AdamW optimizer({}, parameters.shard_numel(), DType::kFloat32, {}, DeviceType::kCpu,
                    /*streamed=*/{}, std::move(muon));
    BURST_RETURN_IF_ERROR(LoadCheckpoint(path, &parameters, &optimizer));
    return body(parameters, optimizer, number, comm);
  });
}

// An offloaded state is written in place, so the next step's update waits. This model takes far
// longer to write than to update. A GiB holds its whole state: it is on the device until a save.
TEST_F(ZeroCheckpoints, AnOffloadedOptimizerIsSavedBeforeTheNextUpdate) {
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
    const auto run = [&](const std::string& out, Offload offload, int64_t resident, int64_t steps,
                         bool resume) {
      options.out = folder_ + "/" + out;
      options.steps = steps;
      options.resume = resume;
      options.schedule = LrShape::kConstant;
      EXPECT_EQ(WithTrainers(
                    options, [](Trainer& trainer, int) { return trainer.Train(); },
                    [&](ResolvedConfig* config) {
                      config->offload = offload;
                      config->offload_resident = resident;
                    }),
                absl::OkStatus());
    };
    const std::string here = absl::StrCat("here", dp);
    run(here, Offload::kNone, 0, 5, false);
    for (const int64_t resident : {0, 1}) {
      const std::string away = absl::StrCat("away", dp, "-", resident);
      run(away, Offload::kOptimizer, resident, 3, false);
      run(away, Offload::kOptimizer, resident, 5, true);  // the run is resumed
      for (int step = 1; step <= 5; ++step) {
        const std::string name = step == 5 ? "/checkpoint.safetensors"
                                           : absl::StrCat("/checkpoint-", step, ".safetensors");
        EXPECT_TRUE(StateOf(absl::StrCat(folder_, "/", here, name)) ==
                    StateOf(absl::StrCat(folder_, "/", away, name)))
            << "step " << step << ", " << dp << " ranks, resident " << resident;
      }
    }
  }
}

// A run that reads a checkpoint, in any stage and on any number of ranks, writes the same one
// again.
TEST_F(ZeroCheckpoints, ACheckpointIsTheSameWhoeverWritesIt) {
  for (const auto& [model, kind] :
       {std::pair(kLlama, OptimizerKind::kAdamW), std::pair(kTiedGpt2, OptimizerKind::kAdamW),
        std::pair(kLlama, OptimizerKind::kMuon)}) {
    TrainConfig options = Options();
    options.model = model;
    options.optimizer = kind;
    options.sp = 1;
    options.steps = 3;
    fs::remove_all(options.out);
    ASSERT_EQ(WithTrainers(options, [](Trainer& trainer, int) { return trainer.Train(); }),
              absl::OkStatus());
    const std::string path = CheckpointPath(options.out), again = folder_ + "/again";
    const auto expected = TensorsOf(path);
    const CheckpointInfo info = *ReadCheckpointInfo(path);
    const Division cases[] = {{1, 2, 1}, {2, 3, 1}, {3, 4, 1}, {3, 7, 1},
                              {1, 2, 2}, {2, 3, 2}, {3, 1, 4}};
    for (const Division& c : cases) {
      SCOPED_TRACE(absl::StrCat("stage ", c.stage, ", ", c.ranks, " ranks x ", c.parts));
      EXPECT_EQ(OnRanksThatLoad(path, info.model, kind, c,
                                [&](const ParameterList& parameters, const AdamW& optimizer, int,
                                    Communicator& comm) {
                                  EXPECT_EQ(optimizer.updates(), 3);
                                  return SaveCheckpoint(again, info, parameters, optimizer, &comm);
                                }),
                absl::OkStatus());
      EXPECT_TRUE(TensorsOf(again) == expected);
      EXPECT_EQ(VerifyCheckpoint(again).status(), absl::OkStatus());
    }
  }
}

// Every rank writes its part of a set, and any other ranks read the parts that they need.
TEST_F(ZeroCheckpoints, ASetIsTheSameWhoeverWritesAndReadsIt) {
  const std::string one =
      R"({"family":"llama","layers":1,"width":32,"heads":4,"kv_heads":1,"ffn":48})";
  for (const auto& [model, kind] :
       {std::pair(std::string(kTiedGpt2), OptimizerKind::kAdamW),
        std::pair(one, OptimizerKind::kAdamW), std::pair(one, OptimizerKind::kMuon)}) {
    TrainConfig options = Options();
    options.model = model;
    options.optimizer = kind;
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
      ASSERT_EQ(OnRanksThatLoad(path, info.model, kind, writer,
                                [&](const ParameterList& parameters, const AdamW& optimizer,
                                    int number, Communicator& comm) {
                                  StateCopy copy(
                                      parameters, optimizer,
                                      ShareOfState(parameters, number, writer.ranks,
                                                   comm.rank() % writer.parts, writer.parts));
                                  copy.Take();
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
        EXPECT_EQ(OnRanksThatLoad(index, info.model, kind, reader,
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

// Matrices that Muon updates have no second moment in a file. Files of older versions have one of
// zeros, which readers skip.
TEST_F(ZeroCheckpoints, AMatrixOfMuonHasOneMoment) {
  TrainConfig options = Options();
  options.optimizer = OptimizerKind::kMuon;
  options.sp = 1;
  options.steps = 3;
  const auto train = [](Trainer& trainer, int) { return trainer.Train(); };
  ASSERT_EQ(WithTrainers(options, train), absl::OkStatus());
  const std::string path = CheckpointPath(options.out), again = folder_ + "/again";
  const CheckpointInfo info = *ReadCheckpointInfo(path);
  const auto model =
      Transformer::Create(info.model, DType::kFloat32, std::nullopt, DeviceType::kCpu);
  ASSERT_EQ(model.status(), absl::OkStatus());
  ParameterList& parameters = (*model)->parameters();
  const auto file = SafetensorsFile::Open(path);
  ASSERT_EQ(file.status(), absl::OkStatus());
  int matrices = 0;
  for (const Parameter& p : parameters.all()) {
    const bool matrix = p.shape.size() == 2 && absl::StartsWith(p.name, "layers.");
    matrices += matrix;
    EXPECT_NE(file->Find("adam.m." + p.name), nullptr);
    EXPECT_EQ(file->Find("adam.v." + p.name) == nullptr, matrix) << p.name;
  }
  EXPECT_EQ(matrices, 3 * 4) << "three layers of a Llama";

  // An optimizer without Muon writes a file of an older version.
  AdamW both({}, parameters.numel(), DType::kFloat32, {});
  ASSERT_EQ(
      OnRanksThatLoad(path, info.model, OptimizerKind::kMuon, {0, 1, 1},
                      [&](const ParameterList& loaded, const AdamW& optimizer, int, Communicator&) {
                        parameters.masters().CopyFrom(loaded.masters());
                        both.first_moment().CopyFrom(optimizer.first_moment());
                        for (const Parameter& p : loaded.all()) {
                          const AdamW::StateTensor second = optimizer.state()[1];
                          if (!second.Has(p)) continue;
                          both.second_moment()
                              .Slice(0, p.offset, p.numel())
                              .CopyFrom(second.Slice(p.offset, p.numel()));
                        }
                        return absl::OkStatus();
                      }),
      absl::OkStatus());
  const std::string older = folder_ + "/older";
  ASSERT_EQ(SaveCheckpoint(older, info, parameters, both), absl::OkStatus());
  EXPECT_EQ(SafetensorsFile::Open(older)->names().size(), file->names().size() + matrices);
  for (const Division& d : {Division{0, 1, 1}, {1, 2, 1}, {2, 3, 2}, {3, 4, 1}}) {
    EXPECT_EQ(OnRanksThatLoad(older, info.model, OptimizerKind::kMuon, d,
                              [&](const ParameterList& loaded, const AdamW& optimizer, int,
                                  Communicator& comm) {
                                return SaveCheckpoint(again, info, loaded, optimizer, &comm);
                              }),
              absl::OkStatus());
    EXPECT_TRUE(TensorsOf(again) == TensorsOf(path)) << d.stage;
  }

  // A run that continues from the older file takes the same steps.
  const auto next = [&](const std::string& from) {
    fs::copy_file(from, path, fs::copy_options::overwrite_existing);
    TrainConfig more = options;
    more.resume = true;
    more.steps = 5;
    std::pair<double, double> loss_and_norm;
    EXPECT_EQ(WithTrainers(more,
                           [&](Trainer& trainer, int) -> absl::Status {
                             BURST_RETURN_IF_ERROR(trainer.Step(3).status());
                             BURST_ASSIGN_OR_RETURN(const StepMetrics row, trainer.Step(4));
                             loss_and_norm = {row.loss, row.grad_norm};
                             return absl::OkStatus();
                           }),
              absl::OkStatus());
    return loss_and_norm;
  };
  EXPECT_EQ(next(older), next(again));
}

// The run has three parts, each in another stage on other ranks.
TEST_F(ZeroCheckpoints, ResumesInAnyStageOnAnyRanks) {
  TrainConfig options = Options();
  options.schedule = LrShape::kConstant;
  options.eval_every = 6;
  options.eval_batches = 0;
  options.seqlen = 47;  // 13 sequences of validation, so the last batch has one for several groups
  const int max_ranks = kTestDevice == DeviceType::kCuda ? CudaDeviceCount() : 4;
  const auto losses = [&] {
    std::vector<double> all;
    for (const StepMetrics& row : Recorded(options)) {
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
  const std::vector<double> straight = losses();
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
  const std::vector<double> resumed = losses();
  ASSERT_EQ(resumed.size(), straight.size());
  for (size_t i = 0; i < resumed.size(); ++i) {
    EXPECT_NEAR(resumed[i], straight[i], 1e-5 * straight[i]) << i;
  }
}

}  // namespace
}  // namespace burst
