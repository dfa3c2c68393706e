// Tests config.json of Hugging Face directories: the resulting model, the refused fields, and the
// written file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/train/huggingface_fixture.h"
#include "train/huggingface/config.h"

namespace burst {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

// The files of Meta and Mistral, without fields that have no influence.
constexpr char kLlama31[] = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256})";

constexpr char kQwen[] = R"({
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
  "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
  "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
  "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16", "use_mrope": false, "use_sliding_window": false,
  "vocab_size": 151936})";

constexpr char kGpt2[] = R"({
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
  "embd_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
  "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
  "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index",
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
  "vocab_size": 50257})";

// The file of Google's Gemma 3 1B, and what Gemma 2 27B says instead.
constexpr char kGemma3[] = R"({
  "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
  "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
  "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
  "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
  "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
  "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 262144})";

constexpr char kGemma2[] = R"({
  "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "cache_implementation": "hybrid",
  "head_dim": 128, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 4608, "intermediate_size": 36864, "max_position_embeddings": 8192,
  "model_type": "gemma2", "num_attention_heads": 32, "num_hidden_layers": 46,
  "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06,
  "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 256000})";

constexpr char kGemma1[] = R"({
  "architectures": ["GemmaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu",
  "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
  "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
  "use_cache": true, "vocab_size": 256000})";

// Returns the config.json with one changed field. A null makes the field null.
std::string With(const char* config, const std::string& key, const Json& value) {
  Json json = Json::parse(config);
  json[key] = value;
  return json.dump();
}
std::string Without(const char* config, const std::string& key) {
  Json json = Json::parse(config);
  json.erase(key);
  return json.dump();
}

TEST(HuggingFaceConfig, Llama31) {
  const auto config = ParseHuggingFaceConfig(kLlama31);
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelConfig& m = config->model;
  EXPECT_EQ(m.family, Family::kLlama);
  EXPECT_EQ(m.layers, 32);
  EXPECT_EQ(m.width, 4096);
  EXPECT_EQ(m.heads, 32);
  EXPECT_EQ(m.kv_heads, 8);
  EXPECT_EQ(m.head_dim, 128);
  EXPECT_EQ(m.ffn, 14336);
  EXPECT_EQ(m.vocab, 128256);
  EXPECT_EQ(m.context, 131072);
  EXPECT_EQ(m.norm_eps, 1e-5);
  EXPECT_EQ(m.rope_theta, 500000);
  EXPECT_EQ(m.rope_scaling.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(m.rope_scaling.factor, 8);
  EXPECT_EQ(m.rope_scaling.first_context, 8192);
  EXPECT_EQ(m.rope_scaling.low, 1);
  EXPECT_EQ(m.rope_scaling.high, 4);
  EXPECT_FALSE(m.tied_embeddings || m.qkv_bias);
  EXPECT_EQ(m.qk_norm, QkNorm::kNone);
  EXPECT_EQ(config->window, 0);
  EXPECT_EQ(config->dtype, "bfloat16");
}

TEST(HuggingFaceConfig, QwenAndGpt2) {
  const auto qwen = ParseHuggingFaceConfig(kQwen);
  ASSERT_TRUE(qwen.ok()) << qwen.status();
  EXPECT_TRUE(qwen->model.qkv_bias && qwen->model.tied_embeddings);
  EXPECT_EQ(qwen->model.head_dim, 64);
  EXPECT_EQ(qwen->model.norm_eps, 1e-6);
  EXPECT_EQ(qwen->window, 0) << "use_sliding_window is false";
  const auto gpt2 = ParseHuggingFaceConfig(kGpt2);
  ASSERT_TRUE(gpt2.ok()) << gpt2.status();
  EXPECT_EQ(gpt2->model.family, Family::kGpt2);
  EXPECT_EQ(gpt2->model.ffn, 3072);
  EXPECT_EQ(gpt2->model.context, 1024);
  EXPECT_EQ(gpt2->model.dropout, 0);
  EXPECT_TRUE(gpt2->model.tied_embeddings);
}

TEST(HuggingFaceConfig, Gemma3) {
  const auto config = ParseHuggingFaceConfig(kGemma3);
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelConfig& m = config->model;
  EXPECT_TRUE(m.unit_offset_norms && m.scaled_embedding && m.tied_embeddings);
  EXPECT_EQ(m.norm_position, NormPosition::kBoth);
  EXPECT_EQ(m.qk_norm, QkNorm::kHead);
  EXPECT_EQ(m.gate, Gate::kGelu);
  EXPECT_EQ(m.score_channels, 0) << "head_dim";
  EXPECT_EQ(m.logits_softcap, 0);
  EXPECT_EQ(config->window, 512);
  EXPECT_EQ(m.full_layers, std::vector<int64_t>({5, 11, 17, 23}));
  EXPECT_EQ(m.rope_theta, 1e6);
  EXPECT_EQ(m.window_rope_theta, 1e4);
  // Newer versions say the same in other fields.
  Json newer = Json::parse(kGemma3);
  for (const char* key : {"rope_theta", "rope_local_base_freq", "sliding_window_pattern"}) {
    newer.erase(key);
  }
  for (int layer = 0; layer < 26; ++layer) {
    newer["layer_types"].push_back(layer % 6 == 5 ? "full_attention" : "sliding_attention");
  }
  newer["rope_parameters"] = {
      {"full_attention", {{"rope_type", "default"}, {"rope_theta", 1e6}}},
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}};
  const auto same = ParseHuggingFaceConfig(newer.dump());
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ(ComputedDifference(*same, *config), "");
  // Without a layer that has a window, there is one base.
  newer["layer_types"] = std::vector<std::string>(26, "full_attention");
  const auto full = ParseHuggingFaceConfig(newer.dump());
  ASSERT_TRUE(full.ok()) << full.status();
  EXPECT_EQ(full->window, 0);
  EXPECT_EQ(full->model.window_rope_theta, 0);
  EXPECT_EQ(full->model.rope_theta, 1e6);
  ExpectWritten(*full);
}

TEST(HuggingFaceConfig, Gemma2) {
  const auto config = ParseHuggingFaceConfig(kGemma2);
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelConfig& m = config->model;
  EXPECT_EQ(m.score_channels, 144);
  EXPECT_EQ(m.attention_softcap, 50) << "the family's";
  EXPECT_EQ(m.logits_softcap, 30) << "the family's";
  EXPECT_EQ(m.full_layers.size(), 23u);
  EXPECT_EQ(m.full_layers[0], 1);
  EXPECT_EQ(m.qk_norm, QkNorm::kNone);
  EXPECT_EQ(ParseHuggingFaceConfig(With(kGemma2, "attn_logit_softcapping", nullptr))
                ->model.attention_softcap,
            0);
}

TEST(HuggingFaceConfig, Gemma1) {
  const auto config = ParseHuggingFaceConfig(kGemma1);
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelConfig& m = config->model;
  EXPECT_EQ(m.head_dim, 256);
  EXPECT_EQ(m.kv_heads, 1);
  EXPECT_EQ(m.score_channels, 0);
  EXPECT_EQ(m.norm_position, NormPosition::kBefore);
  EXPECT_EQ(m.gate, Gate::kGelu);
  EXPECT_TRUE(m.unit_offset_norms && m.scaled_embedding && m.tied_embeddings);
  EXPECT_EQ(config->window, 0);
  ExpectWritten(*config);
}

TEST(HuggingFaceConfig, OldAndNewFormsOfRope) {
  Json config = Json::parse(Without(kLlama31, "rope_theta"));
  const Json scaling = config["rope_scaling"];
  config.erase("rope_scaling");
  Json parameters = scaling;
  parameters["rope_theta"] = 500000.0;
  config["rope_parameters"] = parameters;
  const auto newer = ParseHuggingFaceConfig(config.dump()),
             older = ParseHuggingFaceConfig(kLlama31);
  ASSERT_TRUE(newer.ok()) << newer.status();
  EXPECT_EQ(ModelDifference(newer->model, older->model), "");
  // "type" is the first name of "rope_type".
  const auto linear =
      ParseHuggingFaceConfig(With(kLlama31, "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}));
  ASSERT_TRUE(linear.ok()) << linear.status();
  EXPECT_EQ(linear->model.rope_scaling.kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(linear->model.rope_scaling.factor, 2);
  // yarn's first context is the model's, unless the file gives another.
  const auto yarn = ParseHuggingFaceConfig(
      With(kLlama31, "rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}));
  ASSERT_TRUE(yarn.ok()) << yarn.status();
  EXPECT_EQ(yarn->model.rope_scaling.first_context, 131072);
}

TEST(HuggingFaceConfig, Windows) {
  std::string mistral = With(kLlama31, "model_type", "mistral");
  mistral = With(mistral.c_str(), "architectures", {"MistralForCausalLM"});
  EXPECT_EQ(ParseHuggingFaceConfig(mistral)->window, 4096) << "the family's";
  EXPECT_EQ(ParseHuggingFaceConfig(With(mistral.c_str(), "sliding_window", nullptr))->window, 0);
  EXPECT_EQ(ParseHuggingFaceConfig(With(mistral.c_str(), "sliding_window", 100))->window, 100);
  const std::string used = With(kQwen, "use_sliding_window", true);
  EXPECT_EQ(ParseHuggingFaceConfig(With(used.c_str(), "max_window_layers", 0))->window, 32768);
  EXPECT_EQ(ParseHuggingFaceConfig(With(used.c_str(), "max_window_layers", 24))->window, 0);
  const auto mixed = ParseHuggingFaceConfig(With(used.c_str(), "max_window_layers", 2));
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  EXPECT_EQ(mixed->window, 32768);
  EXPECT_EQ(mixed->model.full_layers, std::vector<int64_t>({0, 1}));
  EXPECT_EQ(ParseHuggingFaceConfig(*MakeHuggingFaceConfig(*mixed))->model.full_layers,
            mixed->model.full_layers);
  std::vector<std::string> types(24, "sliding_attention");
  types[5] = types[23] = "full_attention";
  const auto named = ParseHuggingFaceConfig(With(used.c_str(), "layer_types", types));
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(named->model.full_layers, std::vector<int64_t>({5, 23}));
  EXPECT_EQ(ParseHuggingFaceConfig(*MakeHuggingFaceConfig(*named))->model.full_layers,
            named->model.full_layers);
}

// An unknown or unsupported field is named with its value.
TEST(HuggingFaceConfig, ErrorsNameTheField) {
  const std::string used = With(kQwen, "use_sliding_window", true);
  struct Case {
    std::string json, names, says;
  };
  for (const Case& c : std::vector<Case>{
           {"", "not a JSON object", ""},
           {"[]", "not a JSON object", ""},
           {"{}", "model_type is \"\"", "llama, mistral"},
           {With(kLlama31, "model_type", "bert"), "model_type is \"bert\"", "gpt2"},
           {With(kLlama31, "model_type", 3), "model_type is 3", "text"},
           {With(kLlama31, "architectures", {"LlamaForSequenceClassification"}), "architectures",
            "LlamaForCausalLM"},
           {With(kLlama31, "quantization_config", Json::object()),
            "quantization_config.quant_method is \"\"", "fp8"},
           {With(kLlama31, "sliding_window", 4096), "sliding_window is 4096", "null"},
           {With(kLlama31, "num_experts", nullptr), "num_experts", "--ignore_fields=num_experts"},
           {With(kLlama31, "attention_bias", 1), "attention_bias is 1", "true or false"},
           {With(kQwen, "attention_bias", true), "attention_bias is true", "false"},
           {With(kQwen, "mlp_bias", true), "mlp_bias is true", "false"},
           {With(kLlama31, "rope_interleaved", true), "rope_interleaved is true", "false"},
           {With(kLlama31, "hidden_act", "gelu"), "hidden_act is \"gelu\"", "silu"},
           {With(kLlama31, "partial_rotary_factor", 0.5), "partial_rotary_factor is 0.5", "1.0"},
           {With(kLlama31, "head_dim", 63), "head_dim: must be even", "; got 63"},
           {With(kLlama31, "num_key_value_heads", 5), "kv_heads: must be a divisor", "; got 5"},
           {With(kLlama31, "vocab_size", 0), "vocab_size is 0", "at least 1"},
           {With(kLlama31, "vocab_size", -1), "vocab_size is -1", "from 0"},
           {With(kLlama31, "vocab_size", 1e300), "vocab_size", "integer"},
           {With(kLlama31, "hidden_size", "wide"), "hidden_size is \"wide\"", "integer"},
           {With(kLlama31, "rms_norm_eps", "small"), "rms_norm_eps is \"small\"", "number"},
           {With(kLlama31, "tie_word_embeddings", 1), "tie_word_embeddings is 1", "true or false"},
           {Without(kLlama31, "hidden_size"), "hidden_size is missing", ""},
           {Without(kLlama31, "intermediate_size"), "intermediate_size is missing", ""},
           {With(kLlama31, "rope_scaling", {{"rope_type", "longrope"}}),
            "rope_scaling short_factors: must be 64 numbers", "got 0 numbers"},
           {With(kGemma1, "hidden_activation", "gelu"), "hidden_activation is \"gelu\"", "tanh"},
           {With(kGemma1, "query_pre_attn_scalar", 256), "query_pre_attn_scalar", "not supported"},
           {With(kLlama31, "rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}}),
            "rope_scaling.rope_type is \"dynamic\"", "llama3"},
           {With(kLlama31, "rope_scaling", {{"rope_type", "linear"}}), "factor: must be from 1",
            "; got 0"},
           {With(kLlama31, "rope_scaling", {{"rope_type", "default"}, {"factor", 2.0}}),
            "rope_scaling.factor", "not supported"},
           {With(kLlama31, "rope_scaling", {{"rope_type", "linear"}, {"factor", 2}, {"slow", 1}}),
            "rope_scaling.slow", "not supported"},
           {With(kLlama31, "rope_scaling", "linear"), "rope_scaling is \"linear\"", "object"},
           {With(kQwen, "layer_types", {"full_attention"}), "layer_types", "every layer"},
           {With(used.c_str(), "layer_types", {"chunked_attention"}), "layer_types",
            "sliding_attention"},
           {With(kGemma3, "attn_logit_softcapping", 50.0), "attn_logit_softcapping is 50.0",
            "null"},
           {With(kGemma3, "use_bidirectional_attention", true), "use_bidirectional_attention", ""},
           {With(kGemma3, "hidden_activation", "gelu"), "hidden_activation is \"gelu\"", "tanh"},
           {With(kGemma3, "rope_parameters",
                 {{"full_attention", {{"rope_theta", 1e6}}},
                  {"sliding_attention", {{"rope_type", "yarn"}, {"factor", 2}}}}),
            "rope_parameters.sliding_attention.rope_type is \"yarn\"", "default"},
           {With(kQwen, "use_mrope", true), "use_mrope is true", "false"},
           {With(kGpt2, "activation_function", "relu"), "activation_function is \"relu\"",
            "gelu_new"},
           {With(kGpt2, "scale_attn_by_inverse_layer_idx", true),
            "scale_attn_by_inverse_layer_idx is true", "false"},
           {With(kGpt2, "scale_attn_weights", false), "scale_attn_weights is false", "true"},
           {With(kGpt2, "reorder_and_upcast_attn", true), "reorder_and_upcast_attn is true", ""},
           {With(kGpt2, "add_cross_attention", true), "add_cross_attention is true", ""},
       }) {
    const absl::Status status = ParseHuggingFaceConfig(c.json).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.json;
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.json: ")) << c.json;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.names)) << c.json;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says)) << c.json;
  }
}

// Files of the hub have fields of other programs, also within an object.
TEST(HuggingFaceConfig, FieldsThatChangeNothing) {
  const ModelConfig expected = ParseHuggingFaceConfig(kLlama31)->model;
  Json config = Json::parse(kLlama31);
  config.update(Json{{"is_llama_config", true},
                     {"transformers.js_config", {{"dtype", "q4"}}},
                     {"unsloth_fixed", true},
                     {"do_sample", true},
                     {"temperature", 0.6},
                     {"max_length", 4096},
                     {"rope_interleaved", false},
                     {"sliding_window", nullptr},
                     {"tie_encoder_decoder", false}});
  config["rope_scaling"]["finetuned"] = true;
  const auto read = ParseHuggingFaceConfig(config.dump());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(ModelDifference(read->model, expected), "");
}

TEST(HuggingFaceConfig, FieldsThatAreIgnored) {
  Json config = Json::parse(kLlama31);
  config["mystery"] = 7;
  config["rope_scaling"]["secret"] = 1;
  config["a.b"] = 1;
  const std::string json = config.dump();
  EXPECT_FALSE(ParseHuggingFaceConfig(json).ok());
  const auto without = WithoutFields(json, {"mystery", "rope_scaling.secret", "a.b"});
  ASSERT_TRUE(without.ok()) << without.status();
  const auto read = ParseHuggingFaceConfig(*without);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(ModelDifference(read->model, ParseHuggingFaceConfig(kLlama31)->model), "");
  for (const char* other : {"mystry", "rope_scaling.factr", "mystery.a", ""}) {
    EXPECT_THAT(std::string(WithoutFields(json, {other}).status().message()),
                HasSubstr(std::string("got '") + other + "'"));
  }
}

TEST_F(HuggingFaceTest, WhatIsWrittenIsRead) {
  for (const auto& [name, model] : fixtures_["models"].items()) {
    auto config = ParseHuggingFaceConfig(model["config"].dump());
    ASSERT_TRUE(config.ok()) << name << config.status();
    config->dtype = "bfloat16";
    ExpectWritten(*config);
  }
  for (const char* published : {kLlama31, kQwen, kGemma1, kGemma2, kGemma3})
    ExpectWritten(*ParseHuggingFaceConfig(published));
  auto windowed = *ParseHuggingFaceConfig(kQwen);
  windowed.window = 512;
  ExpectWritten(windowed);
}

TEST(HuggingFaceConfig, DropoutOfWeightsIsWrittenInTheFamilysName) {
  const std::pair<const char*, const char*> cases[] = {
      {kGpt2, "attn_pdrop"}, {kLlama31, "attention_dropout"}, {kQwen, "attention_dropout"}};
  for (const auto& [json, name] : cases) {
    HuggingFaceConfig config = *ParseHuggingFaceConfig(json);
    config.model.attention_dropout = 0.25;
    const auto written = MakeHuggingFaceConfig(config);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_EQ(Json::parse(*written)[name], 0.25) << name;
  }
}

// The error names what the closest family has instead.
TEST(HuggingFaceConfig, ModelsOfNoFamilyAreRefused) {
  struct Case {
    const char* base;
    void (*change)(HuggingFaceConfig*);
    const char* says;
  };
  for (const Case& c : std::vector<Case>{
           {kQwen, [](HuggingFaceConfig* c) { c->model.qk_norm = QkNorm::kHead; },
            "qwen2: qk_norm \"head\" instead"},
           {kLlama31, [](HuggingFaceConfig* c) { c->model.attention_out_bias = true; },
            "bias true"},
           {kGpt2, [](HuggingFaceConfig* c) { c->model.kv_heads = 4; }, "gpt2: kv_heads 4 instead"},
           {kGpt2, [](HuggingFaceConfig* c) { c->window = 64; }, "gpt2: window 64 instead of 0"},
           {kLlama31,
            [](HuggingFaceConfig* c) {
              c->window = 64, c->model.full_layers = {1}, c->model.rope_scaling = {};
            },
            "full_layers [1] instead of []"},
           {kLlama31, [](HuggingFaceConfig* c) { c->window = 64, c->model.ffn_bias = true; },
            "window 64"},
           {kLlama31, [](HuggingFaceConfig* c) { c->model.attention_softcap = 50; }, "softcap 50"},
           {kGpt2, [](HuggingFaceConfig* c) { c->model.logits_softcap = 50; }, "logits_softcap"},
           {kGpt2, [](HuggingFaceConfig* c) { c->model.attention_sinks = true; }, "sinks true"},
       }) {
    auto config = *ParseHuggingFaceConfig(c.base);
    c.change(&config);
    const absl::Status status = MakeHuggingFaceConfig(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("must be one that a family"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.says));
  }
}

// A model that came from one family may now be another's.
TEST(HuggingFaceConfig, TheFirstFamilyThatHasTheModelIsWritten) {
  auto config = *ParseHuggingFaceConfig(kLlama31);
  config.window = 64;
  EXPECT_EQ(Json::parse(*MakeHuggingFaceConfig(config))["model_type"], "mistral");
  config.type = "phi3";  // its RoPE has no llama3
  EXPECT_EQ(Json::parse(*MakeHuggingFaceConfig(config))["model_type"], "mistral");
  config.model.rope_scaling = {};
  EXPECT_EQ(Json::parse(*MakeHuggingFaceConfig(config))["model_type"], "phi3");
}

TEST(HuggingFaceConfig, WithAnotherDType) {
  EXPECT_EQ(*WithDType(kLlama31, "bfloat16"), kLlama31);
  const auto changed = WithDType(kLlama31, "float32");
  ASSERT_TRUE(changed.ok());
  EXPECT_EQ(ParseHuggingFaceConfig(*changed)->dtype, "float32");
  EXPECT_EQ(Json::parse(*changed)["eos_token_id"], Json::parse(kLlama31)["eos_token_id"]);
}

}  // namespace
}  // namespace burst
