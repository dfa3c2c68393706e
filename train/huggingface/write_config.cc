#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "train/huggingface/config.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

absl::Status NoFamily(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("no family of transformers that is known here has ", what));
}

Json Scaling(const RopeScaling& scaling) {
  Json json = {{"rope_type", Name(scaling.kind)}, {"factor", scaling.factor}};
  switch (scaling.kind) {
    case RopeScaling::Kind::kNone:
      return Json();
    case RopeScaling::Kind::kLinear:
      return json;
    case RopeScaling::Kind::kLlama3:
      json["low_freq_factor"] = scaling.low;
      json["high_freq_factor"] = scaling.high;
      break;
    case RopeScaling::Kind::kYarn:
      json["beta_fast"] = scaling.fast;
      json["beta_slow"] = scaling.slow;
      json["truncate"] = scaling.whole;
      if (scaling.amplitude > 0) json["attention_factor"] = scaling.amplitude;
      break;
  }
  json["original_max_position_embeddings"] = scaling.first_context;
  return json;
}

absl::StatusOr<Json> Gpt2(const HuggingFaceConfig& config) {
  const ModelConfig& m = config.model;
  if (m.attention_channels() != m.width) return NoFamily("gpt2's layers with another head_dim");
  if (m.kv_heads != m.heads) return NoFamily("gpt2's layers with grouped-query heads");
  if (config.window > 0) return NoFamily("gpt2's layers with a window");
  return Json{{"architectures", {"GPT2LMHeadModel"}},
              {"model_type", "gpt2"},
              {"n_layer", m.layers},
              {"n_embd", m.width},
              {"n_head", m.heads},
              {"n_inner", m.ffn},
              {"n_positions", m.context},
              {"vocab_size", m.vocab},
              {"activation_function", "gelu_new"},
              {"layer_norm_epsilon", m.norm_eps},
              {"embd_pdrop", m.dropout},
              {"resid_pdrop", m.dropout},
              {"attn_pdrop", m.attention_dropout},
              {"tie_word_embeddings", m.tied_embeddings}};
}

absl::StatusOr<Json> LlamaLike(const HuggingFaceConfig& config) {
  const ModelConfig& m = config.model;
  const bool window = config.window > 0, all_biases = m.qkv_bias && m.attention_out_bias;
  if (m.attention_out_bias && !m.qkv_bias) return NoFamily("attention_out_bias without qkv_bias");
  if (m.qk_norm && m.qkv_bias && !all_biases) {
    return NoFamily("qkv_bias and qk_norm without attention_out_bias");
  }
  const bool plain = !m.qk_norm && !m.qkv_bias && !m.ffn_bias && m.attention_channels() == m.width;
  const bool phi3 = config.type == "phi3" && plain;
  const char* const type = phi3                        ? "phi3"
                           : m.qk_norm                 ? "qwen3"
                           : m.qkv_bias && !all_biases ? "qwen2"
                           : window                    ? "mistral"
                                                       : "llama";
  if (m.ffn_bias && type != std::string("llama")) {
    return NoFamily(absl::StrCat("ffn_bias in a ", type));
  }
  const bool qwen = absl::StartsWith(type, "qwen");
  if (window && !m.full_layers.empty() && !qwen) {
    return NoFamily(absl::StrCat("full_layers in a ", type));
  }
  if (all_biases && window && !m.qk_norm) return NoFamily("biases and a window");
  const char* const architecture = phi3        ? "Phi3ForCausalLM"
                                   : m.qk_norm ? "Qwen3ForCausalLM"
                                   : qwen      ? "Qwen2ForCausalLM"
                                   : window    ? "MistralForCausalLM"
                                               : "LlamaForCausalLM";
  Json json = {{"architectures", {architecture}},
               {"model_type", type},
               {"num_hidden_layers", m.layers},
               {"hidden_size", m.width},
               {"num_attention_heads", m.heads},
               {"num_key_value_heads", m.kv_heads},
               {"head_dim", m.head_dim},
               {"intermediate_size", m.ffn},
               {"vocab_size", m.vocab},
               {"max_position_embeddings", m.context},
               {"hidden_act", "silu"},
               {"rms_norm_eps", m.norm_eps},
               {"rope_theta", m.rope_theta},
               {"rope_scaling", Scaling(m.rope_scaling)},
               {"attention_dropout", m.attention_dropout},
               {"tie_word_embeddings", m.tied_embeddings}};
  if (m.attention_out_bias) json["attention_bias"] = true;
  if (m.ffn_bias) json["mlp_bias"] = true;
  if (qwen) {
    json["use_sliding_window"] = window;
    // Programs that do not know layer_types read max_window_layers.
    int64_t first = 0;
    while (first < m.layers && (!window || m.IsFull(first))) ++first;
    json["max_window_layers"] = first;
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      const bool full = !window || m.IsFull(layer);
      json["layer_types"].push_back(full ? "full_attention" : "sliding_attention");
    }
  }
  if (window) json["sliding_window"] = config.window;
  if (phi3) json.erase("head_dim");
  return json;
}

}  // namespace

absl::StatusOr<std::string> MakeHuggingFaceConfig(const HuggingFaceConfig& given) {
  HuggingFaceConfig config = given;
  config.model = given.model.WithDefaults();
  if (config.model.attention_softcap != 0) return NoFamily("attention_softcap");
  if (config.model.logits_softcap != 0) return NoFamily("logits_softcap");
  if (config.model.window_rope_theta != 0) return NoFamily("window_rope_theta");
  if (config.model.attention_sinks) return NoFamily("attention_sinks");
  BURST_ASSIGN_OR_RETURN(Json json,
                         config.model.family == Family::kGpt2 ? Gpt2(config) : LlamaLike(config));
  json["torch_dtype"] = config.dtype.empty() ? "float32" : config.dtype;
  return absl::StrCat(json.dump(2), "\n");
}

absl::StatusOr<std::string> WithDType(absl::string_view json, absl::string_view dtype) {
  BURST_ASSIGN_OR_RETURN(Json object, ParseJson<Json>(json));
  if (!object.is_object()) return absl::InvalidArgumentError("config.json: not a JSON object");
  const char* const key = object.contains("dtype") ? "dtype" : "torch_dtype";
  const bool was_float8 = object.erase("quantization_config") > 0;
  const auto before = object.find(key);
  if (!was_float8 &&
      (before == object.end() ? dtype == "float32" : *before == std::string(dtype))) {
    return std::string(json);
  }
  object[key] = std::string(dtype);
  return absl::StrCat(object.dump(2, ' ', false, Json::error_handler_t::replace), "\n");
}

absl::StatusOr<std::string> WithContext(absl::string_view json, int64_t context) {
  constexpr char kContext[] = "max_position_embeddings";
  constexpr char kFirst[] = "original_max_position_embeddings";
  BURST_ASSIGN_OR_RETURN(Json object, ParseJson<Json>(json));
  BURST_ASSIGN_OR_RETURN(const HuggingFaceConfig before, ParseHuggingFaceConfig(json));
  const int64_t first = before.model.rope_scaling.first_context;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto rope = object.find(key);
    // A reader takes max_position_embeddings where this field is missing.
    if (first > 0 && rope != object.end() && rope->is_object() && !rope->contains(kFirst)) {
      (*rope)[kFirst] = first;
    }
  }
  object[kContext] = context;
  return absl::StrCat(object.dump(2, ' ', false, Json::error_handler_t::replace), "\n");
}

}  // namespace burst
