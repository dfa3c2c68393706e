// Qwen2 and Qwen2.5 (arXiv 2407.10671): biases of queries, keys and values. Qwen3 (arXiv
// 2505.09388): normalized queries and keys. Both may have a window in some layers.
#include <algorithm>
#include <numeric>
#include <vector>

#include "train/huggingface/families/family.h"

namespace burst {
namespace {

// Reads Qwen's window, if it is used at all. Without layer_types it is for the layers from
// max_window_layers on.
void ReadQwenWindow(Fields& fields, HuggingFaceConfig* config) {
  const bool used = fields.Bool("use_sliding_window", false);
  const int64_t window = ReadWindow(fields, 4096);
  const int64_t first = fields.Whole("max_window_layers", 28);
  if (!fields.status().ok() || !used) return;
  config->window = window;
  if (fields.Has("layer_types")) return;
  std::vector<int64_t> full(std::min(first, config->model.layers));
  std::iota(full.begin(), full.end(), 0);
  SetFullLayers(std::move(full), config);
}

// Programs that do not know layer_types read max_window_layers.
void WriteQwenWindow(const HuggingFaceConfig& config, nlohmann::ordered_json* json) {
  int64_t first = 0;
  while (first < config.model.layers && !config.HasWindow(first)) ++first;
  (*json)["use_sliding_window"] = config.window > 0;
  (*json)["max_window_layers"] = first;
}

HuggingFaceFamily QwenLike() {
  HuggingFaceFamily family = LlamaLike();
  family.Set({"num_key_value_heads", &ModelConfig::kv_heads});
  family.layers_differ = true;
  family.read_window = ReadQwenWindow;
  family.write_more = WriteQwenWindow;
  return family;
}

}  // namespace

HuggingFaceFamily Qwen2Family() {
  HuggingFaceFamily family = QwenLike();
  family.type = "qwen2";
  family.architecture = "Qwen2ForCausalLM";
  family.base.qkv_bias = true;
  return family;
}

HuggingFaceFamily Qwen3Family() {
  HuggingFaceFamily family = QwenLike();
  family.type = "qwen3";
  family.architecture = "Qwen3ForCausalLM";
  family.base.qk_norm = QkNorm::kHead;
  family.Set({"head_dim", &ModelConfig::head_dim, 128});
  family.Set({"attention_bias", &ModelConfig::qkv_bias, 0});
  family.out_bias_as_qkv = true;
  return family;
}

}  // namespace burst
