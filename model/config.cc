#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "burst/base/enum_names.h"
#include "burst/base/json.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// Visits every field. Reading and writing JSON use this order.
template <typename Config, typename Visitor>
void VisitFields(Config& config, Visitor visit) {
  visit("family", config.family);
  visit("layers", config.layers);
  visit("width", config.width);
  visit("heads", config.heads);
  visit("kv_heads", config.kv_heads);
  visit("head_dim", config.head_dim);
  visit("ffn", config.ffn);
  visit("vocab", config.vocab);
  visit("context", config.context);
  visit("tied_embeddings", config.tied_embeddings);
  visit("dropout", config.dropout);
  visit("attention_dropout", config.attention_dropout);
  visit("attention_softcap", config.attention_softcap);
  visit("logits_softcap", config.logits_softcap);
  visit("attention_sinks", config.attention_sinks);
  visit("qkv_bias", config.qkv_bias);
  visit("attention_out_bias", config.attention_out_bias);
  visit("ffn_bias", config.ffn_bias);
  visit("qk_norm", config.qk_norm);
  visit("norm_position", config.norm_position);
  visit("unit_offset_norms", config.unit_offset_norms);
  visit("gate", config.gate);
  visit("scaled_embedding", config.scaled_embedding);
  visit("score_channels", config.score_channels);
  visit("rope_channels", config.rope_channels);
  visit("rope_theta", config.rope_theta);
  visit("rope_scaling", config.rope_scaling);
  visit("full_layers", config.full_layers);
  visit("window_rope_theta", config.window_rope_theta);
  visit("norm_eps", config.norm_eps);
  visit("init_std", config.init_std);
}

template <typename Scaling, typename Visitor>
void VisitScalingFields(Scaling& scaling, Visitor visit) {
  visit("kind", scaling.kind);
  visit("factor", scaling.factor);
  visit("first_context", scaling.first_context);
  visit("low", scaling.low);
  visit("high", scaling.high);
  visit("fast", scaling.fast);
  visit("slow", scaling.slow);
  visit("whole", scaling.whole);
  visit("short_factors", scaling.short_factors);
  visit("long_factors", scaling.long_factors);
  visit("amplitude", scaling.amplitude);
}

constexpr EnumName<Family> kFamilies[] = {{Family::kLlama, "llama"}, {Family::kGpt2, "gpt2"}};
constexpr EnumName<QkNorm> kQkNorms[] = {
    {QkNorm::kNone, "none"}, {QkNorm::kHead, "head"}, {QkNorm::kAll, "all"}};
constexpr EnumName<NormPosition> kNormPositions[] = {{NormPosition::kBefore, "before"},
                                                     {NormPosition::kAfter, "after"},
                                                     {NormPosition::kBoth, "both"}};
constexpr EnumName<Gate> kGates[] = {{Gate::kSilu, "silu"}, {Gate::kGelu, "gelu"}};

// Returns the names of a field's values. Overloads for each enum of ModelConfig.
const auto& NamesOf(Family) { return kFamilies; }
const auto& NamesOf(QkNorm) { return kQkNorms; }
const auto& NamesOf(NormPosition) { return kNormPositions; }
const auto& NamesOf(Gate) { return kGates; }

template <typename T>
absl::Status Invalid(absl::string_view key, const T& value, absl::string_view valid) {
  return absl::InvalidArgumentError(
      absl::StrCat("model ", key, ": must be ", valid, "; got ", value));
}

// The largest size: enough for any model, and two of them multiplied do not overflow.
constexpr int64_t kMaxSize = int64_t{1} << 24;
constexpr int64_t kMaxInt32 = (int64_t{1} << 31) - 1;  // tokens and positions are int32

absl::Status CheckRange(absl::string_view key, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return Invalid(key, value, absl::StrCat("an integer from ", min, " to ", max));
}

// Checks the fields that say how layers differ.
absl::Status CheckLayers(const ModelConfig& config) {
  int64_t least = 0;
  for (const int64_t layer : config.full_layers) {
    if (layer < least || layer >= config.layers) {
      return Invalid("full_layers", absl::StrCat("[", absl::StrJoin(config.full_layers, ","), "]"),
                     absl::StrCat("increasing numbers from 0, below layers ", config.layers));
    }
    least = layer + 1;
  }
  const double theta = config.window_rope_theta;
  if (theta == 0) return absl::OkStatus();
  if (config.family == Family::kGpt2) {
    return Invalid("window_rope_theta", theta, "0 for gpt2, which has no RoPE");
  }
  if (theta >= 1 && std::isfinite(theta)) return absl::OkStatus();
  return Invalid("window_rope_theta", theta, "at least 1, or 0 for rope_theta");
}

// Checks that a gpt2 model has no property that is for llama models only.
absl::Status CheckGpt2(const ModelConfig& config) {
  for (const auto& [key, value] : {std::make_pair("qkv_bias", config.qkv_bias),
                                   std::make_pair("attention_out_bias", config.attention_out_bias),
                                   std::make_pair("ffn_bias", config.ffn_bias)}) {
    if (value) return Invalid(key, "true", "false for gpt2, whose layers all have biases");
  }
  if (config.qk_norm != QkNorm::kNone) {
    return Invalid("qk_norm", NameOf(config.qk_norm, kQkNorms), "none for gpt2");
  }
  if (config.norm_position != NormPosition::kBefore) {
    return Invalid("norm_position", NameOf(config.norm_position, kNormPositions),
                   "before for gpt2");
  }
  for (const auto& [key, value] : {std::make_pair("unit_offset_norms", config.unit_offset_norms),
                                   std::make_pair("scaled_embedding", config.scaled_embedding)}) {
    if (value) return Invalid(key, "true", "false for gpt2");
  }
  if (config.gate != Gate::kSilu) {
    return Invalid("gate", NameOf(config.gate, kGates), "silu for gpt2, which has no gate");
  }
  for (const auto& [key, value] : {std::make_pair("score_channels", config.score_channels),
                                   std::make_pair("rope_channels", config.rope_channels)}) {
    if (value != 0) return Invalid(key, value, "0 for gpt2");
  }
  if (config.rope_scaling.kind == RopeScaling::Kind::kNone) return absl::OkStatus();
  return Invalid("rope_scaling", Name(config.rope_scaling.kind),
                 "none for gpt2, which has no RoPE");
}

ModelConfig Gpt2(int64_t layers, int64_t heads, int64_t width) {
  ModelConfig config;
  config.family = Family::kGpt2;
  config.layers = layers;
  config.heads = heads;
  config.width = width;
  config.tied_embeddings = true;
  return config;
}

// The published GPT-2 of a depth.
ModelConfig PublishedGpt2(int64_t layers, int64_t heads, int64_t width) {
  ModelConfig config = Gpt2(layers, heads, width);
  config.vocab = 50257;
  config.context = 1024;
  return config;
}

ModelConfig NanoGptGpu() {
  ModelConfig config = Gpt2(6, 6, 384);
  config.dropout = 0.2;
  config.init_std = 0.02;  // as nanoGPT: of five seeds 1.474 on average, with SmallInit 1.480
  return config;
}

ModelConfig Llama(int64_t layers, int64_t heads, int64_t kv_heads, int64_t width, int64_t ffn,
                  int64_t vocab) {
  ModelConfig config;
  config.layers = layers;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.width = width;
  config.ffn = ffn;
  config.vocab = vocab;
  return config;
}

const std::vector<std::pair<std::string, ModelConfig>>& Presets() {
  static const auto* presets = new std::vector<std::pair<std::string, ModelConfig>>{
      {"llama_tiny", Llama(4, 6, 2, 192, 512, 0)},  // the default: two minutes on two cores
      {"llama_1b", Llama(16, 16, 8, 2048, 8192, 32000)},
      {"nanogpt_cpu", Gpt2(4, 4, 128)},  // nanoGPT's settings for Shakespeare by characters
      {"nanogpt_gpu", NanoGptGpu()},
      {"d12", PublishedGpt2(12, 12, 768)},  // 124M
      {"d24", PublishedGpt2(24, 16, 1024)},
      {"d36", PublishedGpt2(36, 20, 1280)},
      {"d48", PublishedGpt2(48, 25, 1600)},  // 1.5B
  };
  return *presets;
}

// Reads one field out of a JSON object and removes the field. It keeps the first error.
struct FieldReader {
  nlohmann::json& object;
  absl::Status status;

  template <typename T>
  void operator()(const char* key, T& field) {
    const auto it = object.find(key);
    if (it == object.end() || !status.ok()) return;
    status = Read(key, *it, field);
    object.erase(it);
  }

  static absl::Status Read(const char* key, const nlohmann::json& value, int64_t& field) {
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{kMaxInt32})) {
      return Invalid(key, value.dump(), "an integer below 2^31");
    }
    field = value.get<int64_t>();
    return absl::OkStatus();
  }
  template <typename Element>
  static absl::Status Read(const char* key, const nlohmann::json& value,
                           std::vector<Element>& field) {
    if (!value.is_array()) {
      const bool layers = std::is_same_v<Element, int64_t>;
      return Invalid(key, value.dump(), layers ? "a list of layers, from 0" : "a list of numbers");
    }
    field.clear();
    for (const nlohmann::json& element : value) {
      BURST_RETURN_IF_ERROR(Read(key, element, field.emplace_back()));
    }
    return absl::OkStatus();
  }
  static absl::Status Read(const char* key, const nlohmann::json& value, double& field) {
    if (!value.is_number()) return Invalid(key, value.dump(), "a number");
    field = value.get<double>();
    return absl::OkStatus();
  }
  static absl::Status Read(const char* key, const nlohmann::json& value, bool& field) {
    if (!value.is_boolean()) return Invalid(key, value.dump(), "true or false");
    field = value.get<bool>();
    return absl::OkStatus();
  }
  template <typename Enum>
  static absl::Status Read(const char* key, const nlohmann::json& value, Enum& field) {
    std::vector<std::string> names;
    for (const auto& entry : NamesOf(field)) {
      names.push_back(absl::StrCat("\"", entry.name, "\""));
      if (value != entry.name) continue;
      field = entry.value;
      return absl::OkStatus();
    }
    return Invalid(key, value.dump(), absl::StrJoin(names, " or "));
  }
  // Checkpoints of earlier versions have true for each head, and false.
  static absl::Status Read(const char* key, const nlohmann::json& value, QkNorm& field) {
    if (!value.is_boolean()) return Read<QkNorm>(key, value, field);
    field = value.get<bool>() ? QkNorm::kHead : QkNorm::kNone;
    return absl::OkStatus();
  }
  static absl::Status Read(const char* key, const nlohmann::json& value, RopeScaling::Kind& kind) {
    if (!value.is_string()) return Invalid(key, value.dump(), "a name");
    BURST_ASSIGN_OR_RETURN(
        kind, ForSetting("rope_scaling kind", ParseRopeScaling(value.get<std::string>())));
    return absl::OkStatus();
  }
  static absl::Status Read(const char* key, const nlohmann::json& value, RopeScaling& scaling) {
    if (!value.is_object()) return Invalid(key, value.dump(), "an object with a kind");
    nlohmann::json object = value;
    FieldReader reader{object, absl::OkStatus()};
    VisitScalingFields(scaling, [&](const char* name, auto& field) { reader(name, field); });
    BURST_RETURN_IF_ERROR(reader.status);
    if (object.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("unknown key \"", object.begin().key(), "\" of the model's rope_scaling"));
  }
};

struct FieldWriter {
  nlohmann::ordered_json& object;
  template <typename T>
  void operator()(const char* key, const T& field) {
    if constexpr (std::is_enum_v<T>) {
      object[key] = NameOf(field, NamesOf(field));
    } else {
      object[key] = field;
    }
  }
  void operator()(const char* key, RopeScaling::Kind kind) { object[key] = Name(kind); }
  void operator()(const char* key, const RopeScaling& scaling) {
    nlohmann::ordered_json& nested = object[key];
    FieldWriter writer{nested};
    if (scaling.kind == RopeScaling::Kind::kNone) return writer("kind", scaling.kind);
    VisitScalingFields(scaling, [&](const char* name, const auto& field) { writer(name, field); });
  }
};

nlohmann::ordered_json ToJsonObject(const ModelConfig& config) {
  nlohmann::ordered_json object;
  FieldWriter writer{object};
  VisitFields(config, [&](const char* key, const auto& field) { writer(key, field); });
  return object;
}

constexpr EnumName<Recompute> kRecomputes[] = {{Recompute::kNone, "none"},
                                               {Recompute::kFull, "full"},
                                               {Recompute::kSelective, "selective"},
                                               {Recompute::kSequence, "sequence"}};

}  // namespace

const char* Name(Family family) { return NameOf(family, kFamilies); }

absl::StatusOr<Recompute> ParseRecompute(absl::string_view name) {
  return ParseName(name, kRecomputes);
}
const char* Name(Recompute recompute) { return NameOf(recompute, kRecomputes); }

absl::Status ModelConfig::Validate() const {
  BURST_RETURN_IF_ERROR(CheckRange("layers", layers, 1, kMaxSize));
  BURST_RETURN_IF_ERROR(CheckRange("width", width, 1, kMaxSize));
  BURST_RETURN_IF_ERROR(CheckRange("heads", heads, 1, kMaxSize));
  BURST_RETURN_IF_ERROR(CheckRange("kv_heads", kv_heads, 0, kMaxSize));
  BURST_RETURN_IF_ERROR(CheckRange("ffn", ffn, 0, kMaxSize));
  BURST_RETURN_IF_ERROR(CheckRange("vocab", vocab, 0, kMaxInt32));
  BURST_RETURN_IF_ERROR(CheckRange("context", context, 0, kMaxInt32));
  BURST_RETURN_IF_ERROR(CheckRange("head_dim", head_dim, 0, kMaxSize));
  BURST_RETURN_IF_ERROR(CheckRange("score_channels", score_channels, 0, kMaxSize));
  if (head_dim == 0 && width % heads != 0) {
    return Invalid("heads", heads, absl::StrCat("a divisor of width ", width));
  }
  if (kv_heads != 0 && heads % kv_heads != 0) {
    return Invalid("kv_heads", kv_heads, absl::StrCat("a divisor of heads ", heads, ", or 0"));
  }
  const int64_t channels = head_dim == 0 ? width / heads : head_dim;
  if (family == Family::kLlama && channels % 2 != 0) {
    return Invalid(head_dim == 0 ? "width / heads" : "head_dim", channels,
                   "even, because RoPE turns pairs of channels");
  }
  if (family == Family::kGpt2) BURST_RETURN_IF_ERROR(CheckGpt2(*this));
  if (rope_channels < 0 || rope_channels > channels || rope_channels % 2 != 0) {
    return Invalid("rope_channels", rope_channels,
                   absl::StrCat("even and at most head_dim ", channels, ", or 0 for all"));
  }
  const int64_t turned = rope_channels == 0 ? channels : rope_channels;
  if (turned < channels && score_channels != 0) {
    return Invalid("score_channels", score_channels, "0 with rope_channels below head_dim");
  }
  BURST_RETURN_IF_ERROR(rope_scaling.Validate(turned));
  if (rope_scaling.kind == RopeScaling::Kind::kYarn && rope_theta == 1) {
    return Invalid("rope_theta", rope_theta, "above 1 with yarn");
  }
  if (!(dropout >= 0 && dropout < 1)) return Invalid("dropout", dropout, "in [0, 1)");
  if (!(attention_dropout >= 0 && attention_dropout < 1)) {
    return Invalid("attention_dropout", attention_dropout, "in [0, 1)");
  }
  if (!(attention_softcap >= 0 && std::isfinite(attention_softcap))) {
    return Invalid("attention_softcap", attention_softcap, "above 0, or 0 for none");
  }
  if (!(logits_softcap >= 0 && std::isfinite(logits_softcap))) {
    return Invalid("logits_softcap", logits_softcap, "above 0, or 0 for none");
  }
  if (!(rope_theta >= 1 && std::isfinite(rope_theta))) {
    return Invalid("rope_theta", rope_theta, "at least 1");
  }
  BURST_RETURN_IF_ERROR(CheckLayers(*this));
  if (!(norm_eps > 0 && norm_eps < 1)) return Invalid("norm_eps", norm_eps, "in (0, 1)");
  if (!(init_std >= 0 && init_std < 1)) return Invalid("init_std", init_std, "in [0, 1)");
  return absl::OkStatus();
}

bool ModelConfig::IsFull(int64_t layer) const {
  return std::binary_search(full_layers.begin(), full_layers.end(), layer);
}

RopeAngles ModelConfig::AnglesOf(bool full, bool is_long) const {
  const int64_t channels = rope_channels == 0 ? head_dim : rope_channels;
  RopeAngles angles = window_rope_theta > 0 && !full
                          ? MakeRopeAngles(channels, window_rope_theta)
                          : MakeRopeAngles(channels, rope_theta, rope_scaling, is_long);
  // Queries and keys both get the amplitude, and scores are divided by sqrt(head_dim).
  if (score_channels > 0) {
    angles.amplitude *=
        std::pow(static_cast<double>(head_dim) / static_cast<double>(score_channels), 0.25);
  }
  return angles;
}

ModelConfig ModelConfig::WithDefaults() const {
  constexpr int64_t kMultiple = 64;
  ModelConfig config = *this;
  if (kv_heads == 0) config.kv_heads = heads;
  if (head_dim == 0) config.head_dim = width / heads;
  if (rope_channels == config.head_dim) config.rope_channels = 0;
  if (init_std == 0) config.init_std = std::sqrt(0.4 / static_cast<double>(width));
  if (ffn == 0) {
    const int64_t llama_ffn = (8 * width + 2) / 3;
    config.ffn =
        family == Family::kGpt2 ? 4 * width : (llama_ffn + kMultiple - 1) / kMultiple * kMultiple;
  }
  return config;
}

absl::StatusOr<ModelConfig> ModelPreset(absl::string_view name) {
  for (const auto& [preset, config] : Presets()) {
    if (name == preset) return config;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no model preset \"", name, "\"; there are ", ModelPresetNames()));
}

std::string ModelPresetNames() {
  return absl::StrJoin(Presets(), ", ", [](std::string* out, const auto& preset) {
    absl::StrAppend(out, preset.first);
  });
}

absl::StatusOr<ModelConfig> ModelConfigFromJson(absl::string_view json) {
  absl::StatusOr<nlohmann::json> parsed = ParseJson(json);
  if (!parsed.ok() || !parsed->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a model configuration must be a JSON object",
                     parsed.ok() ? "" : absl::StrCat("; ", parsed.status().message())));
  }
  nlohmann::json& object = *parsed;
  ModelConfig config;
  FieldReader reader{object, absl::OkStatus()};
  VisitFields(config, [&](const char* key, auto& field) { reader(key, field); });
  BURST_RETURN_IF_ERROR(reader.status);
  if (!object.empty()) {
    std::vector<std::string> keys;
    VisitFields(config, [&](const char* key, const auto&) { keys.push_back(key); });
    return absl::InvalidArgumentError(absl::StrCat("unknown model key \"", object.begin().key(),
                                                   "\"; the keys are ", absl::StrJoin(keys, ", ")));
  }
  BURST_RETURN_IF_ERROR(config.Validate());
  return config;
}

std::string ModelConfigToJson(const ModelConfig& config) { return ToJsonObject(config).dump(); }

std::string ModelDifference(const ModelConfig& config, const ModelConfig& other) {
  const nlohmann::ordered_json values = ToJsonObject(config), others = ToJsonObject(other);
  std::vector<std::string> differences;
  for (const auto& [key, value] : values.items()) {
    if (value == others[key]) continue;
    differences.push_back(absl::StrCat(key, " ", value.dump(), " instead of ", others[key].dump()));
  }
  return absl::StrJoin(differences, ", ");
}

}  // namespace burst
