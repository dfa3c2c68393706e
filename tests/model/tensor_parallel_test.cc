// Tests tensor parallelism with ranks as threads. It compares a model whose parameters are spread
// over ranks with the whole one on one rank, in double. It also tests the exchanges between the
// ranks.
#include "model/tensor_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "burst/attention/strategy.h"
#include "burst/base/status.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/device/device.h"
#include "burst/sequence/token_exchange.h"
#include "model/transformer.h"
#include "tests/attention/sequence_problem.h"
#include "tests/model/small_models.h"

namespace burst {
namespace {

using Values = std::vector<double>;

// Whether the ranks divide the tokens, too (tp+sp), or not (tp).
constexpr bool kBoth[] = {false, true};

// The tolerance of transformer_test, for sums of at most a few dozen terms through a dozen
// operations, in double.
constexpr double kDoubleTolerance = 1e-12;

void ExpectNear(const Values& actual, const Values& expected, double tolerance,
                const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double scale = 0;
  for (double value : expected) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance * scale) << what << ", element " << i;
  }
}

// A rank of a spread model, with the parameters of a whole one.
struct Part {
  std::unique_ptr<SequenceParallelAttention> attention;
  std::unique_ptr<Transformer> model;
  SequenceBatch batch;
};

absl::StatusOr<Part> MakePart(bool spread, Layout layout, const Transformer& whole,
                              const Text& text, Communicator* comm) {
  Part part;
  BurstAttentionOptions options;
  options.layout = layout;
  const TensorParallel parallel(comm, spread);
  BURST_ASSIGN_OR_RETURN(part.attention, CreateAttention(Strategy::kSingle, options, 1, nullptr,
                                                         {comm->world_size(), comm->rank()}));
  BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules,
                         SchedulesOf(whole.config(), *part.attention, text));
  part.batch = Cut(text, schedules);
  BURST_ASSIGN_OR_RETURN(part.model, Transformer::Create(whole.config(), whole.dtype(), /*seed=*/3,
                                                         kTestDevice, parallel));
  for (int i = 0; i < whole.parameters().size(); ++i) {
    part.model->parameters()[i].TakeShard(comm->rank(), whole.parameters().variable(i).value(),
                                          part.model->parameters().variable(i).value());
  }
  return part;
}

struct LossAndGradients {
  double loss = 0;
  std::vector<Values> gradients;  // gradient of each whole parameter
};

LossAndGradients OneRank(const Transformer& model, const Text& text) {
  SingleRank single(text);
  DropoutKey dropout;
  dropout.enabled = true;
  Tape tape;
  const Variable loss = model.Loss(tape, *single.attention, single.batch, 0.1, dropout);
  EXPECT_TRUE(tape.Backward(loss).ok()) << tape.status();
  LossAndGradients result{loss.value().ToVector<double>()[0], {}};
  for (const Parameter& p : model.parameters().all()) {
    result.gradients.push_back(p.variable.grad().ToVector<double>());
  }
  return result;
}

// Loss and gradients equal those of one rank. Losses add up, and so do the gradients of parts,
// except for parameters that every rank has whole.
void ExpectRanksAgree(bool spread, const ModelConfig& config, Layout layout, int ranks,
                      int64_t length) {
  SCOPED_TRACE(testing::Message() << (spread ? "tp+sp" : "tp") << " " << Name(config.family) << " "
                                  << Name(layout) << " ranks " << ranks << " length " << length);
  const Text text = RandomText(config.vocab, /*packed=*/length > 5, length);
  const auto whole = MakeModel(config);
  const LossAndGradients expected = OneRank(*whole, text);

  LossAndGradients sum;
  for (const Values& gradient : expected.gradients) sum.gradients.emplace_back(gradient.size());
  std::mutex mutex;
  const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const Part part, MakePart(spread, layout, *whole, text, &comm));
    DropoutKey dropout;
    dropout.enabled = true;
    Tape tape;
    std::vector<int> ready(part.model->parameters().size(), 0);
    const Variable loss =
        part.model->Loss(tape, *part.attention, part.batch, 0.1, dropout, [&](int first, int last) {
          for (int i = first; i < last; ++i) ++ready[i];
        });
    BURST_RETURN_IF_ERROR(tape.Backward(loss));
    EXPECT_EQ(ready, std::vector<int>(ready.size(), 1));
    std::lock_guard<std::mutex> lock(mutex);
    sum.loss += loss.value().ToVector<double>()[0];
    for (int i = 0; i < part.model->parameters().size(); ++i) {
      const Parameter& p = part.model->parameters()[i];
      const Tensor gradient = Tensor::Zeros(p.full_shape, DType::kFloat64);
      p.PutShard(comm.rank(), p.variable.grad(), gradient);
      const Values values = gradient.ToVector<double>();
      if (p.sharding.replicated_gradient) {
        ExpectNear(values, expected.gradients[i], kDoubleTolerance, p.name);
        if (comm.rank() > 0) continue;
      }
      for (size_t j = 0; j < values.size(); ++j) sum.gradients[i][j] += values[j];
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_NEAR(sum.loss, expected.loss, kDoubleTolerance * expected.loss);
  for (size_t i = 0; i < sum.gradients.size(); ++i) {
    ExpectNear(sum.gradients[i], expected.gradients[i], kDoubleTolerance,
               whole->parameters()[i].name);
  }
}

ModelConfig Gpt2OfHeads(int64_t heads, double dropout) {
  ModelConfig config = SmallGpt2(dropout);
  config.heads = heads;
  return config;
}

ModelConfig LlamaOfKeyHeads(int64_t kv_heads, double dropout = 0) {
  ModelConfig config = SmallLlama(/*tied=*/false);
  config.kv_heads = kv_heads;
  config.dropout = dropout;
  return config;
}

ModelConfig WithSinks(ModelConfig config) {
  config.attention_sinks = true;
  return config;
}

ModelConfig WithNorms(NormPosition position) {
  ModelConfig config = SmallQwen();
  config.norm_position = position;
  return config;
}

TEST(TensorParallel, LossAndGradientsAreThoseOfOneRank) {
  for (const bool spread : kBoth) {
    for (const Layout layout : kLayouts) {
      ExpectRanksAgree(spread, SmallLlama(false), layout, 2, 9);
      ExpectRanksAgree(spread, SmallQwen(), layout, 4, 9);  // KV heads on two ranks each
      ExpectRanksAgree(spread, Gpt2OfHeads(4, 0.3), layout, 4, 9);
      ExpectRanksAgree(spread, WithSinks(SmallQwen()), layout, 4, 9);
      ExpectRanksAgree(spread, WithNorms(NormPosition::kAfter), layout, 2, 9);
      ExpectRanksAgree(spread, WithNorms(NormPosition::kBoth), layout, 4, 9);
      ExpectRanksAgree(spread, WithSinks(Gpt2OfHeads(4, 0)), layout, 2, 9);
      ExpectRanksAgree(spread, SmallOlmo(), layout, 2, 9);
      ExpectRanksAgree(spread, SmallOlmo(), layout, 4, 9);  // KV heads on two ranks each
    }
    ExpectRanksAgree(spread, SmallGemma(), Layout::kZigzag, 2, 9);
    ExpectRanksAgree(spread, SmallPhi(), Layout::kZigzag, 4, 9);
    ExpectRanksAgree(spread, SmallLlama(true), Layout::kZigzag, 1, 9);
    ExpectRanksAgree(spread, SmallLlama(true), Layout::kZigzag, 2, 8);  // parts of one length
    ExpectRanksAgree(spread, Gpt2OfHeads(2, 0), Layout::kContiguous, 2, 8);
    ExpectRanksAgree(spread, LlamaOfKeyHeads(4), Layout::kZigzag, 4, 9);
    // Several ranks share a KV head.
    ExpectRanksAgree(spread, LlamaOfKeyHeads(2), Layout::kZigzag, 4, 9);
    ExpectRanksAgree(spread, LlamaOfKeyHeads(1, 0.2), Layout::kStriped, 4, 9);
    // There are fewer tokens than ranks.
    ExpectRanksAgree(spread, LlamaOfKeyHeads(2), Layout::kZigzag, 4, 3);
    ExpectRanksAgree(spread, Gpt2OfHeads(4, 0.3), Layout::kZigzag, 4, 3);
    ExpectRanksAgree(spread, SmallOlmo(), Layout::kZigzag, 4, 3);
  }
}

TEST(TensorParallel, NextTokenLogitsAreThoseOfOneRank) {
  for (const bool spread : kBoth) {
    for (const ModelConfig& config : {SmallLlama(false), Gpt2OfHeads(2, 0), SmallOlmo()}) {
      const Text text = RandomText(config.vocab, /*packed=*/false);
      const auto whole = MakeModel(config);
      SingleRank single(text);
      const Values expected =
          whole->NextTokenLogits(*single.attention, single.batch)->ToVector<double>();
      std::vector<Values> logits(2);
      const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
        BURST_ASSIGN_OR_RETURN(const Part part,
                               MakePart(spread, Layout::kZigzag, *whole, text, &comm));
        BURST_ASSIGN_OR_RETURN(const Tensor result,
                               part.model->NextTokenLogits(*part.attention, part.batch));
        if (!result.null()) logits[comm.rank()] = result.ToVector<double>();
        return absl::OkStatus();
      });
      ASSERT_TRUE(status.ok()) << status;
      ExpectNear(logits[0], expected, kDoubleTolerance, "logits");
      EXPECT_TRUE(logits[1].empty());
    }
  }
}

// A rank starts from its part of the numbers from which one rank starts, and holds only this part.
TEST(TensorParallel, InitialValuesAreThoseOfOneRank) {
  for (const ModelConfig& config : {LlamaOfKeyHeads(2), Gpt2OfHeads(4, 0), SmallOlmo()}) {
    for (const bool spread : kBoth) {
      const auto whole = *Transformer::Create(config, DType::kFloat32, 11, kTestDevice);
      std::vector<Tensor> values;  // on the host, because ranks use other streams
      for (int i = 0; i < whole->parameters().size(); ++i) {
        values.push_back(whole->parameters().variable(i).value().To(DeviceType::kCpu));
      }
      const absl::Status status = RunTestRanks(4, [&](Communicator& comm) -> absl::Status {
        const TensorParallel parallel(&comm, spread);
        BURST_ASSIGN_OR_RETURN(const auto part, Transformer::Create(config, DType::kFloat32, 11,
                                                                    kTestDevice, parallel));
        const ParameterList& parameters = part->parameters();
        for (int i = 0; i < parameters.size(); ++i) {
          const Parameter& p = parameters[i];
          EXPECT_EQ(p.name, whole->parameters()[i].name);
          const Tensor expected = Tensor::Empty(p.shape, DType::kFloat32);
          p.TakeShard(comm.rank(), values[i], expected);
          EXPECT_EQ(p.variable.value().ToVector<float>(), expected.ToVector<float>()) << p.name;
        }
        // The ranges cover the buffer once, and are few.
        const std::vector<ShardRange> ranges = parameters.Ranges(0, parameters.size());
        int64_t end = 0;
        for (const ShardRange& range : ranges) {
          EXPECT_EQ(range.begin, end);
          end = range.end;
        }
        EXPECT_EQ(end, parameters.numel());
        // KV heads are on two ranks each: the weights of their projections and of their norm.
        const int64_t replicated = config.family != Family::kLlama  ? 0
                                   : config.qk_norm == QkNorm::kAll ? 2
                                                                    : 1;
        // Each kind has parameters of whole vectors, and others.
        EXPECT_LE(ranges.size(), 6u + 2 * replicated * config.layers);
        return absl::OkStatus();
      });
      ASSERT_TRUE(status.ok()) << status;
    }
  }
}

// A step sends 2 branches a layer, the ends of the layers, and the positions of RoPE. A norm of all
// heads sends two numbers a token forward and two backward.
void ExpectFormulaBytes(const ModelConfig& config) {
  const int ranks = 4;
  const Text text = RandomText(config.vocab, /*packed=*/false, /*length=*/8);
  const auto whole = MakeModel(config);
  for (const bool spread : kBoth) {
    const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
      BURST_ASSIGN_OR_RETURN(const Part part,
                             MakePart(spread, Layout::kZigzag, *whole, text, &comm));
      const int64_t before = comm.stats().bytes_sent[static_cast<int>(Channel::kCollective)];
      Tape tape;
      const Variable loss = part.model->Loss(tape, *part.attention, part.batch, 1, DropoutKey());
      BURST_RETURN_IF_ERROR(tape.Backward(loss));
      const int64_t sent = comm.stats().bytes_sent[static_cast<int>(Channel::kCollective)] - before;
      const int64_t tokens = text.batch * text.length;
      // Or a reduce-scatter.
      const int64_t gather = (ranks - 1) * tokens / ranks * config.width * 8;
      const int64_t positions = (ranks - 1) * tokens / ranks * 4;
      // An all-reduce is a reduce-scatter and a gather.
      const int64_t branch = spread ? 2 + 3 : 2 * 2;
      const int64_t ends = spread ? 0 : 2;
      const int64_t norm = config.qk_norm == QkNorm::kAll ? 2 * 2 * gather / config.width * 2 : 0;
      EXPECT_EQ(sent,
                (2 * config.layers * branch + ends) * gather + config.layers * norm + positions);
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
  }
}

TEST(TensorParallel, BytesEqualTheFormulas) {
  ExpectFormulaBytes(SmallLlama(false));
  ExpectFormulaBytes(SmallOlmo());
}

#ifdef BURST_TEST_CUDA
// With 8-bit products the ranks gather a norm's result in e4m3, in the forward and in the backward.
TEST(TensorParallel, NormsSendOneByteAChannel) {
  const int ranks = 2;
  ModelConfig config = SmallLlama(/*tied=*/false);
  config.width = 32;
  config.ffn = 96;
  const Text text = RandomText(config.vocab, /*packed=*/false, /*length=*/8);
  const auto whole = *Transformer::Create(config, DType::kBFloat16, /*seed=*/11, kTestDevice);
  SynchronizeDevice(kTestDevice);  // ranks use other streams
  std::vector<int64_t> sent;
  for (const LinearPrecision precision : {LinearPrecision::kTensors, LinearPrecision::kFloat8}) {
    const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
      BURST_ASSIGN_OR_RETURN(const Part part,
                             MakePart(/*spread=*/true, Layout::kZigzag, *whole, text, &comm));
      ExecutionPlan plan;
      plan.linear_precision = precision;
      part.model->SetExecution(plan);
      comm.ResetStats();
      Tape tape;
      const Variable loss = part.model->Loss(tape, *part.attention, part.batch, 1, DropoutKey());
      BURST_RETURN_IF_ERROR(tape.Backward(loss));
      if (comm.rank() == 0) {
        sent.push_back(comm.stats().bytes_sent[static_cast<int>(Channel::kCollective)]);
      }
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
  }
  // A layer has two norms.
  const int64_t channels = (ranks - 1) * text.batch * text.length / ranks * config.width;
  EXPECT_EQ(sent[0] - sent[1], 2 * config.layers * 2 * channels);
}
#endif

TEST(TensorParallel, ModelsThatCannotBeSpreadAreNamed) {
  const auto message = [](ModelConfig config, int ranks) {
    return std::string(TensorParallel::Check("tp", config, ranks).message());
  };
  EXPECT_EQ(message(SmallLlama(false), 4), "");
  EXPECT_NE(
      message(SmallLlama(false), 3).find("tp: must be 1, 2, 4 ranks to share 4 heads (2 KV heads)"),
      std::string::npos);
  ModelConfig config = SmallLlama(false);
  config.ffn = 18;
  EXPECT_NE(message(config, 4).find("tp: must be a divisor of the 18 channels"), std::string::npos);
  const absl::Status status = RunTestRanks(3, [](Communicator& comm) {
    return Transformer::Create(SmallLlama(false), DType::kFloat64, 1, kTestDevice,
                               TensorParallel(&comm, false))
        .status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

// ---- The exchanges.

// Returns whole numbers, so that sums are exact in every order and dtype.
Tensor Numbers(const Shape& shape, int rank, DType dtype) {
  const Tensor tensor = Tensor::Empty(shape, DType::kFloat64);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data<double>()[i] = static_cast<double>((7 * i + 3 * rank) % 16);
  }
  return tensor.To(dtype).To(kTestDevice);
}

absl::Status CheckExchanges(Communicator& comm, DType dtype) {
  const TokenExchange exchange(&comm);
  for (const Layout layout : kLayouts) {
    for (const int64_t batch : {1, 3}) {
      for (const int64_t seqlen : {1, 8, 13, 24}) {
        BURST_ASSIGN_OR_RETURN(
            const TokenShard shard,
            TokenShard::Create(0, 1, layout, seqlen, {comm.world_size(), comm.rank()}));
        const Shape shape = {batch, seqlen, 5};
        const auto own = [&](const Tensor& all) {
          return TakeRows(all.To(DeviceType::kCpu), shard.local_positions()).ToVector<double>();
        };
        const Tensor all = Numbers(shape, 0, dtype);
        EXPECT_EQ(TokenExchange::Own(shard, all).ToVector<double>(), own(all));
        Tensor gathered, scattered;
        BURST_RETURN_IF_ERROR(exchange.Gather(shard, TokenExchange::Own(shard, all), &gathered));
        EXPECT_EQ(gathered.ToVector<double>(), all.ToVector<double>());
        const Tensor sum = Tensor::Zeros(shape, DType::kFloat64, kTestDevice);
        for (int r = 0; r < comm.world_size(); ++r) {
          sum.Add(Numbers(shape, r, DType::kFloat64));
        }
        BURST_RETURN_IF_ERROR(
            exchange.ReduceScatter(shard, Numbers(shape, comm.rank(), dtype), &scattered));
        EXPECT_EQ(scattered.ToVector<double>(), own(sum));
      }
    }
  }
  return absl::OkStatus();
}

std::vector<DType> TestDTypes() { return {DType::kFloat32, DType::kFloat64, DType::kBFloat16}; }

TEST(TokenExchange, MovesAndSumsTokens) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const DType dtype : TestDTypes()) {
      const absl::Status status =
          RunTestRanks(ranks, [&](Communicator& comm) { return CheckExchanges(comm, dtype); });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

#ifdef BURST_TEST_CUDA
TEST(TokenExchange, OverNccl) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "NCCL needs two GPUs";
  const absl::Status status =
      RunCudaRanks(CudaDeviceCount() >= 4 ? 4 : 2, [](Communicator& comm) -> absl::Status {
        for (const DType dtype : TestDTypes()) {
          BURST_RETURN_IF_ERROR(CheckExchanges(comm, dtype));
        }
        return comm.Barrier();
      });
  EXPECT_TRUE(status.ok()) << status;
}
#endif

}  // namespace
}  // namespace burst
