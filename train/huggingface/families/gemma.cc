// Gemma (arXiv 2403.08295): GEGLU and scaled embeddings. Gemma 2 (arXiv 2408.00118) and the text
// models of Gemma 3 (arXiv 2503.19786): also normalization before and after the branches, and a
// window in most layers.
#include <utility>
#include <vector>

#include "train/huggingface/families/family.h"

namespace burst {
namespace {

constexpr double kLocalTheta = 10000;  // Gemma 3's base of RoPE in layers with a window

// Reads the window. If layer_types is missing, every `period`-th layer does not have it.
void ReadGemmaWindow(Fields& fields, int64_t period, HuggingFaceConfig* config) {
  ModelConfig& model = config->model;
  if (model.score_channels == model.head_dim) model.score_channels = 0;  // the default
  config->window = ReadWindow(fields, 4096);
  if (!fields.status().ok() || fields.Has("layer_types")) return;
  std::vector<int64_t> full;
  for (int64_t layer = period - 1; layer < model.layers; layer += period) full.push_back(layer);
  SetFullLayers(std::move(full), config);
}

void WriteGemma(const HuggingFaceConfig& config, nlohmann::ordered_json* json) {
  const ModelConfig& model = config.model;
  if (model.score_channels == 0) (*json)["query_pre_attn_scalar"] = model.head_dim;
}

HuggingFaceFamily GemmaLike() {
  using M = ModelConfig;
  HuggingFaceFamily family = LlamaLike();
  family.base.unit_offset_norms = true;
  family.base.gate = Gate::kGelu;
  family.base.scaled_embedding = true;
  family.Set({"num_key_value_heads", &M::kv_heads});
  family.Set({"head_dim", &M::head_dim, 256});
  family.Set({"tie_word_embeddings", &M::tied_embeddings, 1});
  family.Set({"attention_bias", &M::qkv_bias, 0});
  family.out_bias_as_qkv = true;
  family.fixed = {{"hidden_activation", {"gelu_pytorch_tanh"}},
                  {"hidden_act", {"gelu_pytorch_tanh"}}};
  return family;
}

// Gemma with the layers that later versions have.
HuggingFaceFamily LaterGemma() {
  HuggingFaceFamily family = GemmaLike();
  family.base.norm_position = NormPosition::kBoth;
  family.Set({"query_pre_attn_scalar", &ModelConfig::score_channels, 256});
  family.layers_differ = true;
  family.tensors.inside["attention_out_norm"] = {"post_attention_layernorm"};
  family.tensors.inside["ffn_norm"] = {"pre_feedforward_layernorm"};
  family.tensors.inside["ffn_out_norm"] = {"post_feedforward_layernorm"};
  return family;
}

}  // namespace

HuggingFaceFamily GemmaFamily() {
  HuggingFaceFamily family = GemmaLike();
  family.type = "gemma";
  family.architecture = "GemmaForCausalLM";
  // The first releases say gelu and mean its tanh form, which transformers computes, too.
  family.fixed[1].values.push_back("gelu");
  return family;
}

HuggingFaceFamily Gemma2Family() {
  HuggingFaceFamily family = LaterGemma();
  family.type = "gemma2";
  family.architecture = "Gemma2ForCausalLM";
  constexpr bool kNullIsZero = true;
  family.Set({"attn_logit_softcapping", &ModelConfig::attention_softcap, 50, kNullIsZero});
  family.Set({"final_logit_softcapping", &ModelConfig::logits_softcap, 30, kNullIsZero});
  family.read_window = [](Fields& fields, HuggingFaceConfig* config) {
    ReadGemmaWindow(fields, /*period=*/2, config);
  };
  family.write_more = WriteGemma;
  return family;
}

HuggingFaceFamily Gemma3Family() {
  HuggingFaceFamily family = LaterGemma();
  family.type = "gemma3_text";
  family.architecture = "Gemma3ForCausalLM";
  family.base.qk_norm = QkNorm::kHead;
  family.Set({"rope_theta", &ModelConfig::rope_theta, 1e6});
  family.Set({"rope_local_base_freq", &ModelConfig::window_rope_theta, kLocalTheta});
  family.Set({"final_logit_softcapping", &ModelConfig::logits_softcap, 0, /*null_is_zero=*/true});
  family.read_window = [](Fields& fields, HuggingFaceConfig* config) {
    const int64_t newer = fields.Size("_sliding_window_pattern", 6);
    ReadGemmaWindow(fields, fields.Size("sliding_window_pattern", newer), config);
  };
  family.write_more = [](const HuggingFaceConfig& config, nlohmann::ordered_json* json) {
    WriteGemma(config, json);
    if (config.window == 0) (*json)["rope_local_base_freq"] = kLocalTheta;  // of no layer
  };
  return family;
}

}  // namespace burst
