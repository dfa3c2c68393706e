// Tests ExecutionPlan::exact with ExactAttention on the device. Loss and gradients have the same
// bits on any mesh of ranks, and equal the plain model's up to rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/attention/exact_attention.h"
#include "burst/autograd/tape.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/mesh.h"
#include "burst/tensor/tensor.h"
#include "model/transformer.h"
#include "tests/attention/sequence_problem.h"
#include "tests/model/small_models.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr int64_t kLength = 96, kChunk = 16;

struct Case {
  std::string name;
  ModelConfig model;
  bool packed = false;
  Recompute recompute = Recompute::kNone;
  int64_t ffn_chunk = 0;
  int64_t window = 0;
};

// Changes a model for the device. On a GPU the kernels for tensor cores take multiples of 8
// channels.
ModelConfig OnDevice(ModelConfig config) {
  config.context = kLength;
  if (kTestDevice == DeviceType::kCuda) {
    config.width = 64;
    config.head_dim = 32;
    config.heads = 2;
    config.kv_heads = config.family == Family::kLlama ? 1 : 2;
    config.ffn = 96;
    config.vocab = 64;
  }
  return config;
}

ModelConfig WithSinks(ModelConfig config) {
  config.attention_sinks = true;
  return config;
}

std::vector<Case> Cases() {
  return {{"Llama", SmallLlama(false)},
          {"PackedLlamaTied", SmallLlama(true), true},
          {"Qwen", SmallQwen(), true, Recompute::kSelective},
          {"NormalizedAfter", SmallOlmo(), true, Recompute::kFull},
          {"PartialRotation", SmallPhi(), true, Recompute::kFull},
          {"Gemma", SmallGemma(), false, Recompute::kSelective, 0, /*window=*/9},
          {"Gpt2WithDropout", SmallGpt2(0.2), false, Recompute::kFull},
          {"QwenWithSinks", WithSinks(SmallQwen()), true, Recompute::kSelective},
          {"Gpt2WithSinks", WithSinks(SmallGpt2(0.2)), false, Recompute::kFull},
          {"Gpt2InChunks", SmallGpt2(0), true, Recompute::kNone, 10},
          {"LayersOfTheirOwnWindows", SmallLayered(), true, Recompute::kFull, 0, /*window=*/9}};
}

// Returns four sequences: the first two of RandomText twice, with other positions of documents.
Text LongText(const Case& c, int64_t vocab) {
  Text text = RandomText(vocab, c.packed, kLength);
  text.batch = 4;
  for (auto* all : {&text.tokens, &text.positions, &text.targets}) {
    const std::vector<int32_t> copy = *all;
    all->insert(all->end(), copy.begin(), copy.end());
  }
  if (c.packed)
    text.documents.insert(text.documents.end(), text.documents.begin(), text.documents.end());
  return text;
}

// Returns the rows [first, first + count).
Text Rows(const Text& text, int64_t first, int64_t count) {
  Text part = text;
  part.batch = count;
  const auto cut = [&](std::vector<int32_t>* all) {
    *all = std::vector<int32_t>(all->begin() + first * text.length,
                                all->begin() + (first + count) * text.length);
  };
  cut(&part.tokens);
  cut(&part.positions);
  cut(&part.targets);
  if (!text.documents.empty()) {
    part.documents =
        DocumentStarts(text.documents.begin() + first, text.documents.begin() + first + count);
  }
  return part;
}

struct Results {
  double loss = 0;
  std::vector<double> gradients;
};

DropoutKey Key(int64_t first_row) { return {/*seed=*/5, /*step=*/7, /*enabled=*/true, first_row}; }

// Returns the sums over all ranks.
Results Exact(const Case& c, DType dtype, const Mesh& mesh, Layout layout) {
  const ModelConfig config = OnDevice(c.model);
  const Text text = LongText(c, config.vocab);
  const int64_t tokens = text.batch * text.length;
  Results results;
  const absl::Status status =
      RunTestRanks(mesh.world_size(), [&](Communicator& comm) -> absl::Status {
        BURST_ASSIGN_OR_RETURN(const auto sequence, SplitSequence(mesh, comm));
        ExactAttentionOptions options;
        options.layout = layout;
        options.chunk = kChunk;
        options.grid = ExactGrid::For(0x1p-44, kLength / kChunk);
        BURST_ASSIGN_OR_RETURN(const auto attention,
                               ExactAttention::Create(options, sequence.get()));
        const auto model = MakeModel(config, dtype);
        ExecutionPlan plan;
        plan.exact = {kChunk, tokens};
        plan.recompute = c.recompute;
        plan.ffn_chunk = c.ffn_chunk;
        model->SetExecution(plan);
        const int64_t rows = text.batch / mesh.data, first = mesh.data_rank(comm.rank()) * rows;
        const Text own = Rows(text, first, rows);
        BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules,
                               SchedulesOf(config, *attention, own, c.window));
        const SequenceBatch batch = Cut(own, schedules);
        model->parameters().ZeroGrad();
        Tape tape;
        const Variable loss = model->Loss(tape, *attention, batch, 1.0 / tokens, Key(first));
        BURST_RETURN_IF_ERROR(tape.status());
        const Tensor sum = loss.value().Clone().View({1});
        BURST_RETURN_IF_ERROR(tape.Backward(loss));
        const Tensor gradients =
            model->parameters().exact_sums(0, model->parameters().numel()).Clone();
        BURST_RETURN_IF_ERROR(comm.AllReduceSum(sum));
        BURST_RETURN_IF_ERROR(comm.AllReduceSum(gradients));
        if (comm.rank() != 0) return absl::OkStatus();
        results = {sum.ToVector<double>()[0], gradients.ToVector<double>()};
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return results;
}

Results Plain(const Case& c, DType dtype) {
  const ModelConfig config = OnDevice(c.model);
  const Text text = LongText(c, config.vocab);
  const SingleRank one(text, c.window, config);
  const auto model = MakeModel(config, dtype);
  Tape tape;
  const Variable loss =
      model->Loss(tape, *one.attention, one.batch, 1.0 / (text.batch * text.length), Key(0));
  const double value = loss.value().ToVector<double>()[0];
  EXPECT_EQ(tape.Backward(loss), absl::OkStatus());
  return {value, model->parameters().grads().ToVector<double>()};
}

class ExactModel : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Models, ExactModel, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

// In double, only the grids round. Sums of 24 chunks, twice for tied embeddings, round by 2^-41
// each. dK and dV round by 2^-45, which grows on the way to a weight.
TEST_P(ExactModel, IsThePlainModelToRounding) {
  const Results plain = Plain(GetParam(), DType::kFloat64);
  const Results exact = Exact(GetParam(), DType::kFloat64, {1, 1}, Layout::kZigzag);
  EXPECT_NEAR(exact.loss, plain.loss, 1e-11);
  ASSERT_EQ(exact.gradients.size(), plain.gradients.size());
  double worst = 0, largest = 0;
  for (size_t i = 0; i < plain.gradients.size(); ++i) {
    worst = std::max(worst, std::abs(exact.gradients[i] - plain.gradients[i]));
    largest = std::max(largest, std::abs(plain.gradients[i]));
  }
  RecordProperty("largest_difference", absl::StrCat(worst));
  EXPECT_GT(largest, 1e-3);
  EXPECT_LE(worst, 48 * 0x1p-41 + 1e-10);
}

TEST_P(ExactModel, HasTheSameBitsOnAnyMesh) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Results one = Exact(GetParam(), dtype, {1, 1}, Layout::kZigzag);
    EXPECT_GT(one.loss, 0.5);
    for (const Mesh& mesh :
         {Mesh{1, 2}, Mesh{1, 3}, Mesh{1, 8}, Mesh{2, 1}, Mesh{4, 1}, Mesh{2, 2}}) {
      for (const Layout layout : kLayouts) {
        SCOPED_TRACE(
            absl::StrCat(Name(dtype), ", ", mesh.data, " x ", mesh.sequence, ", ", Name(layout)));
        const Results other = Exact(GetParam(), dtype, mesh, layout);
        EXPECT_EQ(other.loss, one.loss);
        EXPECT_TRUE(other.gradients == one.gradients);
      }
    }
  }
}

}  // namespace
}  // namespace burst
