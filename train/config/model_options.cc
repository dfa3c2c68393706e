// The options that say what the model is.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/config/option_group.h"

namespace burst {
namespace {

void AddRows(TrainConfig* c, OptionTable* t) {
  t->Group("model");
  t->Add("model", &c->model)
      .Basic()
      .MayChange()
      .Of(Scope::kHost)
      .Help(
          "Train a preset (llama_tiny, nanogpt_cpu, d12, ...), a JSON file or JSON "
          "(docs/training/models.md), or start from a folder with weights.");
  t->Add("model.dropout", &c->dropout)
      .Min(0)
      .Below(1)
      .Or(-1)
      .Help("Drop activations with this probability. -1: as the model says.");
  t->Add("model.attention_dropout", &c->attention_dropout)
      .Min(0)
      .Below(1)
      .Or(-1)
      .Help("Drop weights of attention with this probability. -1: as the model says.");
  t->Add("model.attention_softcap", &c->attention_softcap)
      .Min(0)
      .Or(-1)
      .Help(
          "Cap the scores s of attention at C, as C tanh(s / C). 0: no cap. -1: as the model "
          "says.");
  t->Add("model.logits_softcap", &c->logits_softcap)
      .Min(0)
      .Or(-1)
      .Help("Cap the logits l at C, as C tanh(l / C). 0: no cap. -1: as the model says.");
  t->Add("model.attention_sinks", &c->attention_sinks)
      .Help(
          "Add a learned logit of each query head to the softmax of attention. false: as the "
          "model says.");
  t->Add("model.rope_theta", &c->rope_theta)
      .Min(1)
      .Or(-1)
      .Help("Set the base of RoPE's angles. -1: as the model says.");
  t->Add("model.yarn_factor", &c->yarn_factor)
      .Min(1)
      .Max(1e6)
      .Or(-1)
      .Help("Scale RoPE by YaRN for contexts F times as long. -1: as the model says.");
  t->Add("model.yarn_context", &c->yarn_context)
      .Min(1)
      .Or(-1)
      .Unit("tokens")
      .Help("Count --model.yarn_factor from contexts of N tokens. -1: from the model's.");
  t->Add("model.vocab", &c->vocab)
      .Min(1)
      .Or(-1)
      .Unit("tokens")
      .Help(
          "Enlarge the vocabulary of a model with weights; each new row is the mean of the old "
          "ones. -1: as the model says.");
  t->Add("ignore_fields", &c->ignore_fields)
      .MayChange()
      .Help("Read config.json of --model without these fields, separated by commas.");
  // A file of an earlier version, or a run's config.json, may name these options.
  for (const char* key : {"dropout", "attention_dropout", "attention_softcap", "attention_sinks"}) {
    t->Renamed(key, absl::StrCat("model.", key));
  }
  t->Add("seqlen", &c->seqlen)
      .Basic()
      .Min(1)
      .Unit("tokens")
      .Help("Train on sequences of N tokens; the ranks need not divide N.");
  t->Add("window", &c->window)
      .Min(-1)
      .Max(int64_t{1} << 31)
      .Unit("keys")
      .Help(
          "Let each query see its last N keys, but in the model's full_layers. 0: all. -1: as the "
          "weights of --model, else all.");
}

absl::StatusOr<Pretrained> FindPretrainedOption(const std::string& folder, const TrainConfig& c) {
  absl::StatusOr<Pretrained> found = FindPretrained(folder, IgnoredFields(c));
  if (found.ok()) return found;
  return InvalidOption("model", found.status().message());
}

// Changes RoPE as --model.rope_theta, --model.yarn_factor and --model.yarn_context say.
absl::Status OverrideRope(const TrainConfig& c, ModelConfig* model) {
  if (c.yarn_context != -1 && c.yarn_factor == -1) {
    return InvalidOption("model.yarn_context", "must be -1 without --model.yarn_factor; got ",
                         c.yarn_context, "; give both");
  }
  if (model->family == Family::kGpt2 && (c.rope_theta != -1 || c.yarn_factor != -1)) {
    return InvalidOption(c.rope_theta != -1 ? "model.rope_theta" : "model.yarn_factor",
                         "must be -1 for a gpt2 model, which has no RoPE; leave it out");
  }
  if (c.rope_theta != -1) model->rope_theta = c.rope_theta;
  if (c.yarn_factor == -1) return absl::OkStatus();
  RopeScaling yarn;
  yarn.kind = RopeScaling::Kind::kYarn;
  yarn.factor = c.yarn_factor;
  const int64_t before = model->rope_scaling.first_context;
  yarn.first_context = c.yarn_context != -1 ? c.yarn_context : before > 0 ? before : model->context;
  if (yarn.first_context == 0) {
    return InvalidOption("model.yarn_context", "must be the context that --model was made for, ",
                         "which it does not say; got -1; give it");
  }
  const double longer = c.yarn_factor * static_cast<double>(yarn.first_context);
  model->rope_scaling = yarn;
  model->context =
      std::max(model->context, static_cast<int64_t>(std::min<double>(longer, 1ull << 30)));
  return absl::OkStatus();
}

// Enlarges the vocabulary as --model.vocab says.
absl::Status OverrideVocab(const TrainConfig& c, const std::optional<Pretrained>& pretrained,
                           ModelConfig* model) {
  if (c.vocab == -1 || c.vocab == model->vocab) return absl::OkStatus();
  if (c.vocab < model->vocab) {
    return InvalidOption("model.vocab", "must be at least the ", model->vocab,
                         " tokens of --model; got ", c.vocab, "; give more, or leave it out");
  }
  if (pretrained.has_value() && pretrained->kind == Pretrained::Kind::kCheckpoint) {
    return InvalidOption("model.vocab", "must be the ", model->vocab,
                         " tokens of the checkpoint in --model; got ", c.vocab,
                         "; export it, and give the Hugging Face directory as --model");
  }
  model->vocab = c.vocab;
  return absl::OkStatus();
}

// Sets dropout, softcap and sinks as the options say, and checks the model.
absl::Status OverrideAttention(const TrainConfig& c, const std::string& name, bool has_weights,
                               ModelConfig* model) {
  if (c.dropout != -1) model->dropout = c.dropout;
  if (c.attention_dropout != -1) model->attention_dropout = c.attention_dropout;
  if (c.attention_softcap != -1) model->attention_softcap = c.attention_softcap;
  if (c.logits_softcap != -1) model->logits_softcap = c.logits_softcap;
  if (c.attention_sinks && !model->attention_sinks && has_weights) {
    return InvalidOption("model.attention_sinks", "must be false for the weights of --model=", name,
                         ", which have no sinks; got true; leave it out");
  }
  if (c.attention_sinks) model->attention_sinks = true;
  const absl::Status valid = model->Validate();
  return valid.ok() ? valid : InvalidOption("model", valid.message());
}

}  // namespace

const OptionGroup kModelOptions = {AddRows};

absl::StatusOr<ModelConfig> ReadModel(TrainConfig* c, std::string* name,
                                      std::optional<Pretrained>* pretrained,
                                      std::string* lost_folder) {
  std::error_code error;  // on an error the path is not a folder
  if (c->model.empty()) {
    return InvalidOption("model", "must not be empty; give a preset: ", ModelPresetNames());
  }
  absl::StatusOr<ModelConfig> model;
  if (!ModelPreset(c->model).ok() && std::filesystem::is_directory(ResolvePath(c->model), error)) {
    c->model = ResolvePath(c->model);
    std::filesystem::path path = c->model;
    if (!path.has_filename()) path = path.parent_path();  // FOLDER/
    *name = path.filename().string();
    BURST_ASSIGN_OR_RETURN(*pretrained, FindPretrainedOption(path.string(), *c));
    model = (*pretrained)->model;
  } else if (c->resume && c->model[0] == '/' && !std::filesystem::exists(c->model, error) &&
             HoldsCheckpoints(ResolvePath(c->out))) {
    // The folder that the run began with is gone. The checkpoint has the weights and describes
    // their model.
    *lost_folder = c->model;
    *name = std::filesystem::path(c->model).filename().string();
    BURST_ASSIGN_OR_RETURN(const CheckpointInfo info,
                           ReadCheckpointInfo(CheckpointPath(ResolvePath(c->out))));
    model = info.model;
  } else if (c->model[0] == '{') {
    *name = "custom";
    model = ModelConfigFromJson(c->model);
  } else if (absl::StrContains(c->model, "/") || absl::EndsWith(c->model, ".json")) {
    const std::string path = ResolvePath(c->model);
    absl::StatusOr<std::string> json = ReadFile(path, kMaxSettingsBytes);
    if (!json.ok()) return InvalidOption("model", json.status().message());
    *name = std::filesystem::path(path).stem().string();
    model = ModelConfigFromJson(*json);
    if (!model.ok()) return InvalidOption("model", path, ": ", model.status().message());
    c->model = nlohmann::ordered_json::parse(*json, nullptr, false).dump();
  } else {
    *name = c->model;
    model = ModelPreset(c->model);
  }
  if (!model.ok()) return InvalidOption("model", model.status().message());
  if (!c->ignore_fields.empty() && !pretrained->has_value() && lost_folder->empty()) {
    return InvalidOption("ignore_fields", "must be empty unless --model is a Hugging Face ",
                         "directory; got ", c->ignore_fields, "; leave it out");
  }
  if (lost_folder->empty()) {  // else the checkpoint has the changed model
    BURST_RETURN_IF_ERROR(OverrideRope(*c, &*model));
    BURST_RETURN_IF_ERROR(OverrideVocab(*c, *pretrained, &*model));
  }
  BURST_RETURN_IF_ERROR(OverrideAttention(*c, *name, pretrained->has_value(), &*model));
  if (model->family == Family::kGpt2) {
    if (model->context == 0) model->context = c->seqlen;
    if (c->seqlen > model->context) {
      return InvalidOption("seqlen", "must be at most the ", model->context,
                           " learned positions of the model; got ", c->seqlen, "; give less");
    }
  }
  return model;
}

}  // namespace burst
