#include "train/config/config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "burst/base/status.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

// The one list of options: calls f(name, field) for each, in order.
template <typename Config, typename Function>
void ForEachOption(Config& c, Function&& f) {
  f("data", c.data);
  f("val_data", c.val_data);
  f("tokenizer", c.tokenizer);
  f("packed", c.packed);
  f("model", c.model);
  f("dropout", c.dropout);
  f("seqlen", c.seqlen);
  f("window", c.window);
  f("batch", c.batch);
  f("accumulate", c.accumulate);
  f("steps", c.steps);
  f("lr", c.lr);
  f("min_lr", c.min_lr);
  f("warmup", c.warmup);
  f("schedule", c.schedule);
  f("weight_decay", c.weight_decay);
  f("beta1", c.beta1);
  f("beta2", c.beta2);
  f("eps", c.eps);
  f("clip", c.clip);
  f("seed", c.seed);
  f("device", c.device);
  f("precision", c.precision);
  f("recompute", c.recompute);
  f("ranks", c.ranks);
  f("dp", c.dp);
  f("sp", c.sp);
  f("comm", c.comm);
  f("strategy", c.strategy);
  f("ulysses", c.ulysses);
  f("ranks_per_node", c.ranks_per_node);
  f("layout", c.layout);
  f("backward", c.backward);
  f("ring_grad_dtype", c.ring_grad_dtype);
  f("threads", c.threads);
  f("deterministic", c.deterministic);
  f("out", c.out);
  f("resume", c.resume);
  f("eval_every", c.eval_every);
  f("eval_batches", c.eval_batches);
  f("checkpoint_every", c.checkpoint_every);
  f("log_every", c.log_every);
  f("sample", c.sample);
}

const char* Name(TokenizerChoice choice) {
  return choice == TokenizerChoice::kAuto   ? "auto"
         : choice == TokenizerChoice::kByte ? "byte"
                                            : "char";
}
const char* Name(CommKind comm) {
  switch (comm) {
    case CommKind::kAuto:
      return "auto";
    case CommKind::kThreads:
      return "threads";
    case CommKind::kMpi:
      return "mpi";
    case CommKind::kNccl:
      return "nccl";
  }
  return "?";
}

const char* Name(DeviceChoice device) {
  return device == DeviceChoice::kAuto ? "auto" : device == DeviceChoice::kCpu ? "cpu" : "cuda";
}
// Parse(text, &field): what an option's text means, by the type of its field.
absl::Status Parse(absl::string_view text, std::string* value) {
  *value = std::string(text);
  return absl::OkStatus();
}

absl::Status Parse(absl::string_view text, int64_t* value) {
  if (absl::SimpleAtoi(text, value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a whole number"));
}

absl::Status Parse(absl::string_view text, double* value) {
  if (absl::SimpleAtod(text, value) && std::isfinite(*value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a finite number"));
}

absl::Status Parse(absl::string_view text, bool* value) {
  if (absl::SimpleAtob(text, value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is neither true nor false"));
}

absl::Status Parse(absl::string_view text, TokenizerChoice* value) {
  for (auto choice : {TokenizerChoice::kAuto, TokenizerChoice::kByte, TokenizerChoice::kChar}) {
    if (text == Name(choice)) return *value = choice, absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not one of auto, byte, char"));
}

absl::Status Parse(absl::string_view text, CommKind* value) {
  for (auto kind : {CommKind::kAuto, CommKind::kThreads, CommKind::kMpi, CommKind::kNccl}) {
    if (text == Name(kind)) return *value = kind, absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is not one of auto, threads, mpi, nccl"));
}

absl::Status Parse(absl::string_view text, DeviceChoice* value) {
  for (auto device : {DeviceChoice::kAuto, DeviceChoice::kCpu, DeviceChoice::kCuda}) {
    if (text == Name(device)) return *value = device, absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not one of auto, cpu, cuda"));
}

absl::Status Parse(absl::string_view text, Precision* value) {
  for (auto precision : {Precision::kAuto, Precision::kFp32, Precision::kTf32, Precision::kBf16}) {
    if (text == Name(precision)) return *value = precision, absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is not one of auto, fp32, tf32, bf16"));
}

template <typename T>
absl::Status Assign(absl::StatusOr<T> parsed, T* value) {
  if (parsed.ok()) *value = *parsed;
  return parsed.status();
}
absl::Status Parse(absl::string_view text, LrShape* value) {
  return Assign(ParseLrShape(text), value);
}
absl::Status Parse(absl::string_view text, Recompute* value) {
  return Assign(ParseRecompute(text), value);
}
absl::Status Parse(absl::string_view text, Layout* value) {
  return Assign(ParseLayout(text), value);
}
absl::Status Parse(absl::string_view text, Strategy* value) {
  return Assign(ParseStrategy(text), value);
}
absl::Status Parse(absl::string_view text, BackwardDirection* value) {
  return Assign(ParseBackwardDirection(text), value);
}
absl::Status Parse(absl::string_view text, RingGradDType* value) {
  return Assign(ParseRingGradDType(text), value);
}

template <typename T>
Json ToJsonValue(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return Name(value);
  } else {
    return value;
  }
}

}  // namespace

const char* Name(Precision precision) {
  switch (precision) {
    case Precision::kAuto:
      return "auto";
    case Precision::kFp32:
      return "fp32";
    case Precision::kTf32:
      return "tf32";
    case Precision::kBf16:
      return "bf16";
  }
  return "?";
}

bool TrainConfig::operator==(const TrainConfig& other) const {
  return TrainConfigToJson(*this) == TrainConfigToJson(other) && out == other.out &&
         resume == other.resume;
}

std::vector<std::string> OptionNames() {
  std::vector<std::string> names;
  TrainConfig config;
  ForEachOption(config, [&](const char* name, const auto&) { names.push_back(name); });
  return names;
}

absl::Status SetOption(TrainConfig* config, absl::string_view name, absl::string_view text) {
  absl::Status status = absl::InvalidArgumentError(absl::StrCat("there is no option --", name));
  ForEachOption(*config, [&](const char* option, auto& field) {
    if (name != option) return;
    status = Parse(text, &field);
    if (!status.ok()) {
      status = absl::InvalidArgumentError(absl::StrCat("--", option, ": ", status.message()));
    }
  });
  return status;
}

std::string TrainConfigToJson(const TrainConfig& config) {
  Json json = Json::object();
  ForEachOption(config, [&](const std::string& name, const auto& field) {
    if (name == "out" || name == "resume") return;
    json[name] = ToJsonValue(field);
    // A model given as JSON reads better as an object.
    if (name != "model") return;
    Json model = Json::parse(config.model, nullptr, false);
    if (model.is_object()) json[name] = std::move(model);
  });
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::StatusOr<TrainConfig> TrainConfigFromJson(absl::string_view text) {
  const Json json = Json::parse(text.begin(), text.end(), nullptr, false);
  if (!json.is_object()) return absl::InvalidArgumentError("not a JSON object of options");
  TrainConfig config;
  for (const auto& [name, value] : json.items()) {
    BURST_RETURN_IF_ERROR(
        SetOption(&config, name, value.is_string() ? value.get<std::string>() : value.dump()));
  }
  return config;
}

absl::Status CheckResume(const TrainConfig& before, const TrainConfig& after) {
  // What may change: how long, how fast, on what, and what is shown. The rest makes another run.
  const std::vector<absl::string_view> free = absl::StrSplit(
      "data,val_data,model,steps,lr,min_lr,warmup,schedule,clip,device,precision,recompute,"
      "deterministic,"
      "threads,ranks,dp,sp,comm,strategy,ulysses,ranks_per_node,layout,backward,"
      "ring_grad_dtype,out,resume,eval_every,eval_batches,checkpoint_every,log_every,sample",
      ',');
  const auto texts = [](const TrainConfig& config) {
    std::vector<std::string> values;
    ForEachOption(config, [&](const char*, const auto& field) {
      values.push_back(ToJsonValue(field).dump());
    });
    return values;
  };
  const std::vector<std::string> names = OptionNames(), was = texts(before), is = texts(after);
  for (size_t i = 0; i < names.size(); ++i) {
    if (was[i] == is[i] || absl::c_linear_search(free, names[i])) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("--", names[i], ": ", is[i], " differs from the run's ", was[i],
                     "; a run is resumed with what it was started with"));
  }
  return absl::OkStatus();
}

}  // namespace burst
