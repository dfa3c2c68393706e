// What differs between the model families of transformers: fields of config.json, and which tensors
// have which parameter. The readers and writers one folder up know nothing else of a family.
//
// A family is a function in a file of this folder, and a line in families.cc. Fields takes the
// fields of a config.json one by one, so that those that are left are unknown.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/parameters.h"
#include "train/huggingface/config.h"

namespace burst {

// The fields of a JSON object. It keeps the first error, which names a field, its value and valid
// values; values read after an error have no meaning. A null counts as a missing field.
class Fields {
 public:
  using Json = nlohmann::json;

  // prefix: stands before the fields' names in messages, such as "rope_scaling.".
  Fields(Json object, std::string prefix);

  const absl::Status& status() const { return status_; }
  bool Names(const std::string& key) const { return object_.count(key) > 0; }  // null, too
  bool Has(const std::string& key) const;

  // Take a field, or return `absent`. Whole: from 0, below 2^31. Size: at least 1; without `absent`
  // the field must be there.
  int64_t Whole(const std::string& key, int64_t absent);
  int64_t Size(const std::string& key);
  int64_t Size(const std::string& key, int64_t absent);
  double Real(const std::string& key, double absent);
  bool Bool(const std::string& key, bool absent);
  std::string Text(const std::string& key, const std::string& absent);
  std::vector<double> Reals(const std::string& key);  // a list; empty if it is missing
  Json Take(const std::string& key);
  // Takes an object's fields, or nothing where it is missing.
  std::optional<Fields> Object(const std::string& key);

  // Takes a field that may have one of these values only.
  void MustBe(const std::string& key, const std::vector<Json>& values);
  void Refuse(const std::string& key, const Json& value, absl::string_view valid);
  void Fail(absl::string_view message);

  // Checks that every field that is left changes nothing.
  absl::Status Finish();

 private:
  Json object_;
  std::string prefix_;
  absl::Status status_;
};

// Returns whether a field changes no result, whatever its value.
bool IsWithoutInfluence(absl::string_view field);

// A field of config.json that is a property of the model.
struct PropertyField {
  const char* key;
  std::variant<int64_t ModelConfig::*, double ModelConfig::*, bool ModelConfig::*> property;
  // The property where the field is missing or null; none: the field must be there. 0 stands for
  // ModelConfig's default.
  std::optional<double> missing = std::nullopt;
  bool null_is_zero = false;  // null means 0, which is written as null
};

// A field that has one of these values, if it is there. The first one is written.
struct FixedField {
  const char* key;
  std::vector<nlohmann::json> values;
};

// The names of a family's tensors.
struct TensorNames {
  std::string prefix;  // of all names except the head's; a directory may lack it
  std::string layers;  // follows the prefix; a layer's number and name follow
  // A parameter outside of the layers: the name behind the prefix, or "/NAME" without the prefix.
  std::map<std::string, std::string> outside;
  // A parameter of a layer, without ".weight" or ".bias": the tensors that have its rows.
  std::map<std::string, std::vector<std::string>> inside;
  bool transposed = false;  // the layers' matrices are stored [in, out]
  // Ends of names of tensors that are not read: masks and angles, which are computed here.
  std::vector<std::string> computed = {};
};

// The RoPE that a family may have.
struct RopeForms {
  // The names of rope_type, of which the first one of a kind is written.
  std::vector<std::pair<const char*, RopeScaling::Kind>> types = {
      {"default", RopeScaling::Kind::kNone},
      {"linear", RopeScaling::Kind::kLinear},
      {"llama3", RopeScaling::Kind::kLlama3},
      {"yarn", RopeScaling::Kind::kYarn},
      {"longrope", RopeScaling::Kind::kLongRope}};
  bool partial = false;  // partial_rotary_factor may be less than 1
  // Above 0: original_max_position_embeddings is a field of the model, and this where it is
  // missing.
  int64_t first_context = 0;
};

struct HuggingFaceFamily {
  std::string type;          // model_type
  std::string architecture;  // the one of `architectures`
  ModelConfig base;          // the properties that every model of the family has
  std::vector<PropertyField> properties;
  std::vector<FixedField> fixed;
  bool out_bias_as_qkv = false;  // attention_out_bias, without a field of its own, is qkv_bias
  std::vector<const char*> ignored = {};  // fields that change nothing in this family
  // Rates of dropout, which are written and not read: a fine-tuning run has its own.
  std::vector<std::pair<const char*, double ModelConfig::*>> rates = {};
  RopeForms rope = {};
  bool layers_differ = false;  // layer_types may name both kinds of attention
  // Reads the window, and if layer_types is missing, which layers do not have it. Null: no layer
  // has a window.
  void (*read_window)(Fields& fields, HuggingFaceConfig* config) = nullptr;
  // Writes fields in addition to properties, sliding_window and layer_types. May be null.
  void (*write_more)(const HuggingFaceConfig& config, nlohmann::ordered_json* json) = nullptr;
  TensorNames tensors;

  // Replaces the field of this property, or adds one.
  void Set(const PropertyField& field);
};

// The families, in the order in which a model without a model_type is offered to them.
const std::vector<HuggingFaceFamily>& HuggingFaceFamilies();
// Returns null for an unknown model_type.
const HuggingFaceFamily* FindFamily(absl::string_view type);

// ---- The tensors of a model.

// A tensor of a Hugging Face directory: [out, in] as in this program, or [in, out] (`transposed`)
// as in GPT-2.
struct ForeignTensor {
  std::string name;
  Shape shape;  // the shape in the directory
  bool transposed = false;

  Shape shape_here() const;  // [out, in]
};

// Returns the tensors whose rows, one after the other, make up the parameter: queries, keys and
// values, or gate and up. Other parameters have one tensor. The config's type must be known.
std::vector<ForeignTensor> ForeignTensors(const HuggingFaceConfig& config,
                                          const Parameter& parameter);

// Returns whether a tensor of a directory is not read. These are masks and angles, which this
// program computes, and the head of a tied model, which must equal its embedding
// (HuggingFaceDirectory).
bool IsComputed(const HuggingFaceConfig& config, absl::string_view name);

// Returns the prefix of the names ("model.", "transformer."), which a directory may lack.
std::string NamePrefix(const HuggingFaceConfig& config);

// ---- The files of this folder.

HuggingFaceFamily LlamaFamily();
HuggingFaceFamily MistralFamily();
HuggingFaceFamily Phi3Family();
HuggingFaceFamily Qwen2Family();
HuggingFaceFamily Qwen3Family();
HuggingFaceFamily Olmo2Family();
HuggingFaceFamily GemmaFamily();
HuggingFaceFamily Gemma2Family();
HuggingFaceFamily Gemma3Family();
HuggingFaceFamily Gpt2Family();

// Llama without biases: what most families begin with. It has no type.
HuggingFaceFamily LlamaLike();

// ---- Windows, for read_window.

// Reads sliding_window. null means no window; a missing field means the family's window.
int64_t ReadWindow(Fields& fields, int64_t missing);

// Sets the layers without a window, of which there may be more than the model has layers. If all
// layers are, the model has no window.
void SetFullLayers(std::vector<int64_t> full, HuggingFaceConfig* config);

}  // namespace burst
