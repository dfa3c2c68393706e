#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "model/config.h"

namespace burst {
namespace {

using testing::HasSubstr;

constexpr char kMinimal[] = R"({"family": "gpt2", "layers": 2, "width": 12, "heads": 3)";

std::string With(const std::string& fields) { return std::string(kMinimal) + ", " + fields + "}"; }

TEST(ModelConfig, PresetsAreValidAndSurviveJson) {
  const std::vector<std::string> names = absl::StrSplit(ModelPresetNames(), ", ");
  for (const char* required :
       {"nanogpt_cpu", "nanogpt_gpu", "d12", "d24", "d36", "d48", "llama_tiny", "llama_1b"}) {
    EXPECT_THAT(names, testing::Contains(required));
  }
  for (const std::string& name : names) {
    const auto preset = ModelPreset(name);
    ASSERT_TRUE(preset.ok()) << preset.status();
    EXPECT_TRUE(preset->Validate().ok()) << name;
    const std::string json = ModelConfigToJson(*preset);
    const auto read = ModelConfigFromJson(json);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(ModelConfigToJson(*read), json);
  }
}

TEST(ModelConfig, DeepJsonIsAnError) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_FALSE(ModelConfigFromJson(deep).ok());
  EXPECT_FALSE(ModelConfigFromJson(With("\"layers\": " + deep)).ok());
}

TEST(ModelConfig, ReadsEveryField) {
  const auto config = ModelConfigFromJson(
      R"({"family": "llama", "layers": 1, "width": 24, "heads": 6, "kv_heads": 3, "ffn": 40,
          "vocab": 100, "context": 7, "tied_embeddings": true, "dropout": 0.25,
          "attention_dropout": 0.125, "attention_softcap": 50, "attention_sinks": true,
          "logits_softcap": 30, "full_layers": [0], "window_rope_theta": 300,
          "rope_theta": 500000, "norm_eps": 1e-6, "init_std": 0.03, "head_dim": 10,
          "qkv_bias": true, "attention_out_bias": true, "ffn_bias": true, "qk_norm": true,
          "norm_position": "both", "unit_offset_norms": true, "gate": "gelu",
          "scaled_embedding": true, "score_channels": 12,
          "rope_scaling": {"kind": "llama3", "factor": 8, "first_context": 8192, "low": 2}})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kLlama);
  EXPECT_EQ(config->layers, 1);
  EXPECT_EQ(config->width, 24);
  EXPECT_EQ(config->heads, 6);
  EXPECT_EQ(config->kv_heads, 3);
  EXPECT_EQ(config->ffn, 40);
  EXPECT_EQ(config->vocab, 100);
  EXPECT_EQ(config->context, 7);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_EQ(config->dropout, 0.25);
  EXPECT_EQ(config->attention_dropout, 0.125);
  EXPECT_EQ(config->attention_softcap, 50);
  EXPECT_EQ(config->logits_softcap, 30);
  EXPECT_TRUE(config->attention_sinks);
  EXPECT_EQ(config->full_layers, std::vector<int64_t>({0}));
  EXPECT_EQ(config->window_rope_theta, 300);
  EXPECT_EQ(config->rope_theta, 500000);
  EXPECT_EQ(config->norm_eps, 1e-6);
  EXPECT_EQ(config->init_std, 0.03);
  EXPECT_EQ(config->head_dim, 10);
  EXPECT_TRUE(config->qkv_bias);
  EXPECT_TRUE(config->attention_out_bias);
  EXPECT_TRUE(config->ffn_bias);
  EXPECT_EQ(config->qk_norm, QkNorm::kHead) << "the value of earlier versions";
  EXPECT_EQ(config->norm_position, NormPosition::kBoth);
  EXPECT_TRUE(config->unit_offset_norms);
  EXPECT_EQ(config->gate, Gate::kGelu);
  EXPECT_TRUE(config->scaled_embedding);
  EXPECT_EQ(config->score_channels, 12);
  EXPECT_EQ(config->rope_scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(config->rope_scaling.factor, 8);
  EXPECT_EQ(config->rope_scaling.first_context, 8192);
  EXPECT_EQ(config->rope_scaling.low, 2);
  EXPECT_EQ(config->rope_scaling.high, 4);
  const auto again = ModelConfigFromJson(ModelConfigToJson(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(ModelDifference(*again, *config), "");
}

TEST(ModelConfig, PartialRotationAndLongRope) {
  const auto config = ModelConfigFromJson(
      R"({"layers": 1, "width": 24, "heads": 3, "rope_channels": 4,
          "rope_scaling": {"kind": "longrope", "factor": 4, "first_context": 64,
                           "short_factors": [1, 2], "long_factors": [3, 4.5]}})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->rope_channels, 4);
  EXPECT_EQ(config->rope_scaling.short_factors, std::vector<double>({1, 2}));
  EXPECT_EQ(config->rope_scaling.long_factors, std::vector<double>({3, 4.5}));
  EXPECT_FALSE(config->rope_scaling.IsLong(64));
  EXPECT_TRUE(config->rope_scaling.IsLong(65));
  const auto again = ModelConfigFromJson(ModelConfigToJson(*config));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(ModelDifference(*again, *config), "");
  ModelConfig whole;
  whole.width = 24, whole.heads = 3, whole.rope_channels = 8;
  EXPECT_EQ(whole.WithDefaults().rope_channels, 0) << "all channels have one name";
}

// The numbers are from transformers 5.24: the functions of ROPE_INIT_FUNCTIONS for a head_dim of
// 16, partial_rotary_factor of 0.75 and rope_theta of 100, in float32.
TEST(ModelConfig, ScaledAnglesOfPartialRotationAreThoseOfTransformers) {
  using Kind = RopeScaling::Kind;
  ModelConfig config;
  config.head_dim = 16;
  config.rope_channels = 12;
  config.rope_theta = 100;
  config.rope_scaling.first_context = 64;
  config.rope_scaling.short_factors = {1, 1.1, 1.2, 1.3, 1.4, 1.5};
  config.rope_scaling.long_factors = {1, 2, 3, 4, 5, 6};
  const struct {
    Kind kind;
    double factor;
    bool is_long;
    std::vector<double> frequencies;
    double amplitude;
  } cases[] = {
      {Kind::kLinear,
       8,
       false,
       {0.125, 0.058019862, 0.026930431, 0.0125, 0.0058019855, 0.0026930436},
       1},
      {Kind::kLlama3,
       8,
       false,
       {1.0, 0.46415889, 0.10198934, 0.013042256, 0.0058019855, 0.0026930436},
       1},
      {Kind::kYarn,
       8,
       false,
       {1.0, 0.36262414, 0.12118694, 0.034375001, 0.0058019855, 0.0026930436},
       1.2079441541679836},
      {Kind::kLongRope,
       4,
       false,
       {1.0, 0.42196259, 0.17953621, 0.07692308, 0.033154204, 0.0143629},
       1.1547005383792517},
      {Kind::kLongRope,
       4,
       true,
       {1.0, 0.23207945, 0.071814485, 0.025, 0.0092831766, 0.0035907249},
       1.1547005383792517},
  };
  for (const auto& c : cases) {
    config.rope_scaling.kind = c.kind;
    config.rope_scaling.factor = c.factor;
    const RopeAngles angles = config.AnglesOf(/*full=*/true, c.is_long);
    EXPECT_NEAR(angles.amplitude, c.amplitude, 1e-15) << Name(c.kind);
    ASSERT_EQ(angles.frequencies.size(), c.frequencies.size());
    for (size_t i = 0; i < c.frequencies.size(); ++i) {
      // Some roundings of float32, more where llama3 and yarn subtract.
      EXPECT_NEAR(angles.frequencies[i], c.frequencies[i], 1e-6 * c.frequencies[i])
          << Name(c.kind) << " " << i;
    }
  }
}

TEST(ModelConfig, Defaults) {
  const auto gpt2 = ModelConfigFromJson(std::string(kMinimal) + "}");
  ASSERT_TRUE(gpt2.ok()) << gpt2.status();
  EXPECT_EQ(gpt2->WithDefaults().kv_heads, 3);
  EXPECT_EQ(gpt2->WithDefaults().ffn, 48);
  EXPECT_EQ(gpt2->WithDefaults().head_dim, 4);
  const auto llama = ModelConfigFromJson(R"({"layers": 1, "width": 4096, "heads": 32})");
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_EQ(llama->WithDefaults().ffn, 10944);  // 10922.67 up to a multiple of 64
}

// Every error names the key, and the value or what would be valid.
TEST(ModelConfig, ErrorsNameKeyAndValue) {
  struct Case {
    std::string json;
    std::string key, says, got = "";
  };
  for (const Case& c : std::vector<Case>{
           {With(R"("kv_heads": 2)"), "kv_heads: must be", "divisor of heads 3", "; got 2"},
           {With(R"("kv_heads": -1)"), "kv_heads: must be", "from 0", "; got -1"},
           {With(R"("dropout": 1)"), "dropout: must be", "[0, 1)", "; got 1"},
           {With(R"("dropout": -0.1)"), "dropout: must be", "[0, 1)", "; got -0.1"},
           {With(R"("attention_dropout": 1)"), "attention_dropout: must be", "[0, 1)", "; got 1"},
           {With(R"("attention_softcap": -3)"), "attention_softcap: must be", "above 0",
            "; got -3"},
           {With(R"("attention_sinks": 1)"), "attention_sinks: must be", "true or false",
            "; got 1"},
           {With(R"("dropout": "much")"), "dropout: must be", "a number", "; got \"much\""},
           {With(R"("vocab": 1.5)"), "vocab: must be", "integer", "; got 1.5"},
           {With(R"("vocab": 18446744073709551615)"), "vocab: must be", "integer",
            "; got 18446744073709551615"},
           {With(R"("tied_embeddings": 1)"), "tied_embeddings: must be", "true or false",
            "; got 1"},
           {With(R"("norm_eps": 0)"), "norm_eps: must be", "(0, 1)", "; got 0"},
           {With(R"("init_std": 1)"), "init_std: must be", "[0, 1)", "; got 1"},
           {With(R"("rope_theta": 0.5)"), "rope_theta: must be", "at least 1", "; got 0.5"},
           {With(R"("full_layers": 1)"), "full_layers: must be", "a list", "; got 1"},
           {With(R"("full_layers": [1, 0])"), "full_layers: must be", "increasing", "; got [1,0]"},
           {With(R"("full_layers": [0, 99])"), "full_layers: must be", "below", "; got [0,99]"},
           {With(R"("full_layers": ["a"])"), "full_layers: must be", "integer", "; got \"a\""},
           {With(R"("window_rope_theta": 0.5)"), "window_rope_theta: must be", "0 for gpt2",
            "; got 0.5"},
           {R"({"layers": 1, "width": 4, "heads": 2, "window_rope_theta": 0.5})",
            "window_rope_theta: must be", "at least 1", "; got 0.5"},
           {With(R"("family": "bert")"), "'family' twice", "JSON object"},
           {R"({"family": "bert"})", "family: must be", "\"llama\" or \"gpt2\"", "; got \"bert\""},
           {With(R"("hidden": 3)"), "\"hidden\"", "kv_heads"},
           {R"({"family": "gpt2", "layers": 2, "width": 12, "heads": 5})", "heads: must be",
            "divisor of width 12", "; got 5"},
           {R"({"layers": 2, "width": 15, "heads": 3})", "width / heads: must be", "even",
            "; got 5"},
           {R"({"layers": 2, "width": 16, "heads": 3, "head_dim": 5})", "head_dim: must be", "even",
            "; got 5"},
           {With(R"("qkv_bias": true)"), "qkv_bias: must be", "gpt2", "; got true"},
           {With(R"("ffn_bias": true)"), "ffn_bias: must be", "gpt2", "; got true"},
           {With(R"("qk_norm": true)"), "qk_norm: must be", "gpt2", "; got head"},
           {With(R"("qk_norm": "some")"), "qk_norm: must be", "\"none\" or \"head\" or \"all\"",
            "; got \"some\""},
           {With(R"("gate": "gelu")"), "gate: must be", "silu for gpt2", "; got gelu"},
           {With(R"("scaled_embedding": true)"), "scaled_embedding: must be", "gpt2", "; got true"},
           {With(R"("unit_offset_norms": true)"), "unit_offset_norms: must be", "gpt2",
            "; got true"},
           {With(R"("score_channels": 8)"), "score_channels: must be", "0 for gpt2", "; got 8"},
           {With(R"("score_channels": -1)"), "score_channels: must be", "from 0", "; got -1"},
           {With(R"("norm_position": "after")"), "norm_position: must be", "before for gpt2",
            "; got after"},
           {With(R"("rope_scaling": 8)"), "rope_scaling: must be", "object", "; got 8"},
           {With(R"("rope_scaling": {"kind": "linear", "factor": 2})"), "rope_scaling", "gpt2"},
           {R"({"layers": 2, "width": 12, "heads": 3, "rope_scaling": {"kind": "dynamic"}})",
            "'dynamic'", "longrope"},
           {R"({"layers": 2, "width": 12, "heads": 3, "rope_channels": 3})", "rope_channels",
            "even and at most head_dim 4", "; got 3"},
           {R"({"layers": 2, "width": 12, "heads": 3, "rope_channels": 6})", "rope_channels",
            "even and at most head_dim 4", "; got 6"},
           {With(R"("rope_channels": 2)"), "rope_channels: must be", "0 for gpt2", "; got 2"},
           {R"({"layers": 2, "width": 12, "heads": 3, "rope_channels": 2, "score_channels": 3})",
            "score_channels", "0 with rope_channels", "; got 3"},
           {R"({"layers": 2, "width": 12, "heads": 3,
                "rope_scaling": {"kind": "longrope", "first_context": 1}})",
            "first_context", "from 2", "; got 1"},
           {R"({"layers": 2, "width": 12, "heads": 3, "rope_channels": 2,
                "rope_scaling": {"kind": "longrope", "first_context": 8, "short_factors": [1, 2]}})",
            "short_factors", "1 numbers, one for each pair", "; got 2 numbers"},
           {R"({"layers": 2, "width": 12, "heads": 3, "rope_channels": 2,
                "rope_scaling": {"kind": "longrope", "first_context": 8, "short_factors": [1],
                                 "long_factors": [0]}})",
            "long_factors", "numbers from 1e-6 to 1e6", "; got 0"},
           {R"({"layers": 2, "width": 12, "heads": 3, "rope_scaling": {"short_factors": 3}})",
            "short_factors", "a list of numbers", "; got 3"},
           {R"({"layers": 2, "width": 12, "heads": 3, "rope_scaling": {"factors": 2}})",
            "\"factors\"", "rope_scaling"},
           {R"({"layers": 2, "width": 12, "heads": 3,
                "rope_scaling": {"kind": "linear", "factor": 0.5}})",
            "factor: must be", "from 1", "; got 0.5"},
           {R"({"layers": 2, "width": 12, "heads": 3,
                "rope_scaling": {"kind": "yarn", "factor": 2}})",
            "first_context: must be", "from 1", "; got 0"},
           {R"({"layers": 0, "width": 12, "heads": 3})", "layers: must be", "from 1", "; got 0"},
           {R"({"width": 12, "heads": 3})", "layers: must be", "from 1", "; got 0"},
           {"[1, 2]", "JSON object", ""},
           {"{\"layers\": 2", "JSON object", ""},
           {"", "JSON object", ""},
       }) {
    const auto config = ModelConfigFromJson(c.json);
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << c.json;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(c.key)) << c.json;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(c.says)) << c.json;
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(c.got)) << c.json;
  }
  const auto preset = ModelPreset("d13");
  EXPECT_THAT(std::string(preset.status().message()), HasSubstr("\"d13\""));
  EXPECT_THAT(std::string(preset.status().message()), HasSubstr("llama_tiny"));
}

TEST(ModelConfig, DifferenceNamesTheFields) {
  const ModelConfig d12 = *ModelPreset("d12"), d24 = *ModelPreset("d24");
  EXPECT_EQ(ModelDifference(d12, d12), "");
  EXPECT_EQ(ModelDifference(d12, d24),
            "layers 12 instead of 24, width 768 instead of 1024, heads 12 instead of 16");
}

}  // namespace
}  // namespace burst
