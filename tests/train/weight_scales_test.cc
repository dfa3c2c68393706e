// Pieces of weights that travel in e4m3 give the bits of passes that round whole weights. All ranks
// share a GPU.
#include "train/optimizer/weight_scales.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/device.h"
#include "model/transformer.h"
#include "tests/model/small_models.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"
#include "train/optimizer/adamw.h"
#include "train/optimizer/muon_matrices.h"
#include "train/optimizer/sharded_state.h"

namespace burst {
namespace {

enum class Optimizer { kAdamW, kStreamed, kMuon };

struct RunOptions {
  ModelConfig config;
  Optimizer optimizer = Optimizer::kAdamW;
  int64_t head_chunk = 0;
  Recompute recompute = Recompute::kNone;
  LinearPrecision precision = LinearPrecision::kFloat8;
};

struct Division {
  int stage = 0, ranks = 1;
};

// What the passes compute.
struct Results {
  std::vector<double> losses;
  std::vector<std::vector<float>> gradients;  // of the weights, in the ranks' sum
};

class Rank {
 public:
  static absl::StatusOr<std::unique_ptr<Rank>> Create(const RunOptions& run,
                                                      const Division& division,
                                                      Communicator* comm) {
    auto rank = std::unique_ptr<Rank>(new Rank(run));
    StateSharding sharding;
    if (division.stage > 0) sharding = {division.stage, division.ranks, comm->rank()};
    sharding.optimizer_on_host = run.optimizer == Optimizer::kStreamed;
    BURST_ASSIGN_OR_RETURN(
        rank->model_, Transformer::Create(run.config, DType::kBFloat16, /*seed=*/3, kTestDevice,
                                          /*parallel=*/{}, sharding));
    ExecutionPlan plan;
    plan.linear_precision = run.precision;
    plan.head_chunk = run.head_chunk;
    plan.recompute = run.recompute;
    rank->model_->SetExecution(plan);
    ParameterList& parameters = rank->model_->parameters();
    if (division.stage > 0) {
      BURST_ASSIGN_OR_RETURN(rank->shards_, ShardedState::Create(parameters, comm, nullptr));
      rank->model_->set_parameter_use(rank->shards_.get());
    }
    std::vector<DecayRange> decay;
    for (int i = 0; i < parameters.size(); ++i) {
      const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
      if (!parameters[i].decay || piece.length == 0) continue;
      decay.push_back({piece.at, piece.at + piece.length});
    }
    std::sort(decay.begin(), decay.end(),
              [](const DecayRange& a, const DecayRange& b) { return a.begin < b.begin; });
    std::unique_ptr<Muon> muon;
    if (run.optimizer == Optimizer::kMuon) {
      muon = std::make_unique<Muon>(MuonMatrices(parameters, rank->model_->config()), 0.9,
                                    division.stage > 0 ? comm : nullptr);
    }
    rank->optimizer_ = std::make_unique<AdamW>(
        AdamWOptions(), parameters.shard_numel(), DType::kFloat32, decay, kTestDevice,
        run.optimizer == Optimizer::kStreamed ? 1024 : 0, std::move(muon));
    return rank;
  }

  // Appends the loss, and the gradients of the weights if this rank has them whole.
  absl::Status ForwardBackward(Results* results) {
    ParameterList& parameters = model_->parameters();
    const bool divides_gradients = parameters.sharding().stage >= 2;
    if (divides_gradients) {
      shards_->BeginStep();
    } else {
      parameters.ZeroGrad();
    }
    Tape tape;
    const Variable loss =
        model_->Loss(tape, *single_.attention, single_.batch, /*terms=*/1.0 / 20, DropoutKey());
    results->losses.push_back(loss.value().ToVector<double>()[0]);
    BURST_RETURN_IF_ERROR(tape.Backward(loss));
    if (divides_gradients) {
      BURST_RETURN_IF_ERROR(shards_->Finish(Tensor::Zeros({1}, DType::kFloat64, kTestDevice)));
    }
    for (const int i : parameters.float8_weights()) {
      const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
      const Tensor own = divides_gradients ? parameters.GradShard().Slice(0, piece.at, piece.length)
                                           : parameters.variable(i).grad().View({-1});
      std::vector<float> whole(parameters[i].numel());
      const std::vector<float> part = own.ToVector<float>();
      std::copy(part.begin(), part.end(), whole.begin() + (divides_gradients ? piece.begin : 0));
      results->gradients.push_back(whole);
    }
    return absl::OkStatus();
  }

  // Makes an update by random gradients, the same for all divisions.
  absl::Status Update(int step, bool finite) {
    ParameterList& parameters = model_->parameters();
    for (int i = 0; i < parameters.size(); ++i) {
      const Tensor full = RandomTensor({parameters[i].numel()}, 100 * step + i).To(DType::kFloat32);
      if (parameters.sharding().stage < 2) {
        parameters.variable(i).grad().View({-1}).CopyFrom(full);
      } else {
        const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
        parameters.GradShard()
            .Slice(0, piece.at, piece.length)
            .CopyFrom(full.Slice(0, piece.begin, piece.length));
      }
    }
    std::vector<AdamW::Part> parts;
    for (int unit = 0; unit < static_cast<int>(parameters.units().size()); ++unit) {
      parts.push_back(
          {parameters.MasterPiece(unit), parameters.ValuePiece(unit), parameters.GradPiece(unit)});
    }
    const Tensor loss_and_norm =
        Tensor::FromVector(std::vector<double>{1, finite ? 3 : NAN}, {2}, kTestDevice);
    BURST_RETURN_IF_ERROR(optimizer_->Step(parts, loss_and_norm, /*clip=*/2, /*lr=*/0.05));
    return shards_ == nullptr ? absl::OkStatus() : shards_->GatherValues();
  }

  // Runs a pass with other values.
  absl::Status PassWithOthers(Results* results) {
    ParameterList& parameters = model_->parameters();
    SynchronizeDevice(kTestDevice);  // masters may be on their way to the host
    const Tensor values = parameters.ExchangeValues(parameters.EmptyValues());
    for (int unit = 0; unit < static_cast<int>(parameters.units().size()); ++unit) {
      const Tensor other = parameters.MasterPiece(unit).To(kTestDevice).Clone();
      other.Scale(5);
      parameters.ValuePiece(unit).ConvertFrom(other);
    }
    if (shards_ != nullptr) BURST_RETURN_IF_ERROR(shards_->GatherValues());
    BURST_RETURN_IF_ERROR(ForwardBackward(results));
    parameters.ExchangeValues(values);
    return absl::OkStatus();
  }

 private:
  explicit Rank(const RunOptions& run)
      : single_(RandomText(run.config.vocab, /*packed=*/false, 16), 0, run.config) {}

  const SingleRank single_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<ShardedState> shards_;
  std::unique_ptr<AdamW> optimizer_;
};

// The first update is skipped, and a later one. Passes come before, between and after updates.
Results Train(const RunOptions& run, const Division& division, Communicator& comm) {
  Results results;
  const absl::Status status = [&]() -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto rank, Rank::Create(run, division, &comm));
    for (const int step : {1, 2, 3, 4, 5}) {
      BURST_RETURN_IF_ERROR(rank->ForwardBackward(&results));
      BURST_RETURN_IF_ERROR(rank->Update(step, /*finite=*/step != 1 && step != 4));
      if (step == 3) BURST_RETURN_IF_ERROR(rank->PassWithOthers(&results));
    }
    return rank->ForwardBackward(&results);
  }();
  EXPECT_EQ(status, absl::OkStatus());
  return results;
}

void ExpectSameBits(const RunOptions& run, const std::vector<Division>& divisions) {
  Results expected;
  ASSERT_EQ(RunRanks(1,
                     [&](Communicator& comm) {
                       expected = Train(run, {0, 1}, comm);
                       return absl::OkStatus();
                     }),
            absl::OkStatus());
  ASSERT_EQ(expected.losses.size(), 7u);
  EXPECT_NE(expected.losses[0], expected.losses[2]);
  for (const Division& d : divisions) {
    SCOPED_TRACE(absl::StrCat("stage ", d.stage, ", ", d.ranks, " ranks"));
    std::vector<Results> of_ranks(d.ranks);
    ASSERT_EQ(RunRanks(d.ranks,
                       [&](Communicator& comm) {
                         of_ranks[comm.rank()] = Train(run, d, comm);
                         return absl::OkStatus();
                       }),
              absl::OkStatus());
    for (const Results& results : of_ranks) {
      EXPECT_EQ(results.losses, expected.losses);
    }
    // Every rank of stages 2 and 3 has a part of the sum; that of two equal gradients is exact.
    if (d.ranks > 2) continue;
    const bool sums = d.stage >= 2;
    for (size_t g = 0; g < expected.gradients.size(); ++g) {
      std::vector<float> sum = of_ranks[0].gradients.at(g), all = expected.gradients[g];
      for (int rank = 1; sums && rank < d.ranks; ++rank) {
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += of_ranks[rank].gradients[g][i];
      }
      for (float& x : all) x *= sums ? static_cast<float>(d.ranks) : 1;
      EXPECT_EQ(sum, all) << "weight " << g;
    }
  }
}

ModelConfig Llama() {
  ModelConfig config = SmallLlama(/*tied=*/false);
  config.width = 32;
  config.ffn = 48;
  config.vocab = 32;
  return config;
}

// Normalization of heads of 8 channels, and sinks, whose lengths 16 does not divide, precede some
// weights. All projections have biases.
ModelConfig Qwen() {
  ModelConfig config = SmallQwen();
  config.width = 64;
  config.heads = 8;
  config.kv_heads = 4;
  config.head_dim = 8;
  config.ffn = 80;
  config.vocab = 32;
  config.attention_sinks = true;
  return config;
}

ModelConfig Gpt2() {
  ModelConfig config = SmallGpt2();
  config.width = 48;
  config.ffn = 64;
  config.context = 16;
  config.vocab = 32;
  return config;
}

const std::vector<Division> kDivisions = {{1, 3}, {2, 2}, {3, 1}, {3, 2}, {3, 3}, {3, 5}};

TEST(WeightScalesTest, EveryDivisionHasTheBitsOfWholeWeights) {
  for (const ModelConfig& config : {Llama(), Qwen(), Gpt2()}) {
    SCOPED_TRACE(absl::StrCat(Name(config.family), ", width ", config.width));
    ExpectSameBits({config}, kDivisions);
  }
}

TEST(WeightScalesTest, MuonAndAStateOnTheHostHaveTheSameBits) {
  ExpectSameBits({Llama(), Optimizer::kMuon}, {{1, 2}, {3, 2}, {3, 3}});
  ExpectSameBits({Llama(), Optimizer::kStreamed}, {{2, 2}, {3, 2}});
}

// Rows of one group of heads have a scale of their own.
TEST(WeightScalesTest, HeadsInGroupsAndRecomputedLayersHaveTheSameBits) {
  ExpectSameBits({Llama(), Optimizer::kAdamW, /*head_chunk=*/1}, {{1, 2}, {3, 2}});
  ExpectSameBits({Llama(), Optimizer::kAdamW, 0, Recompute::kFull}, {{3, 2}});
}

// The gathered bytes are half as many.
TEST(WeightScalesTest, WeightsTravelInOneByte) {
  constexpr int kCollective = static_cast<int>(Channel::kCollective);
  std::vector<int64_t> sent;
  for (const LinearPrecision precision : {LinearPrecision::kTensors, LinearPrecision::kFloat8}) {
    const RunOptions run = {Llama(), Optimizer::kAdamW, 0, Recompute::kNone, precision};
    ASSERT_EQ(RunRanks(2,
                       [&](Communicator& comm) -> absl::Status {
                         BURST_ASSIGN_OR_RETURN(const auto rank, Rank::Create(run, {3, 2}, &comm));
                         Results results;
                         comm.ResetStats();
                         BURST_RETURN_IF_ERROR(rank->ForwardBackward(&results));
                         if (comm.rank() == 0) sent.push_back(comm.stats().bytes_sent[kCollective]);
                         return absl::OkStatus();
                       }),
              absl::OkStatus());
  }
  // A layer is gathered once for the forward and once for the backward, the last one once. A rank
  // sends half of it, now in half of the bytes. Pieces are padded to 64 elements.
  const int64_t layer = 32 * (64 + 32 + 2 * 48 + 48);
  EXPECT_NEAR(static_cast<double>(sent[0] - sent[1]), 3.0 * layer / 2, 3 * (2 * 64 + 64));
}

}  // namespace
}  // namespace burst
