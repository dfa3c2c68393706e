#include <cmath>
#include <nlohmann/json.hpp>
#include <variant>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "train/huggingface/config.h"
#include "train/huggingface/families/family.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

Json Scaling(const RopeForms& forms, const RopeScaling& scaling) {
  const auto form =
      absl::c_find_if(forms.types, [&](const auto& f) { return f.second == scaling.kind; });
  Json json = {{"rope_type", form == forms.types.end() ? Name(scaling.kind) : form->first},
               {"factor", scaling.factor}};
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
      break;
    case RopeScaling::Kind::kLongRope:
      json["short_factor"] = scaling.short_factors;
      json["long_factor"] = scaling.long_factors;
      break;
  }
  if (scaling.amplitude > 0) json["attention_factor"] = scaling.amplitude;
  json["original_max_position_embeddings"] = scaling.first_context;
  return json;
}

// Returns the smallest factor by which transformers computes this number of channels.
double PartialFactor(const ModelConfig& model) {
  const double channels = static_cast<double>(model.rope_channels);
  const double all = static_cast<double>(model.head_dim);
  double factor = channels / all;
  while (std::floor(all * factor) < channels) factor = std::nextafter(factor, 1);
  return factor;
}

Json ValueOf(const PropertyField& field, const ModelConfig& model) {
  const Json value =
      std::visit([&](const auto property) { return Json(model.*property); }, field.property);
  return field.null_is_zero && value == 0 ? Json() : value;
}

// Returns the config.json of a family. If the family has no such models, it means another model.
Json Write(const HuggingFaceFamily& family, const HuggingFaceConfig& config) {
  const ModelConfig& model = config.model;
  Json json = {{"architectures", Json::array({family.architecture})}, {"model_type", family.type}};
  for (const PropertyField& field : family.properties) json[field.key] = ValueOf(field, model);
  for (const FixedField& fixed : family.fixed) json[fixed.key] = fixed.values[0];
  for (const auto& [key, rate] : family.rates) json[key] = model.*rate;
  if (family.base.family != Family::kGpt2) {
    json["rope_scaling"] = Scaling(family.rope, model.rope_scaling);
  }
  if (family.rope.partial && model.rope_channels > 0) {
    json["partial_rotary_factor"] = PartialFactor(model);
  }
  if (family.rope.first_context > 0 && model.rope_scaling.first_context > 0) {
    json["original_max_position_embeddings"] = model.rope_scaling.first_context;
  }
  // If layers differ, layer_types says that no layer has a window.
  if (family.read_window != nullptr && (config.window > 0 || !family.layers_differ)) {
    json["sliding_window"] = config.window > 0 ? Json(config.window) : Json();
  }
  for (int64_t layer = 0; family.layers_differ && layer < model.layers; ++layer) {
    json["layer_types"].push_back(config.HasWindow(layer) ? "sliding_attention" : "full_attention");
  }
  if (family.write_more != nullptr) family.write_more(config, &json);
  json["torch_dtype"] = config.dtype.empty() ? "float32" : config.dtype;
  return json;
}

}  // namespace

std::string ComputedDifference(const HuggingFaceConfig& config, const HuggingFaceConfig& other) {
  const auto computed = [](const HuggingFaceConfig& config) {
    ModelConfig model = config.model.WithDefaults();
    model.dropout = model.attention_dropout = model.init_std = 0;
    if (config.window == 0) model.full_layers.clear();
    return model;
  };
  const std::string differs = ModelDifference(computed(config), computed(other));
  if (config.window == other.window) return differs;
  return absl::StrCat(differs, differs.empty() ? "" : ", ", "window ", config.window,
                      " instead of ", other.window);
}

absl::StatusOr<std::string> MakeHuggingFaceConfig(const HuggingFaceConfig& given) {
  HuggingFaceConfig config = given;
  config.model = given.model.WithDefaults();
  std::vector<const HuggingFaceFamily*> families;
  if (const HuggingFaceFamily* own = FindFamily(config.type)) families.push_back(own);
  for (const HuggingFaceFamily& family : HuggingFaceFamilies()) families.push_back(&family);
  std::string closest;
  for (const HuggingFaceFamily* family : families) {
    const std::string json = Write(*family, config).dump(2) + "\n";
    const absl::StatusOr<HuggingFaceConfig> read = ParseHuggingFaceConfig(json);
    const std::string differs =
        read.ok() ? ComputedDifference(config, *read) : std::string(read.status().message());
    if (differs.empty()) return json;
    if (closest.empty() || differs.size() < closest.size()) {
      closest = absl::StrCat(family->type, ": ", differs);
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the model must be one that a family of transformers has; got, compared with ", closest));
}

absl::StatusOr<std::string> WithHarmlessFields(absl::string_view json, absl::string_view other) {
  BURST_ASSIGN_OR_RETURN(Json object, ParseJson<Json>(json));
  BURST_ASSIGN_OR_RETURN(const Json others, ParseJson<Json>(other));
  for (const auto& [key, value] : others.items()) {
    if (IsWithoutInfluence(key) && !object.contains(key)) object[key] = value;
  }
  return absl::StrCat(object.dump(2, ' ', false, Json::error_handler_t::replace), "\n");
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
  const RopeScaling& scaling = before.model.rope_scaling;
  const int64_t first = scaling.first_context;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (first == 0 || !object.contains(key) || !object[key].is_object()) continue;
    Json& all = object[key];
    Json& rope = all.contains("full_attention") ? all["full_attention"] : all;
    // A reader takes max_position_embeddings where this field is missing.
    if (!rope.contains(kFirst)) rope[kFirst] = first;
    // longrope's factor would follow from the new context.
    if (!rope.contains("factor")) rope["factor"] = scaling.factor;
  }
  object[kContext] = context;
  return absl::StrCat(object.dump(2, ' ', false, Json::error_handler_t::replace), "\n");
}

}  // namespace burst
