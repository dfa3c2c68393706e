#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "burst/base/check.h"
#include "train/huggingface/families/family.h"

namespace burst {
namespace {

const TensorNames& NamesOf(const HuggingFaceConfig& config) {
  const HuggingFaceFamily* const family = FindFamily(config.type);
  BURST_CHECK(family != nullptr) << config.type;
  return family->tensors;
}

// Returns a key of a table, which has every parameter of the family.
template <typename Table>
const auto& At(const Table& table, const std::string& key) {
  const auto found = table.find(key);
  BURST_CHECK(found != table.end()) << key;
  return found->second;
}

// Returns the number of rows in each of a parameter's `count` tensors.
std::vector<int64_t> Rows(const ModelConfig& config, absl::string_view name, int64_t all,
                          size_t count) {
  if (count == 1) return {all};
  if (name == "ffn.gate_up") return {config.ffn, config.ffn};
  const int64_t kv = config.kv_heads * config.head_dim;
  return {config.attention_channels(), kv, kv};
}

}  // namespace

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

Shape ForeignTensor::shape_here() const { return transposed ? Shape({shape[1], shape[0]}) : shape; }

std::vector<ForeignTensor> ForeignTensors(const HuggingFaceConfig& config,
                                          const Parameter& parameter) {
  const TensorNames& names = NamesOf(config);
  absl::string_view name = parameter.name;
  if (!absl::ConsumePrefix(&name, "layers.")) {
    absl::string_view there = At(names.outside, parameter.name);
    const bool whole = absl::ConsumePrefix(&there, "/");
    return {{absl::StrCat(whole ? "" : names.prefix, there), parameter.full_shape}};
  }
  // "<layer>.<name>.<weight or bias>"
  const size_t first = name.find('.'), last = name.rfind('.');
  const absl::string_view layer = name.substr(0, first), kind = name.substr(last + 1);
  const std::string inner(name.substr(first + 1, last - first - 1));
  const std::vector<std::string>& parts = At(names.inside, inner);
  const std::vector<int64_t> rows =
      Rows(config.model, inner, parameter.full_shape[0], parts.size());
  std::vector<ForeignTensor> tensors;
  for (size_t i = 0; i < parts.size(); ++i) {
    ForeignTensor tensor;
    tensor.name = absl::StrCat(names.prefix, names.layers, layer, ".", parts[i], ".", kind);
    tensor.shape = parameter.full_shape;
    tensor.shape[0] = rows[i];
    if (names.transposed && tensor.shape.size() == 2) {
      tensor.transposed = true;
      std::swap(tensor.shape[0], tensor.shape[1]);
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

bool IsComputed(const HuggingFaceConfig& config, absl::string_view name) {
  if (name == "lm_head.weight") return config.model.tied_embeddings;
  for (const std::string& end : NamesOf(config).computed) {
    if (absl::EndsWith(name, end)) return true;
  }
  return false;
}

std::string NamePrefix(const HuggingFaceConfig& config) { return NamesOf(config).prefix; }

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
