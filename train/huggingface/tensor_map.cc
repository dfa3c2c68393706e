#include "train/huggingface/tensor_map.h"

#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "burst/base/check.h"

namespace burst {
namespace {

using Names = std::vector<std::string>;

// Returns the names of a layer's tensors. A key is the parameter's name without ".weight" or
// ".bias".
const std::map<std::string, Names>& LayerNames(const HuggingFaceConfig& config) {
  static const auto* llama = new std::map<std::string, Names>{
      {"attention_norm", {"input_layernorm"}},
      {"attention.qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
      {"attention.out", {"self_attn.o_proj"}},
      {"attention.q_norm", {"self_attn.q_norm"}},
      {"attention.k_norm", {"self_attn.k_norm"}},
      {"ffn_norm", {"post_attention_layernorm"}},
      {"ffn.gate_up", {"mlp.gate_proj", "mlp.up_proj"}},
      {"ffn.down", {"mlp.down_proj"}},
  };
  static const auto* gpt2 = new std::map<std::string, Names>{
      {"attention_norm", {"ln_1"}},       {"attention.qkv", {"attn.c_attn"}},
      {"attention.out", {"attn.c_proj"}}, {"ffn_norm", {"ln_2"}},
      {"ffn.up", {"mlp.c_fc"}},           {"ffn.down", {"mlp.c_proj"}},
  };
  static const auto* phi3 = [] {
    auto* names = new std::map<std::string, Names>(*llama);
    (*names)["attention.qkv"] = {"self_attn.qkv_proj"};
    (*names)["ffn.gate_up"] = {"mlp.gate_up_proj"};
    return names;
  }();
  if (config.model.family == Family::kGpt2) return *gpt2;
  return config.type == "phi3" ? *phi3 : *llama;
}

const std::map<std::string, std::string>& OtherNames(Family family) {
  static const auto* llama = new std::map<std::string, std::string>{
      {"embedding.tokens", "model.embed_tokens.weight"},
      {"final_norm.weight", "model.norm.weight"},
      {"head.weight", "lm_head.weight"},
  };
  static const auto* gpt2 = new std::map<std::string, std::string>{
      {"embedding.tokens", "transformer.wte.weight"},
      {"embedding.positions", "transformer.wpe.weight"},
      {"final_norm.weight", "transformer.ln_f.weight"},
      {"final_norm.bias", "transformer.ln_f.bias"},
      {"head.weight", "lm_head.weight"},
  };
  return family == Family::kGpt2 ? *gpt2 : *llama;
}

// Returns the number of rows in each of a parameter's tensors. Empty means that one tensor has all
// rows.
std::vector<int64_t> Rows(const ModelConfig& config, absl::string_view name) {
  if (config.family == Family::kGpt2) return {};
  if (name == "ffn.gate_up") return {config.ffn, config.ffn};
  if (name != "attention.qkv") return {};
  const int64_t kv = config.kv_heads * config.head_dim;
  return {config.attention_channels(), kv, kv};
}

}  // namespace

Shape ForeignTensor::shape_here() const { return transposed ? Shape({shape[1], shape[0]}) : shape; }

std::vector<ForeignTensor> ForeignTensors(const HuggingFaceConfig& directory,
                                          const Parameter& parameter) {
  const ModelConfig& config = directory.model;
  const bool gpt2 = config.family == Family::kGpt2;
  absl::string_view name = parameter.name;
  if (!absl::ConsumePrefix(&name, "layers.")) {
    const auto found = OtherNames(config.family).find(parameter.name);
    BURST_CHECK(found != OtherNames(config.family).end()) << parameter.name;
    return {{found->second, parameter.full_shape}};
  }
  // "<layer>.<name>.<weight or bias>"
  const size_t first = name.find('.'), last = name.rfind('.');
  const absl::string_view layer = name.substr(0, first), kind = name.substr(last + 1);
  const std::string inner(name.substr(first + 1, last - first - 1));
  const auto found = LayerNames(directory).find(inner);
  BURST_CHECK(found != LayerNames(directory).end()) << parameter.name;
  std::vector<int64_t> rows = Rows(config, inner);
  if (found->second.size() == 1) rows = {parameter.full_shape[0]};
  std::vector<ForeignTensor> tensors;
  for (size_t i = 0; i < found->second.size(); ++i) {
    ForeignTensor tensor;
    tensor.name = absl::StrCat(gpt2 ? "transformer.h." : "model.layers.", layer, ".",
                               found->second[i], ".", kind);
    tensor.shape = parameter.full_shape;
    tensor.shape[0] = rows[i];
    if (gpt2 && tensor.shape.size() == 2) {  // its linear layers are stored as "Conv1D"
      tensor.transposed = true;
      std::swap(tensor.shape[0], tensor.shape[1]);
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

bool IsComputed(const ModelConfig& config, absl::string_view name) {
  if (name == "lm_head.weight") return config.tied_embeddings;
  if (config.family == Family::kGpt2) {
    return absl::EndsWith(name, ".attn.bias") || absl::EndsWith(name, ".attn.masked_bias");
  }
  return absl::EndsWith(name, ".rotary_emb.inv_freq");
}

std::string NamePrefix(const ModelConfig& config) {
  return config.family == Family::kGpt2 ? "transformer." : "model.";
}

}  // namespace burst
