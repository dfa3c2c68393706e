// Tests the list of a model's parameters: their number, their initial values, and what is refused.
#include "model/parameters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/base/parallel.h"
#include "model/config.h"
#include "model/transformer.h"
#include "tests/model/small_models.h"

namespace burst {
namespace {

using Values = std::vector<double>;

TEST(Parameters, CountsOfPublishedModels) {
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("d12")), 124439808);
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("d24")), 354823168);
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("d36")), 774030080);
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("d48")), 1557611200);
  // A layer has query and out of width^2, key and value of width * 8 heads * 128, three matrices of
  // width * ffn, and two normalizations. The model also has the final normalization, embedding and
  // head.
  const int64_t layer = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 8192 + 2 * 2048;
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("llama_1b")),
            16 * layer + 2048 + 2 * 32000 * 2048);
}

TEST(Parameters, FlopsPerToken) {
  ModelConfig config = *ModelPreset("nanogpt_cpu");
  config.vocab = 65;
  config.context = 64;
  const auto model = *Transformer::Create(config, DType::kFloat32, 1);
  const double gemm_parameters = 4 * (4 * 128 * 128 + 2 * 128 * 512) + 65 * 128;
  EXPECT_EQ(model->TrainingFlopsPerToken(64).full, 6 * gemm_parameters + 12.0 * 4 * 128 * 64);
  EXPECT_EQ(model->TrainingFlopsPerToken(64).causal, 6 * gemm_parameters + 6.0 * 4 * 128 * 64);
}

TEST(Parameters, InitialValues) {
  ModelConfig config = *ModelPreset("nanogpt_cpu");
  config.vocab = 65;
  config.context = 64;
  const auto model = *Transformer::Create(config, DType::kFloat32, 1);
  for (const Parameter& p : model->parameters().all()) {
    const Values values = p.variable.value().ToVector<double>();
    const double n = values.size();
    double mean = 0, square = 0;
    for (double v : values) mean += v / n;
    for (double v : values) square += (v - mean) * (v - mean) / n;
    const bool is_norm = p.name.find("norm") != std::string::npos;
    const bool is_bias = p.name.find(".bias") != std::string::npos;
    EXPECT_EQ(p.decay, !is_norm && !is_bias) << p.name;
    if (is_norm || is_bias) {
      EXPECT_EQ(mean, is_bias ? 0 : 1) << p.name;
      EXPECT_EQ(square, 0) << p.name;
      continue;
    }
    const bool residual = p.name.find("attention.out") != std::string::npos ||
                          p.name.find("ffn.down") != std::string::npos;
    const bool embedding = p.name.find("embedding") != std::string::npos;
    const double matrix = std::sqrt(2.0 / (5 * 128));
    const double std = embedding ? 0.02 : residual ? matrix / std::sqrt(8) : matrix;
    // The bound is five standard deviations of the estimates from n normals.
    EXPECT_NEAR(mean, 0, 5 * std / std::sqrt(n)) << p.name;
    EXPECT_NEAR(std::sqrt(square), std, 5 * std / std::sqrt(2 * n)) << p.name;
  }
}

TEST(Parameters, InitialValuesDependOnTheSeedAlone) {
  const auto values = [](DType dtype, uint64_t seed, int threads) {
    ScopedThreadPool pool(threads);
    return (*Transformer::Create(SmallLlama(false), dtype, seed))
        ->parameters()
        .values()
        .To(DType::kFloat32)
        .ToVector<float>();
  };
  EXPECT_EQ(values(DType::kFloat32, 1, 1), values(DType::kFloat64, 1, 2));
  EXPECT_NE(values(DType::kFloat32, 1, 1), values(DType::kFloat32, 2, 1));
}

TEST(Parameters, InitialLossIsNearLogVocab) {
  for (const char* preset : {"nanogpt_cpu", "llama_tiny"}) {
    ModelConfig config = *ModelPreset(preset);
    config.vocab = 65;
    config.context = 64;
    const auto model = *Transformer::Create(config, DType::kFloat32, 1);
    SingleRank single(RandomText(config.vocab, false, 64));
    int64_t count = 0;
    for (const int32_t target : single.batch.targets.ToVector<int32_t>()) count += target >= 0;
    Tape tape(false);
    const double loss =
        model->Loss(tape, *single.attention, single.batch, 1.0 / count, DropoutKey())
            .value()
            .ToVector<double>()[0];
    // Logits are normal with std s = 0.02 sqrt(width). So the expected loss is log(vocab) + s^2 /
    // 2, and the mean over `count` tokens deviates by s / sqrt(count).
    const double s = 0.02 * std::sqrt(double(config.width));
    EXPECT_NEAR(loss, std::log(65.0) + s * s / 2, 5 * s / std::sqrt(count)) << preset;
  }
}

// Every element is in one rank's shard, at its own place, for any stage and ranks. A rank starts
// from the same values as all others.
TEST(Parameters, PiecesOfRanksAreAllThereIs) {
  for (const ModelConfig& config : {SmallLlama(false), SmallGpt2()}) {
    const auto whole = *Transformer::Create(config, DType::kFloat32, 1);
    for (int stage = 1; stage <= 3; ++stage) {
      for (const int ranks : {1, 2, 3, 7}) {
        SCOPED_TRACE(testing::Message() << "stage " << stage << ", " << ranks << " ranks");
        std::vector<int64_t> next(whole->parameters().size());
        for (int rank = 0; rank < ranks; ++rank) {
          const auto model = *Transformer::Create(config, DType::kFloat32, 1, DeviceType::kCpu, {},
                                                  {stage, ranks, rank});
          const ParameterList& parameters = model->parameters();
          EXPECT_EQ(parameters.units().size(), stage == 1 ? 1u : config.layers + 2u);
          std::vector<bool> used(parameters.shard_numel());
          for (int i = 0; i < parameters.size(); ++i) {
            const ParameterPiece piece = parameters.PieceOf(i, rank);
            if (piece.length == 0) continue;
            EXPECT_EQ(piece.begin, next[i]) << "the rank before ends there";
            next[i] += piece.length;
            for (int64_t at = piece.at; at < piece.at + piece.length; ++at) {
              EXPECT_FALSE(used[at]);
              used[at] = true;
            }
            EXPECT_EQ(parameters.Masters(i).ToVector<float>(),
                      whole->parameters()
                          .Masters(i)
                          .Slice(0, piece.begin, piece.length)
                          .ToVector<float>());
          }
          if (stage == 3) continue;
          for (int i = 0; i < parameters.size(); ++i) {
            EXPECT_EQ(parameters.variable(i).value().ToVector<float>(),
                      whole->parameters().variable(i).value().ToVector<float>());
          }
        }
        for (int i = 0; i < whole->parameters().size(); ++i) {
          EXPECT_EQ(next[i], whole->parameters()[i].numel()) << i;
        }
      }
    }
  }
}

// A parameter of whole vectors of 16 bytes begins at a vector, after any other parameter. So the 12
// sinks of a GPT-2 layer do not displace others.
TEST(Parameters, VectorsAreNotDisplaced) {
  ModelConfig config = SmallGpt2();
  config.width = 96;
  config.heads = 12;
  config.ffn = 384;
  config.attention_sinks = true;
  for (int stage = 0; stage <= 3; ++stage) {
    const auto model = *Transformer::Create(config, DType::kFloat32, 1, DeviceType::kCpu, {},
                                            {stage, stage == 0 ? 1 : 2, 0});
    int64_t whole = 0;
    for (const Parameter& p : model->parameters().all()) {
      if (p.numel() % 8 != 0) continue;
      EXPECT_EQ(p.offset % 8, 0) << p.name << ", stage " << stage;
      ++whole;
    }
    EXPECT_EQ(whole, model->parameters().size() - config.layers) << "all but the sinks";
  }
}

TEST(Parameters, IncompleteConfigsAreErrors) {
  ModelConfig config = SmallLlama(false);
  config.vocab = 0;
  EXPECT_EQ(Transformer::Create(config, DType::kFloat32, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  config = SmallGpt2();
  config.context = 0;
  EXPECT_EQ(Transformer::Create(config, DType::kFloat32, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  config = SmallGpt2();
  config.heads = 5;
  EXPECT_EQ(Transformer::Create(config, DType::kFloat32, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace burst
