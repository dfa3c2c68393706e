// Holds what the families share: how the fields of config.json are taken, the list of families, and
// the names of tensors.
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "burst/base/check.h"
#include "train/huggingface/families/family.h"

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
                       {"lm_head_bias", "false"},
                       {"full_attn_mod", "1"},
                       {"interpolate_factor", "1"},
                       {"use_sliding_window", "false"},
                       {"sliding_window", "null"},
                       {"use_bidirectional_attention", "false"},
                       {"attn_logit_softcapping", "null"},
                       {"final_logit_softcapping", "null"},
                       {"scale_attn_weights", "true"},
                       {"scale_attn_by_inverse_layer_idx", "false"},
                       {"reorder_and_upcast_attn", "false"}};

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

Fields::Fields(Json object, std::string prefix)
    : object_(std::move(object)), prefix_(std::move(prefix)) {}

bool Fields::Has(const std::string& key) const {
  const auto it = object_.find(key);
  return it != object_.end() && !it->is_null();
}

int64_t Fields::Whole(const std::string& key, int64_t absent) {
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

int64_t Fields::Size(const std::string& key) {
  if (!Has(key)) Fail(absl::StrCat(prefix_, key, " is missing"));
  const int64_t size = Whole(key, 1);
  if (size == 0) Refuse(key, 0, "at least 1");
  return size;
}

int64_t Fields::Size(const std::string& key, int64_t absent) {
  if (Has(key)) return Size(key);
  Take(key);  // a null
  return absent;
}

double Fields::Real(const std::string& key, double absent) {
  const Json value = Take(key);
  if (value.is_null()) return absent;
  if (value.is_number()) return value.get<double>();
  Refuse(key, value, "a number");
  return absent;
}

bool Fields::Bool(const std::string& key, bool absent) {
  const Json value = Take(key);
  if (value.is_null()) return absent;
  if (value.is_boolean()) return value.get<bool>();
  Refuse(key, value, "true or false");
  return absent;
}

std::string Fields::Text(const std::string& key, const std::string& absent) {
  const Json value = Take(key);
  if (value.is_null()) return absent;
  if (value.is_string()) return value.get<std::string>();
  Refuse(key, value, "a text");
  return absent;
}

std::vector<double> Fields::Reals(const std::string& key) {
  const Json value = Take(key);
  std::vector<double> numbers;
  bool valid = value.is_null() || value.is_array();
  for (size_t i = 0; valid && i < value.size(); ++i) {
    valid = value[i].is_number();
    if (valid) numbers.push_back(value[i].get<double>());
  }
  if (!valid) Refuse(key, value, "a list of numbers");
  return numbers;
}

Json Fields::Take(const std::string& key) {
  const auto it = object_.find(key);
  if (it == object_.end()) return Json();
  Json value = *it;
  object_.erase(it);
  return value;
}

std::optional<Fields> Fields::Object(const std::string& key) {
  Json value = Take(key);
  if (value.is_object()) return Fields(std::move(value), absl::StrCat(prefix_, key, "."));
  if (!value.is_null()) Refuse(key, value, "an object");
  return std::nullopt;
}

void Fields::MustBe(const std::string& key, const std::vector<Json>& values) {
  const Json value = Take(key);
  if (value.is_null() || absl::c_linear_search(values, value)) return;
  const std::string valid = absl::StrJoin(
      values, " or ", [](std::string* out, const Json& one) { absl::StrAppend(out, one.dump()); });
  Refuse(key, value, valid + "; nothing else is supported");
}

void Fields::Refuse(const std::string& key, const Json& value, absl::string_view valid) {
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  Fail(absl::StrCat(prefix_, key, " is ", text.substr(0, 100), "; it must be ", valid));
}

void Fields::Fail(absl::string_view message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("config.json: ", message));
}

absl::Status Fields::Finish() {
  for (const auto& harmless : kHarmlessValues) {
    const absl::string_view key = absl::StripPrefix(harmless.field, prefix_);
    const bool here = prefix_.empty() || key != harmless.field;
    if (here) MustBe(std::string(key), {Json::parse(harmless.value)});
  }
  for (const auto& [key, value] : object_.items()) {
    const std::string field = prefix_ + key;
    if (IsWithoutInfluence(field)) continue;
    Fail(absl::StrCat("the field ", field, " is not supported; --ignore_fields=", field,
                      " reads the model as if it were not there"));
  }
  return status_;
}

bool IsWithoutInfluence(absl::string_view field) {
  return absl::c_linear_search(kWithoutInfluence, field);
}

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
