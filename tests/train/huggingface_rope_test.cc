// Tests the RoPE of Phi-3 and Phi-4-mini, which turns a part of a head's channels, by angles that
// depend on the length of the text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/base/status.h"
#include "model/transformer.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/test_device.h"
#include "tests/train/huggingface_fixture.h"
#include "train/generate/generate.h"
#include "train/huggingface/config.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

// Phi-4-mini, with other factors.
Json Phi4Mini() {
  Json json = Json::parse(R"({
      "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
      "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
      "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false,
      "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3",
      "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
      "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
      "rms_norm_eps": 1e-05, "rope_scaling": {"type": "longrope"}, "rope_theta": 10000.0,
      "sliding_window": 262144, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
      "vocab_size": 200064})");
  for (const char* key : {"short_factor", "long_factor"}) {
    json["rope_scaling"][key] = std::vector<double>(48, key[0] == 's' ? 1 : 3.5);
  }
  return json;
}

absl::StatusOr<HuggingFaceConfig> Parse(const Json& json) {
  return ParseHuggingFaceConfig(json.dump());
}

TEST(HuggingFaceRope, PartialRotationAndLongRope) {
  const auto config = Parse(Phi4Mini());
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelConfig& m = config->model;
  EXPECT_EQ(m.rope_channels, 96);
  EXPECT_EQ(m.rope_scaling.kind, RopeScaling::Kind::kLongRope);
  EXPECT_EQ(m.rope_scaling.first_context, 4096);
  EXPECT_EQ(m.rope_scaling.factor, 32);
  EXPECT_EQ(m.rope_scaling.short_factors, std::vector<double>(48, 1));
  EXPECT_EQ(m.rope_scaling.long_factors, std::vector<double>(48, 3.5));
  EXPECT_NEAR(m.AnglesOf(true, true).amplitude, std::sqrt(1 + 5.0 / 12), 1e-15);
  ExpectWritten(*config);
  // The form of Phi-3's files is what versions before 5 of transformers read.
  Json written = Json::parse(*MakeHuggingFaceConfig(*config));
  EXPECT_EQ(written["rope_scaling"], Phi4Mini()["rope_scaling"]);
  EXPECT_EQ(written["original_max_position_embeddings"], 4096);
  EXPECT_EQ(written["partial_rotary_factor"], 0.75);
  // Factors of their own, and names of earlier and later files.
  Json other = Phi4Mini();
  other["rope_scaling"].update(Json{{"type", "su"}, {"attention_factor", 1.5}, {"factor", 2}});
  other.erase("original_max_position_embeddings");
  const auto su = Parse(other);
  ASSERT_TRUE(su.ok()) << su.status();
  EXPECT_EQ(su->model.rope_scaling.amplitude, 1.5);
  EXPECT_EQ(su->model.rope_scaling.factor, 2);
  EXPECT_EQ(su->model.rope_scaling.first_context, 4096) << "the family's";
  ExpectWritten(*su);
  Json newer = Phi4Mini();
  newer["rope_parameters"] = newer["rope_scaling"];
  newer["rope_parameters"].update(
      Json{{"partial_rotary_factor", 0.75}, {"original_max_position_embeddings", 4096}});
  newer.erase("rope_scaling");
  newer.erase("partial_rotary_factor");
  const auto read = Parse(newer);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(ModelDifference(read->model, m), "");
}

// transformers computes int(head_dim * partial_rotary_factor), which must not lose a channel.
TEST(HuggingFaceRope, EveryNumberOfRotatedChannelsIsWritten) {
  HuggingFaceConfig config = *Parse(Phi4Mini());
  config.model.rope_scaling = {};
  for (int64_t head_dim = 2; head_dim <= 130; head_dim += 2) {
    config.model.head_dim = head_dim;
    for (int64_t channels = 2; channels < head_dim; channels += 2) {
      config.model.rope_channels = channels;
      const Json json = Json::parse(*MakeHuggingFaceConfig(config));
      const double factor = json["partial_rotary_factor"];
      ASSERT_EQ(std::floor(static_cast<double>(head_dim) * factor), channels) << head_dim;
      ASSERT_LE(factor, 1);
    }
  }
}

TEST(HuggingFaceRope, ErrorsNameTheField) {
  const struct {
    const char* key;
    Json value;
    const char *names, *says;
  } cases[] = {
      {"rope_scaling",
       {{"type", "longrope"}, {"short_factor", 3}},
       "rope_scaling.short_factor is 3",
       "a list of numbers"},
      {"rope_scaling",
       {{"type", "longrope"}, {"long_factor", {1, "a"}}},
       "rope_scaling.long_factor is [1,\"a\"]",
       "a list of numbers"},
      {"rope_scaling",
       {{"type", "longrope"}},
       "short_factors: must be 48 numbers",
       "got 0 numbers"},
      {"rope_scaling",
       {{"type", "linear"}, {"factor", 2}},
       "rope_scaling.rope_type is \"linear\"",
       "one of default, longrope"},
      {"partial_rotary_factor", 0.5, "short_factors: must be 32 numbers", "got 48 numbers"},
      {"partial_rotary_factor", 0.76, "rope_channels: must be even", "; got 97"},
      {"partial_rotary_factor", 1.5, "partial_rotary_factor is 1.5", "above 0 and at most 1"},
      {"partial_rotary_factor", 0.001, "partial_rotary_factor is 0.001", "turns channels"},
      {"original_max_position_embeddings", 1, "first_context: must be", "from 2"},
      {"lm_head_bias", true, "lm_head_bias is true", "false"},
  };
  for (const auto& c : cases) {
    Json json = Phi4Mini();
    json[c.key] = c.value;
    const absl::Status status = Parse(json).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.names;
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.json: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.names));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
  }
}

// Texts grow past the length up to which LongRoPE takes them as short.
TEST_F(HuggingFaceTest, TextsThatBecomeLongAreThoseOfTransformers) {
  constexpr int64_t kPrompt = 5;
  for (const char* name : {"phi3_long", "phi3_short", "phi4"}) {
    Fake(name).Write(Path(name));
    const auto found = FindPretrained(Path(name));
    ASSERT_TRUE(found.ok()) << found.status();
    const auto model =
        *Transformer::Create(found->model, DType::kFloat64, std::nullopt, kTestDevice);
    ASSERT_EQ(LoadPretrained(*found, &model->parameters()), absl::OkStatus());
    const auto expected = fixtures_["models"][name]["generated"].get<std::vector<int32_t>>();
    const std::vector<int32_t> prompt(expected.begin(), expected.begin() + kPrompt);
    GenerationOptions options;
    options.sampling.temperature = 0;
    options.tokens = static_cast<int64_t>(expected.size()) - kPrompt;
    options.context = model->config().context;
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(testing::Message() << name << " on " << ranks << " ranks");
      std::vector<int32_t> text = prompt;  // a token is a byte
      const auto emit = [&](absl::string_view more) {
        text.insert(text.end(), more.begin(), more.end());
        return true;
      };
      const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
        BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create({}, &comm));
        const GenerationRanks all = {&comm, attention.get(), Mask::Causal()};
        return Generate(*model, Tokenizer::Byte(false), prompt, options, emit,
                        ranks == 1 ? std::nullopt : std::optional<GenerationRanks>(all));
      });
      ASSERT_EQ(status, absl::OkStatus());
      EXPECT_EQ(text, expected);
    }
  }
}

}  // namespace
}  // namespace burst
