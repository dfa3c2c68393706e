#include <utility>
#include <vector>

#include "train/huggingface/families/family.h"

namespace burst {

const std::vector<HuggingFaceFamily>& HuggingFaceFamilies() {
  static const auto* families = new std::vector<HuggingFaceFamily>{
      LlamaFamily(), MistralFamily(), Qwen2Family(),  Qwen3Family(),  Phi3Family(),
      Olmo2Family(), GemmaFamily(),   Gemma2Family(), Gemma3Family(), Gpt2Family()};
  return *families;
}

const HuggingFaceFamily* FindFamily(absl::string_view type) {
  for (const HuggingFaceFamily& family : HuggingFaceFamilies()) {
    if (family.type == type) return &family;
  }
  return nullptr;
}

void HuggingFaceFamily::Set(const PropertyField& field) {
  for (PropertyField& other : properties) {
    if (other.property == field.property) {
      other = field;
      return;
    }
  }
  properties.push_back(field);
}

int64_t ReadWindow(Fields& fields, int64_t missing) {
  if (!fields.Names("sliding_window")) return missing;
  return fields.Size("sliding_window", 0);
}

void SetFullLayers(std::vector<int64_t> full, HuggingFaceConfig* config) {
  const int64_t layers = config->model.layers;
  if (static_cast<int64_t>(full.size()) >= layers) config->window = 0;
  if (config->window == 0) full.clear();
  config->model.full_layers = std::move(full);
}

}  // namespace burst
