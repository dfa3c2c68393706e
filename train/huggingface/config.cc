#include "train/huggingface/config.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/json.h"
#include "burst/base/status.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// Returns the fields that change no result of a model. They say what tokens are for, or how other
// programs run or train it.
const std::set<std::string>& WithoutInfluence() {
  static const auto* fields = new std::set<std::string>{
      "_name_or_path", "_attn_implementation_autoset", "transformers_version", "tokenizer_class",
      "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "id2label",
      "label2id", "problem_type", "task_specific_params", "prefix", "use_cache", "return_dict",
      "output_attentions", "output_hidden_states", "torchscript", "gradient_checkpointing",
      "chunk_size_feed_forward",
      // Slices of GEMMs do not change the sum.
      "pretraining_tp",
      // Dropout is for training; here --model.dropout and --model.attention_dropout set it.
      "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout",
      "initializer_range",
      // These fields are for a classifier on top of GPT-2.
      "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
      // In GPT-2 this is another name of n_positions.
      "n_ctx"};
  return *fields;
}

// Takes fields out of a JSON object, so that the remaining ones are unknown. It keeps the first
// error; values read after an error have no meaning. A null counts as a missing field.
class Fields {
 public:
  Fields(Json object, std::string prefix)
      : object_(std::move(object)), prefix_(std::move(prefix)) {}

  const absl::Status& status() const { return status_; }
  bool Names(const std::string& key) const { return object_.count(key) > 0; }  // null, too
  bool Has(const std::string& key) const {
    const auto it = object_.find(key);
    return it != object_.end() && !it->is_null();
  }

  int64_t Whole(const std::string& key, int64_t absent) {
    constexpr int64_t kMost = int64_t{1} << 31;
    const Json value = Take(key);
    if (value.is_null()) return absent;
    if (value.is_number_integer() && value.get<double>() >= 0 &&
        value.get<double>() < static_cast<double>(kMost)) {
      return value.get<int64_t>();
    }
    Refuse(key, value, "an integer from 0, below 2^31");
    return absent;
  }
  int64_t Size(const std::string& key) {
    if (!Has(key)) Fail(absl::StrCat(prefix_, key, " is missing"));
    const int64_t size = Whole(key, 1);
    if (size == 0) Refuse(key, 0, "at least 1");
    return size;
  }
  int64_t Size(const std::string& key, int64_t absent) {
    if (Has(key)) return Size(key);
    Take(key);  // a null
    return absent;
  }
  double Real(const std::string& key, double absent) {
    const Json value = Take(key);
    if (value.is_null()) return absent;
    if (value.is_number()) return value.get<double>();
    Refuse(key, value, "a number");
    return absent;
  }
  bool Bool(const std::string& key, bool absent) {
    const Json value = Take(key);
    if (value.is_null()) return absent;
    if (value.is_boolean()) return value.get<bool>();
    Refuse(key, value, "true or false");
    return absent;
  }
  std::string Text(const std::string& key, const std::string& absent) {
    const Json value = Take(key);
    if (value.is_null()) return absent;
    if (value.is_string()) return value.get<std::string>();
    Refuse(key, value, "a text");
    return absent;
  }
  Json Take(const std::string& key) {
    const auto it = object_.find(key);
    if (it == object_.end()) return Json();
    Json value = *it;
    object_.erase(it);
    return value;
  }

  // Takes a field that may have one value only.
  void MustBe(const std::string& key, const Json& only) {
    const Json value = Take(key);
    if (!value.is_null() && value != only) {
      Refuse(key, value, absl::StrCat(only.dump(), "; nothing else is supported"));
    }
  }
  void Refuse(const std::string& key, const Json& value, absl::string_view valid) {
    const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    Fail(absl::StrCat(prefix_, key, " is ", text.substr(0, 100), "; it must be ", valid));
  }
  void Fail(absl::string_view message) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("config.json: ", message));
  }

  absl::Status Finish(const std::set<std::string>& known) {
    for (const auto& [key, value] : object_.items()) {
      if (known.count(key) == 0) {
        Fail(absl::StrCat("the field ", prefix_, key, " is not supported"));
      }
    }
    return status_;
  }

 private:
  Json object_;
  const std::string prefix_;  // stands before the fields' names in messages
  absl::Status status_;
};

// ---- Rotary position embedding.

double YarnAmplitude(double factor, double scale) { return 0.1 * scale * std::log(factor) + 1; }

void ReadScaling(Fields& rope, const std::string& type, int64_t context, RopeScaling* scaling) {
  scaling->factor = rope.Real("factor", 0);
  if (type == "linear") {
    scaling->kind = RopeScaling::Kind::kLinear;
    return;
  }
  scaling->first_context = rope.Whole("original_max_position_embeddings", context);
  if (type == "llama3") {
    scaling->kind = RopeScaling::Kind::kLlama3;
    scaling->low = rope.Real("low_freq_factor", 0);
    scaling->high = rope.Real("high_freq_factor", 0);
    return;
  }
  scaling->kind = RopeScaling::Kind::kYarn;
  scaling->fast = rope.Real("beta_fast", 32);
  scaling->slow = rope.Real("beta_slow", 1);
  scaling->whole = rope.Bool("truncate", true);
  scaling->amplitude = rope.Real("attention_factor", 0);
  const double scale = rope.Real("mscale", 0), all = rope.Real("mscale_all_dim", 0);
  if (scaling->amplitude == 0 && scale > 0 && all > 0 && scaling->factor > 1) {
    scaling->amplitude =
        YarnAmplitude(scaling->factor, scale) / YarnAmplitude(scaling->factor, all);
  }
}

// Reads rope_theta and rope_scaling, or rope_parameters, where newer versions have both.
absl::Status ReadRope(Fields& fields, ModelConfig* model) {
  model->rope_theta = fields.Real("rope_theta", 10000);
  fields.MustBe("partial_rotary_factor", 1.0);
  for (const std::string key : {"rope_scaling", "rope_parameters"}) {
    const Json value = fields.Take(key);
    if (value.is_null()) continue;
    if (!value.is_object()) {
      fields.Refuse(key, value, "an object");
      return fields.status();
    }
    Fields rope(value, key + ".");
    model->rope_theta = rope.Real("rope_theta", model->rope_theta);
    rope.MustBe("partial_rotary_factor", 1.0);
    const std::string old_type = rope.Text("type", "default");
    const std::string type = rope.Text("rope_type", old_type);
    if (type == "linear" || type == "llama3" || type == "yarn") {
      ReadScaling(rope, type, model->context, &model->rope_scaling);
    } else if (type != "default") {
      rope.Refuse("rope_type", type, "default, linear, llama3 or yarn");
    }
    BURST_RETURN_IF_ERROR(rope.Finish({}));
  }
  return fields.status();
}

// ---- Weights in float8 (DeepSeek-V3, arXiv 2412.19437): e4m3, with a scale for each block.

// Reads quantization_config. The activations here are not float8, so what it says of them counts
// only if they have scales of their own.
absl::Status ReadQuantization(Fields& fields, HuggingFaceConfig* config) {
  const Json object = fields.Take("quantization_config");
  if (object.is_null()) return fields.status();
  if (!object.is_object()) fields.Refuse("quantization_config", object, "an object");
  BURST_RETURN_IF_ERROR(fields.status());
  Fields quantization(object, "quantization_config.");
  const std::string method = quantization.Text("quant_method", "");
  if (method != "fp8") quantization.Refuse("quant_method", method, "\"fp8\"");
  quantization.MustBe("fmt", "e4m3");
  quantization.MustBe("activation_scheme", "dynamic");
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
  return quantization.Finish({"modules_to_not_convert", "dequantize", "scale_fmt"});
}

// ---- The families.

// Checks layer_types, which names the attention of each layer. All layers must have the same one.
absl::Status CheckLayerTypes(Fields& fields, const HuggingFaceConfig& config) {
  const Json types = fields.Take("layer_types");
  if (types.is_null()) return fields.status();
  const char* const only = config.window > 0 ? "sliding_attention" : "full_attention";
  const bool all =
      types.is_array() && static_cast<int64_t>(types.size()) == config.model.layers &&
      std::all_of(types.begin(), types.end(), [&](const Json& layer) { return layer == only; });
  if (!all) {
    fields.Refuse("layer_types", types, absl::StrCat("\"", only, "\" for every layer"));
  }
  return fields.status();
}

// Reads sliding_window. null means no window; a missing field means the family's window.
int64_t ReadWindow(Fields& fields) {
  constexpr int64_t kFamilys = 4096;
  if (!fields.Names("sliding_window")) return kFamilys;
  return fields.Size("sliding_window", 0);
}

// Reads Qwen's window, which is for the layers from max_window_layers on, if it is used at all.
void ReadQwenWindow(Fields& fields, HuggingFaceConfig* config) {
  const bool used = fields.Bool("use_sliding_window", false);
  const int64_t window = ReadWindow(fields);
  const int64_t full_layers = fields.Whole("max_window_layers", 28);
  if (!used || full_layers >= config->model.layers) return;
  if (full_layers > 0) {
    fields.Refuse("max_window_layers", full_layers,
                  "0 or all layers: every layer has the same attention here");
  }
  config->window = window;
}

absl::Status ReadLlamaLike(Fields& fields, const std::string& type, HuggingFaceConfig* config) {
  ModelConfig& m = config->model;
  m.family = Family::kLlama;
  m.layers = fields.Size("num_hidden_layers");
  m.width = fields.Size("hidden_size");
  m.heads = fields.Size("num_attention_heads");
  m.kv_heads = type == "llama" ? fields.Size("num_key_value_heads", m.heads)
                               : fields.Size("num_key_value_heads");
  m.head_dim = fields.Whole("head_dim", type == "qwen3" ? 128 : 0);
  m.ffn = fields.Size("intermediate_size");
  m.vocab = fields.Size("vocab_size");
  m.context = fields.Size("max_position_embeddings");
  m.norm_eps = fields.Real("rms_norm_eps", 1e-6);
  m.tied_embeddings = fields.Bool("tie_word_embeddings", false);
  m.qkv_bias = type == "qwen2";
  m.qk_norm = type == "qwen3";
  fields.MustBe("hidden_act", "silu");
  fields.MustBe("attention_bias", false);  // the output projection would have a bias, too
  fields.MustBe("mlp_bias", false);
  fields.MustBe("use_mrope", false);
  BURST_RETURN_IF_ERROR(fields.status());
  if (type == "mistral") {
    config->window = ReadWindow(fields);
  } else if (type != "llama") {
    ReadQwenWindow(fields, config);
  }
  BURST_RETURN_IF_ERROR(CheckLayerTypes(fields, *config));
  return ReadRope(fields, &m);
}

absl::Status ReadGpt2(Fields& fields, HuggingFaceConfig* config) {
  ModelConfig& m = config->model;
  m.family = Family::kGpt2;
  m.layers = fields.Size("n_layer");
  m.width = fields.Size("n_embd");
  m.heads = fields.Size("n_head");
  m.ffn = fields.Size("n_inner", 4 * m.width);
  m.vocab = fields.Size("vocab_size");
  m.context = fields.Size("n_positions");
  m.norm_eps = fields.Real("layer_norm_epsilon", 1e-5);
  m.tied_embeddings = fields.Bool("tie_word_embeddings", true);
  const std::string activation = fields.Text("activation_function", "gelu_new");
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh") {  // two names of one function
    fields.Refuse("activation_function", activation, "gelu_new or gelu_pytorch_tanh");
  }
  fields.MustBe("scale_attn_weights", true);
  fields.MustBe("scale_attn_by_inverse_layer_idx", false);
  fields.MustBe("reorder_and_upcast_attn", false);
  return fields.status();
}

constexpr struct {
  const char* type;
  const char* architecture;
} kFamilies[] = {{"llama", "LlamaForCausalLM"},
                 {"mistral", "MistralForCausalLM"},
                 {"qwen2", "Qwen2ForCausalLM"},
                 {"qwen3", "Qwen3ForCausalLM"},
                 {"gpt2", "GPT2LMHeadModel"}};

void CheckArchitecture(Fields& fields, const std::string& type) {
  for (const auto& family : kFamilies) {
    if (type == family.type) {
      return fields.MustBe("architectures", std::vector<std::string>{family.architecture});
    }
  }
  fields.Refuse("model_type", type, "llama, mistral, qwen2, qwen3 or gpt2");
}

}  // namespace

absl::StatusOr<HuggingFaceConfig> ParseHuggingFaceConfig(absl::string_view json) {
  absl::StatusOr<Json> parsed = ParseJson(json);
  if (!parsed.ok() || !parsed->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "config.json: not a JSON object", parsed.ok() ? "" : "; ", parsed.status().message()));
  }
  Fields fields(*std::move(parsed), "");
  const std::string type = fields.Text("model_type", "");
  CheckArchitecture(fields, type);
  fields.MustBe("is_encoder_decoder", false);
  fields.MustBe("is_decoder", false);
  fields.MustBe("add_cross_attention", false);
  fields.MustBe("pruned_heads", Json::object());
  HuggingFaceConfig config;
  config.dtype = fields.Text("torch_dtype", "");
  config.dtype = fields.Text("dtype", config.dtype);
  BURST_RETURN_IF_ERROR(fields.status());
  BURST_RETURN_IF_ERROR(type == "gpt2" ? ReadGpt2(fields, &config)
                                       : ReadLlamaLike(fields, type, &config));
  BURST_RETURN_IF_ERROR(ReadQuantization(fields, &config));
  BURST_RETURN_IF_ERROR(fields.Finish(WithoutInfluence()));
  const absl::Status valid = config.model.Validate();
  if (!valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", valid.message()));
  }
  config.model = config.model.WithDefaults();
  return config;
}

}  // namespace burst
