// Ranks that divide matrices (ZeRO, tensor parallelism) update them by Muon to the bits of one
// rank. On the CPU and, compiled once more, on a GPU that all ranks share.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/comm/mesh.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/device.h"
#include "model/tensor_parallel.h"
#include "model/transformer.h"
#include "tests/model/small_models.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"
#include "train/optimizer/adamw.h"
#include "train/optimizer/muon_matrices.h"

namespace burst {
namespace {

// A ZeRO stage, the ranks that divide the state (or in stage 0 have the same one), and the tensor
// parallel ranks.
struct Division {
  int stage = 0, ranks = 1, parts = 1;
  StreamedState streamed = {};
};

struct Rank {
  std::unique_ptr<Communicator> tensor;
  std::unique_ptr<Transformer> model;
  std::unique_ptr<AdamW> optimizer;
};

absl::StatusOr<Rank> MakeRank(const ModelConfig& config, DType dtype, const Division& d,
                              Communicator* comm) {
  const Mesh mesh{d.ranks, d.parts};
  Rank rank;
  TensorParallel parallel;
  if (d.parts > 1) {
    BURST_ASSIGN_OR_RETURN(rank.tensor, SplitSequence(mesh, *comm));
    parallel = TensorParallel(rank.tensor.get(), false);
  }
  StateSharding sharding;
  if (d.stage > 0) sharding = {d.stage, d.ranks, mesh.data_rank(comm->rank())};
  sharding.optimizer_on_host = d.streamed.piece > 0;
  BURST_ASSIGN_OR_RETURN(
      rank.model, Transformer::Create(config, dtype, /*seed=*/3, kTestDevice, parallel, sharding));
  const ParameterList& parameters = rank.model->parameters();
  auto muon = std::make_unique<Muon>(MuonMatrices(parameters, rank.model->config()),
                                     /*momentum=*/0.9, d.stage > 0 ? comm : rank.tensor.get());
  rank.optimizer =
      std::make_unique<AdamW>(AdamWOptions(), parameters.shard_numel(), DType::kFloat32,
                              std::vector<DecayRange>(), kTestDevice, d.streamed, std::move(muon));
  return rank;
}

// Returns this rank's elements of a parameter.
Tensor OwnPiece(const ParameterList& parameters, int i, const Tensor& full) {
  const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
  return parameters[i].OwnShard(full).Contiguous().View({-1}).Slice(0, piece.begin, piece.length);
}

// Makes an update by random gradients, the same for all divisions.
absl::Status Update(const Rank& rank, int step) {
  const ParameterList& parameters = rank.model->parameters();
  for (int i = 0; i < parameters.size(); ++i) {
    const int seed = 100 * step + static_cast<int>(parameters[i].number);
    const Tensor full = RandomTensor(parameters[i].full_shape, seed).To(DType::kFloat32);
    if (parameters.sharding().stage < 2) {
      parameters.variable(i).grad().CopyFrom(parameters[i].OwnShard(full));
    } else {
      const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
      parameters.GradShard()
          .Slice(0, piece.at, piece.length)
          .CopyFrom(OwnPiece(parameters, i, full));
    }
  }
  std::vector<AdamW::Part> parts;
  for (int unit = 0; unit < static_cast<int>(parameters.units().size()); ++unit) {
    const bool rounds = parameters.dtype() != DType::kFloat32;
    parts.push_back({parameters.MasterPiece(unit), rounds ? parameters.ValuePiece(unit) : Tensor(),
                     parameters.GradPiece(unit)});
  }
  const Tensor loss_and_norm =
      Tensor::FromVector(std::vector<double>{1, step == 2 ? NAN : 3}, {2}, kTestDevice);
  return rank.optimizer->Step(parts, loss_and_norm, /*clip=*/2, /*lr=*/0.05);
}

// Makes updates on all ranks. Whoever has whole masters writes them; others compare with them.
void ExpectSame(const ModelConfig& config, DType dtype, const Division& d,
                std::vector<Tensor>* masters) {
  const auto body = [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const Rank rank, MakeRank(config, dtype, d, &comm));
    for (const int step : {1, 2, 3}) BURST_RETURN_IF_ERROR(Update(rank, step));
    EXPECT_EQ(rank.optimizer->updates(), 2) << "one had no finite norm";
    rank.optimizer->WriteBack();
    SynchronizeDevice(kTestDevice);  // completes what it writes to the host
    const ParameterList& parameters = rank.model->parameters();
    const bool whole = masters->empty();
    int64_t of_matrices = 0;  // this rank's elements of the layers' matrices
    for (int i = 0; i < parameters.size(); ++i) {
      if (parameters[i].shape.size() == 2 && absl::StartsWith(parameters[i].name, "layers.")) {
        of_matrices += parameters.PieceOf(i, parameters.sharding().rank).length;
      }
      const Tensor own = parameters.Masters(i).To(DeviceType::kCpu).Clone();
      if (whole) {
        masters->push_back(own.View(parameters[i].shape));
        continue;
      }
      EXPECT_EQ(own.ToVector<float>(), OwnPiece(parameters, i, (*masters)[i]).ToVector<float>())
          << parameters[i].name << " of rank " << comm.rank();
    }
    for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
      const int i = static_cast<int>(unit);
      EXPECT_EQ(parameters.ValuePiece(i).ToVector<double>(),
                parameters.MasterPiece(i).To(dtype).ToVector<double>());
    }
    EXPECT_EQ(rank.optimizer->first_moment().device(),
              d.streamed.piece > 0 ? DeviceType::kCpu : kTestDevice);
    EXPECT_EQ(rank.optimizer->first_moment().numel(), parameters.shard_numel());
    EXPECT_EQ(rank.optimizer->second_moment().numel(), parameters.shard_numel() - of_matrices);
    return absl::OkStatus();
  };
  const absl::Status status = RunRanks(d.ranks * d.parts, body);
  EXPECT_EQ(status, absl::OkStatus());
}

TEST(MuonRanks, HaveTheBitsOfOneRank) {
  ModelConfig one_head = SmallLlama(/*tied=*/false);
  one_head.kv_heads = 1;
  ModelConfig gpt2 = SmallGpt2();
  gpt2.heads = 4;
  for (const ModelConfig& config : {one_head, SmallQwen(), gpt2}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      std::vector<Tensor> masters;
      ExpectSame(config, dtype, {}, &masters);
      for (const Division& d : {Division{1, 2, 1},
                                {1, 5, 1},
                                {2, 3, 1},
                                {3, 2, 1},
                                {3, 7, 1},
                                {0, 1, 2},
                                {0, 2, 2},
                                {0, 1, 4},
                                {1, 2, 2},
                                {2, 3, 2},
                                {3, 2, 4},
                                {0, 1, 1, {64}},
                                {0, 1, 1, {1 << 20}},
                                {0, 1, 4, {64}},
                                {1, 5, 1, {64}},
                                {2, 3, 2, {128}},
                                {3, 2, 4, {64}},
                                {0, 1, 1, {64, 1000}},
                                {3, 2, 4, {64, 500}}}) {
        SCOPED_TRACE(absl::StrCat(Name(config.family), ", stage ", d.stage, ", ", d.ranks, " x ",
                                  d.parts, ", streamed ", d.streamed.piece, ", resident ",
                                  d.streamed.resident));
        ExpectSame(config, dtype, d, &masters);
      }
    }
  }
}

// A round takes the work of its largest matrix, which is at most the mean work of the round before.
// All rounds therefore take at most the largest matrix and an equal share of all.
TEST(MuonRanks, ShareTheWork) {
  const ModelConfig config = SmallQwen();
  const auto body = [&](Communicator& comm) -> absl::Status {
    const int ranks = comm.world_size();
    BURST_ASSIGN_OR_RETURN(const Rank rank, MakeRank(config, DType::kFloat32, {1, ranks}, &comm));
    const Muon muon(MuonMatrices(rank.model->parameters(), rank.model->config()), 0, &comm);
    const std::vector<MuonMatrix>& matrices = muon.matrices();
    EXPECT_EQ(matrices.size(), 2u * 7);
    int64_t rounds = 0, all = 0;
    for (size_t i = 0; i < matrices.size(); ++i) {
      if (i % ranks == 0) rounds += matrices[i].work();
      all += matrices[i].work();
    }
    EXPECT_LE(rounds, matrices[0].work() + all / ranks);
    return absl::OkStatus();
  };
  for (const int ranks : {2, 3, 8}) EXPECT_EQ(RunRanks(ranks, body), absl::OkStatus());
}

}  // namespace
}  // namespace burst
