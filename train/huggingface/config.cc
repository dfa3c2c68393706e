#include "train/huggingface/config.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "burst/base/json.h"
#include "burst/base/status.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// Fields that change no result, whatever their value. They say what tokens are for, or how other
// programs run, train or sample from the model. "OBJECT.FIELD" is a field within an object.
constexpr absl::string_view kWithoutInfluence[] = {
    "_name_or_path", "_attn_implementation_autoset", "_attn_implementation", "attn_implementation",
    "_commit_hash", "_flash_attn_2_enabled", "transformers_version", "transformers.js_config",
    "auto_map", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "sep_token_id", "decoder_start_token_id", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params", "prefix", "use_cache", "cache_implementation",
    "hybrid_cache", "return_dict", "output_attentions", "output_hidden_states", "torchscript",
    "tf_legacy_loss", "use_bfloat16", "gradient_checkpointing", "chunk_size_feed_forward",
    "remove_invalid_values", "max_sequence_length", "model_max_length",
    // Slices of GEMMs do not change the sum.
    "pretraining_tp",
    // Marks of the programs that made the file.
    "is_llama_config", "unsloth_fixed", "unsloth_version",
    // Settings of sampling, which older versions saved here; generation_config.json has them now.
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "diversity_penalty", "num_beams", "num_beam_groups", "num_return_sequences",
    "early_stopping", "max_length", "min_length", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
    "output_scores", "return_dict_in_generate",
    // Dropout is for training; here --model.dropout and --model.attention_dropout set it.
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout",
    "residual_dropout", "summary_first_dropout", "initializer_range",
    // These fields are for a classifier on top of GPT-2.
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    // In GPT-2 this is another name of n_positions.
    "n_ctx",
    // Whether weights were trained with the scaling or not, they are read with it.
    "rope_scaling.finetuned", "rope_parameters.finetuned",
    // The float8 weights are known by their dtype.
    "quantization_config.modules_to_not_convert", "quantization_config.dequantize",
    "quantization_config.scale_fmt"};

// Fields that change no result as long as they have this value, as JSON.
constexpr struct {
  absl::string_view field, value;
} kHarmlessValues[] = {{"is_encoder_decoder", "false"},
                       {"tie_encoder_decoder", "false"},
                       {"is_decoder", "false"},
                       {"add_cross_attention", "false"},
                       {"cross_attention_hidden_size", "null"},
                       {"pruned_heads", "{}"},
                       {"partial_rotary_factor", "1.0"},
                       {"rope_scaling.partial_rotary_factor", "1.0"},
                       {"rope_parameters.partial_rotary_factor", "1.0"},
                       {"rope_interleaved", "false"},
                       {"use_mrope", "false"},
                       {"bias", "false"},
                       {"attention_bias", "false"},
                       {"mlp_bias", "false"},
                       {"use_sliding_window", "false"},
                       {"sliding_window", "null"},
                       {"attn_logit_softcapping", "null"},
                       {"final_logit_softcapping", "null"},
                       {"scale_attn_weights", "true"},
                       {"scale_attn_by_inverse_layer_idx", "false"},
                       {"reorder_and_upcast_attn", "false"}};

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

  // Checks that every field that is left changes nothing.
  absl::Status Finish() {
    for (const auto& harmless : kHarmlessValues) {
      const absl::string_view key = absl::StripPrefix(harmless.field, prefix_);
      const bool here = prefix_.empty() || key != harmless.field;
      if (here) MustBe(std::string(key), Json::parse(harmless.value));
    }
    for (const auto& [key, value] : object_.items()) {
      const std::string field = prefix_ + key;
      if (absl::c_linear_search(kWithoutInfluence, field)) continue;
      Fail(absl::StrCat("the field ", field, " is not supported; --ignore_fields=", field,
                        " reads the model as if it were not there"));
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
  for (const std::string key : {"rope_scaling", "rope_parameters"}) {
    const Json value = fields.Take(key);
    if (value.is_null()) continue;
    if (!value.is_object()) {
      fields.Refuse(key, value, "an object");
      return fields.status();
    }
    Fields rope(value, key + ".");
    model->rope_theta = rope.Real("rope_theta", model->rope_theta);
    const std::string old_type = rope.Text("type", "default");
    const std::string type = rope.Text("rope_type", old_type);
    if (type == "linear" || type == "llama3" || type == "yarn") {
      ReadScaling(rope, type, model->context, &model->rope_scaling);
    } else if (type != "default") {
      rope.Refuse("rope_type", type, "default, linear, llama3 or yarn");
    }
    BURST_RETURN_IF_ERROR(rope.Finish());
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
  return quantization.Finish();
}

// ---- The families.

// Sets the layers without a window, of which there may be more than the model has layers. If all
// layers are, the model has no window.
void SetFullLayers(std::vector<int64_t> full, HuggingFaceConfig* config) {
  const int64_t layers = config->model.layers;
  if (static_cast<int64_t>(full.size()) >= layers) config->window = 0;
  if (config->window == 0) full.clear();
  config->model.full_layers = std::move(full);
}

// Reads layer_types, which names the attention of each layer. Only Qwen's layers may differ.
absl::Status ReadLayerTypes(Fields& fields, const std::string& type, HuggingFaceConfig* config) {
  const Json types = fields.Take("layer_types");
  const int64_t layers = config->model.layers;
  if (types.is_null()) return fields.status();
  const bool differ = absl::StartsWith(type, "qwen") && config->window > 0;
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

// Reads sliding_window. null means no window; a missing field means the family's window.
int64_t ReadWindow(Fields& fields, int64_t familys = 4096) {
  if (!fields.Names("sliding_window")) return familys;
  return fields.Size("sliding_window", 0);
}

// Reads Qwen's window, which is for the layers from max_window_layers on, if it is used at all.
void ReadQwenWindow(Fields& fields, HuggingFaceConfig* config) {
  const bool used = fields.Bool("use_sliding_window", false);
  const int64_t window = ReadWindow(fields);
  std::vector<int64_t> full(std::min(fields.Whole("max_window_layers", 28), config->model.layers));
  if (!used) return;
  std::iota(full.begin(), full.end(), 0);
  config->window = window;
  SetFullLayers(std::move(full), config);
}

absl::Status ReadLlamaLike(Fields& fields, const std::string& type, HuggingFaceConfig* config) {
  ModelConfig& m = config->model;
  m.family = Family::kLlama;
  m.layers = fields.Size("num_hidden_layers");
  m.width = fields.Size("hidden_size");
  m.heads = fields.Size("num_attention_heads");
  m.kv_heads = type == "llama" || type == "phi3" ? fields.Size("num_key_value_heads", m.heads)
                                                 : fields.Size("num_key_value_heads");
  m.head_dim = fields.Whole("head_dim", type == "qwen3" ? 128 : 0);
  m.ffn = fields.Size("intermediate_size");
  m.vocab = fields.Size("vocab_size");
  m.context = fields.Size("max_position_embeddings");
  m.norm_eps = fields.Real("rms_norm_eps", type == "phi3" ? 1e-5 : 1e-6);
  m.tied_embeddings = fields.Bool("tie_word_embeddings", false);
  m.qk_norm = type == "qwen3";
  if (type == "llama" || type == "qwen3") {
    m.qkv_bias = m.attention_out_bias = fields.Bool("attention_bias", false);
  }
  if (type == "llama") m.ffn_bias = fields.Bool("mlp_bias", false);
  if (type == "qwen2") m.qkv_bias = true;
  fields.MustBe("hidden_act", "silu");
  BURST_RETURN_IF_ERROR(fields.status());
  if (type == "mistral") {
    config->window = ReadWindow(fields);
  } else if (type == "phi3") {
    config->window = ReadWindow(fields, 0);
    fields.Take("original_max_position_embeddings");  // counts with longrope, which is refused
  } else if (type != "llama") {
    ReadQwenWindow(fields, config);
  }
  BURST_RETURN_IF_ERROR(ReadLayerTypes(fields, type, config));
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
  return fields.status();
}

constexpr struct {
  const char* type;
  const char* architecture;
} kFamilies[] = {{"llama", "LlamaForCausalLM"}, {"mistral", "MistralForCausalLM"},
                 {"phi3", "Phi3ForCausalLM"},   {"qwen2", "Qwen2ForCausalLM"},
                 {"qwen3", "Qwen3ForCausalLM"}, {"gpt2", "GPT2LMHeadModel"}};

void CheckArchitecture(Fields& fields, const std::string& type) {
  for (const auto& family : kFamilies) {
    if (type == family.type) {
      return fields.MustBe("architectures", std::vector<std::string>{family.architecture});
    }
  }
  fields.Refuse("model_type", type, "llama, mistral, phi3, qwen2, qwen3 or gpt2");
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

absl::StatusOr<std::string> WithHarmlessFields(absl::string_view json, absl::string_view other) {
  using Ordered = nlohmann::ordered_json;
  BURST_ASSIGN_OR_RETURN(Ordered object, ParseJson<Ordered>(json));
  BURST_ASSIGN_OR_RETURN(const Ordered others, ParseJson<Ordered>(other));
  for (const auto& [key, value] : others.items()) {
    if (absl::c_linear_search(kWithoutInfluence, key) && !object.contains(key)) object[key] = value;
  }
  return absl::StrCat(object.dump(2, ' ', false, Json::error_handler_t::replace), "\n");
}

absl::StatusOr<HuggingFaceConfig> ParseHuggingFaceConfig(absl::string_view json) {
  BURST_ASSIGN_OR_RETURN(Json parsed, ParseObject(json));
  Fields fields(std::move(parsed), "");
  const std::string type = fields.Text("model_type", "");
  CheckArchitecture(fields, type);
  HuggingFaceConfig config;
  config.type = type;
  config.dtype = fields.Text("torch_dtype", "");
  config.dtype = fields.Text("dtype", config.dtype);
  BURST_RETURN_IF_ERROR(fields.status());
  BURST_RETURN_IF_ERROR(type == "gpt2" ? ReadGpt2(fields, &config)
                                       : ReadLlamaLike(fields, type, &config));
  BURST_RETURN_IF_ERROR(ReadQuantization(fields, &config));
  BURST_RETURN_IF_ERROR(fields.Finish());
  const absl::Status valid = config.model.Validate();
  if (!valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", valid.message()));
  }
  config.model = config.model.WithDefaults();
  return config;
}

}  // namespace burst
