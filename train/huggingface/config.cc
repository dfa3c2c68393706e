#include "train/huggingface/config.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "train/huggingface/families/family.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// ---- Rotary position embedding.

double YarnAmplitude(double factor, double scale) { return 0.1 * scale * std::log(factor) + 1; }

// Reads the fields of scaling->kind. first_context: the model's field, or 0.
void ReadScaling(Fields& rope, int64_t context, int64_t first_context, RopeScaling* scaling) {
  using Kind = RopeScaling::Kind;
  scaling->factor = rope.Real("factor", 0);
  if (scaling->kind == Kind::kLinear) return;
  scaling->first_context = rope.Whole("original_max_position_embeddings", context);
  if (first_context > 0) scaling->first_context = first_context;
  if (scaling->kind == Kind::kLlama3) {
    scaling->low = rope.Real("low_freq_factor", 0);
    scaling->high = rope.Real("high_freq_factor", 0);
    return;
  }
  scaling->amplitude = rope.Real("attention_factor", 0);
  if (scaling->kind == Kind::kLongRope) {
    scaling->short_factors = rope.Reals("short_factor");
    scaling->long_factors = rope.Reals("long_factor");
    if (scaling->factor == 0 && scaling->first_context > 0) {
      const double longer = static_cast<double>(context);
      scaling->factor = std::max(1.0, longer / static_cast<double>(scaling->first_context));
    }
    return;
  }
  scaling->fast = rope.Real("beta_fast", 32);
  scaling->slow = rope.Real("beta_slow", 1);
  scaling->whole = rope.Bool("truncate", true);
  const double scale = rope.Real("mscale", 0), all = rope.Real("mscale_all_dim", 0);
  if (scaling->amplitude == 0 && scale > 0 && all > 0 && scaling->factor > 1) {
    scaling->amplitude =
        YarnAmplitude(scaling->factor, scale) / YarnAmplitude(scaling->factor, all);
  }
}

// Reads partial_rotary_factor, rounding as transformers does.
void ReadPartial(Fields& fields, ModelConfig* model) {
  const std::string key = "partial_rotary_factor";
  if (!fields.Has(key)) return;
  const ModelConfig full = model->WithDefaults();
  const double factor = fields.Real(key, 1);
  if (!(factor > 0 && factor <= 1)) return fields.Refuse(key, factor, "above 0 and at most 1");
  model->rope_channels = static_cast<int64_t>(static_cast<double>(full.head_dim) * factor);
  if (model->rope_channels == 0) fields.Refuse(key, factor, "so large that RoPE turns channels");
}

// Reads rope_scaling, or rope_parameters, where newer versions have rope_theta, too. A model with a
// base of its own for layers with a window may have both kinds of layers there.
absl::Status ReadRope(const RopeForms& forms, Fields& fields, ModelConfig* model) {
  if (forms.partial) ReadPartial(fields, model);
  const int64_t first_context =
      forms.first_context > 0
          ? fields.Whole("original_max_position_embeddings", forms.first_context)
          : 0;
  for (const std::string key : {"rope_scaling", "rope_parameters"}) {
    std::optional<Fields> found = fields.Object(key);
    if (!found.has_value()) continue;
    if (model->window_rope_theta > 0 && found->Has("full_attention")) {
      std::optional<Fields> full = found->Object("full_attention");
      if (std::optional<Fields> windowed = found->Object("sliding_attention")) {
        model->window_rope_theta = windowed->Real("rope_theta", model->window_rope_theta);
        windowed->MustBe("rope_type", {"default"});
        BURST_RETURN_IF_ERROR(windowed->Finish());
      }
      BURST_RETURN_IF_ERROR(found->Finish());
      found = std::move(full);
    }
    Fields& rope = *found;
    model->rope_theta = rope.Real("rope_theta", model->rope_theta);
    const std::string old_type = rope.Text("type", "default");
    const std::string type = rope.Text("rope_type", old_type);
    const auto form = absl::c_find_if(forms.types, [&](const auto& f) { return f.first == type; });
    if (form == forms.types.end()) {
      const auto add = [](std::string* out, const auto& f) { absl::StrAppend(out, f.first); };
      rope.Refuse("rope_type", type,
                  absl::StrCat("one of ", absl::StrJoin(forms.types, ", ", add)));
      return rope.status();
    }
    if (forms.partial) ReadPartial(rope, model);
    if (form->second != RopeScaling::Kind::kNone) {
      model->rope_scaling.kind = form->second;
      ReadScaling(rope, model->context, first_context, &model->rope_scaling);
    }
    BURST_RETURN_IF_ERROR(rope.Finish());
  }
  return fields.status();
}

// ---- Weights in float8 (DeepSeek-V3, arXiv 2412.19437): e4m3, with a scale for each block.

// Reads quantization_config. The activations here are not float8, so what it says of them counts
// only if they have scales of their own.
absl::Status ReadQuantization(Fields& fields, HuggingFaceConfig* config) {
  std::optional<Fields> found = fields.Object("quantization_config");
  if (!found.has_value()) return fields.status();
  Fields& quantization = *found;
  const std::string method = quantization.Text("quant_method", "");
  if (method != "fp8") quantization.Refuse("quant_method", method, "\"fp8\"");
  quantization.MustBe("fmt", {"e4m3"});
  quantization.MustBe("activation_scheme", {"dynamic"});
  const Json block = quantization.Take("weight_block_size");
  const auto is_size = [](const Json& size) {
    return size.is_number_integer() && size.get<double>() >= 1 && size.get<double>() <= 1 << 20;
  };
  if (!block.is_array() || block.size() != 2 || !is_size(block[0]) || !is_size(block[1])) {
    quantization.Refuse("weight_block_size", block, "two sizes, such as [128, 128]");
  } else {
    config->scale_rows = block[0].get<int64_t>();
    config->scale_cols = block[1].get<int64_t>();
  }
  return quantization.Finish();
}

// ---- The fields of the family.

void ReadProperty(const PropertyField& field, Fields& fields, ModelConfig* model) {
  const std::string key = field.key;
  const bool is_null = fields.Names(key) && !fields.Has(key);
  const double missing = is_null && field.null_is_zero ? 0 : field.missing.value_or(0);
  if (const auto* size = std::get_if<int64_t ModelConfig::*>(&field.property)) {
    model->** size = field.missing.has_value() ? fields.Size(key, static_cast<int64_t>(missing))
                                               : fields.Size(key);
  } else if (const auto* real = std::get_if<double ModelConfig::*>(&field.property)) {
    model->** real = fields.Real(key, missing);
  } else {
    model->*std::get<bool ModelConfig::*>(field.property) = fields.Bool(key, missing != 0);
  }
}

// Reads layer_types, which names the attention of each layer.
absl::Status ReadLayerTypes(Fields& fields, bool may_differ, HuggingFaceConfig* config) {
  const Json types = fields.Take("layer_types");
  const int64_t layers = config->model.layers;
  if (types.is_null()) return fields.status();
  const bool differ = may_differ && config->window > 0;
  std::vector<int64_t> full;
  bool valid = types.is_array() && static_cast<int64_t>(types.size()) == layers;
  for (int64_t layer = 0; valid && layer < layers; ++layer) {
    const bool is_full = types[layer] == "full_attention";
    if (is_full) full.push_back(layer);
    valid = is_full ? differ || config->window == 0
                    : types[layer] == "sliding_attention" && config->window > 0;
  }
  if (!valid) {
    const char* const only = config->window > 0 ? "sliding_attention" : "full_attention";
    fields.Refuse("layer_types", types,
                  differ ? "\"full_attention\" or \"sliding_attention\" for every layer"
                         : absl::StrCat("\"", only, "\" for every layer"));
  }
  SetFullLayers(std::move(full), config);
  return fields.status();
}

absl::Status CheckModel(const ModelConfig& model) {
  const absl::Status valid = model.Validate();
  if (valid.ok()) return valid;
  return absl::InvalidArgumentError(absl::StrCat("config.json: ", valid.message()));
}

absl::Status ReadFamily(const HuggingFaceFamily& family, Fields& fields,
                        HuggingFaceConfig* config) {
  ModelConfig& model = config->model;
  model = family.base;
  fields.MustBe("architectures", {Json::array({family.architecture})});
  for (const PropertyField& field : family.properties) ReadProperty(field, fields, &model);
  if (family.out_bias_as_qkv) model.attention_out_bias = model.qkv_bias;
  for (const FixedField& fixed : family.fixed) fields.MustBe(fixed.key, fixed.values);
  for (const char* key : family.ignored) fields.Take(key);
  BURST_RETURN_IF_ERROR(fields.status());
  BURST_RETURN_IF_ERROR(CheckModel(model));  // a list of its layers has a sensible length
  if (family.read_window != nullptr) family.read_window(fields, config);
  BURST_RETURN_IF_ERROR(ReadLayerTypes(fields, family.layers_differ, config));
  if (model.family == Family::kGpt2) return absl::OkStatus();
  BURST_RETURN_IF_ERROR(ReadRope(family.rope, fields, &model));
  if (config->window == 0) model.window_rope_theta = 0;  // all layers are full
  return absl::OkStatus();
}

absl::StatusOr<Json> ParseObject(absl::string_view json) {
  absl::StatusOr<Json> parsed = ParseJson(json);
  if (parsed.ok() && parsed->is_object()) return parsed;
  return absl::InvalidArgumentError(absl::StrCat(
      "config.json: not a JSON object", parsed.ok() ? "" : "; ", parsed.status().message()));
}

}  // namespace

absl::StatusOr<std::string> WithoutFields(absl::string_view json,
                                          const std::vector<std::string>& fields) {
  if (fields.empty()) return std::string(json);
  BURST_ASSIGN_OR_RETURN(Json root, ParseObject(json));
  for (const std::string& field : fields) {
    std::vector<std::string> path = absl::StrSplit(field, absl::MaxSplits('.', 1));
    // "transformers.js_config" is the name of one field.
    Json* object = &root;
    if (root.count(field) > 0) path = {field};
    if (path.size() > 1 && root.count(path[0]) > 0) object = &root[path[0]];
    if (!object->is_object() || object->erase(path.back()) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "config.json: --ignore_fields must name fields of it; got '", field, "'; leave it out"));
    }
  }
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::StatusOr<HuggingFaceConfig> ParseHuggingFaceConfig(absl::string_view json) {
  BURST_ASSIGN_OR_RETURN(Json parsed, ParseObject(json));
  Fields fields(std::move(parsed), "");
  HuggingFaceConfig config;
  config.type = fields.Text("model_type", "");
  config.dtype = fields.Text("torch_dtype", "");
  config.dtype = fields.Text("dtype", config.dtype);
  BURST_RETURN_IF_ERROR(fields.status());
  const HuggingFaceFamily* const family = FindFamily(config.type);
  if (family == nullptr) {
    const auto add_type = [](std::string* out, const HuggingFaceFamily& one) {
      absl::StrAppend(out, one.type);
    };
    fields.Refuse("model_type", config.type,
                  absl::StrCat("one of ", absl::StrJoin(HuggingFaceFamilies(), ", ", add_type)));
    return fields.status();
  }
  BURST_RETURN_IF_ERROR(ReadFamily(*family, fields, &config));
  BURST_RETURN_IF_ERROR(ReadQuantization(fields, &config));
  BURST_RETURN_IF_ERROR(fields.Finish());
  BURST_RETURN_IF_ERROR(CheckModel(config.model));
  config.model = config.model.WithDefaults();
  return config;
}

}  // namespace burst
