#include "train/checkpoint.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "train/safetensors.h"

namespace burst {
namespace {

constexpr char kFormat[] = "burst checkpoint 1";

// A parameter's part of a flat buffer.
Tensor PartOf(const Tensor& flat, const Parameter& parameter) {
  return flat.Slice(0, parameter.offset, parameter.numel()).View(parameter.shape);
}

// From the file to where the tensor lives.
absl::Status ReadInto(const SafetensorsFile& file, const std::string& name, const Tensor& tensor) {
  if (tensor.device() == DeviceType::kCpu) return file.Read(name, tensor);
  const Tensor staged = Tensor::Empty(tensor.shape(), tensor.dtype());
  BURST_RETURN_IF_ERROR(file.Read(name, staged));
  tensor.CopyFrom(staged);
  return absl::OkStatus();
}

absl::Status NotACheckpoint(const std::string& path, absl::string_view why) {
  return absl::DataLossError(absl::StrCat(path, ": not a checkpoint of this program: ", why));
}

}  // namespace

absl::Status SaveCheckpoint(const std::string& path, const CheckpointInfo& info,
                            const ParameterList& parameters, const AdamW& optimizer) {
  const Tensor masters = parameters.masters().To(DeviceType::kCpu);
  const Tensor m = optimizer.first_moment().To(DeviceType::kCpu);
  const Tensor v = optimizer.second_moment().To(DeviceType::kCpu);
  std::vector<NamedTensor> tensors;
  for (const Parameter& p : parameters.all()) tensors.push_back({p.name, PartOf(masters, p)});
  for (const Parameter& p : parameters.all()) {
    tensors.push_back({absl::StrCat("adam.m.", p.name), PartOf(m, p)});
    tensors.push_back({absl::StrCat("adam.v.", p.name), PartOf(v, p)});
  }
  StringMap metadata = {{"format", kFormat},
                        {"step", absl::StrCat(info.step)},
                        {"updates", absl::StrCat(info.updates)},
                        {"seqlen", absl::StrCat(info.seqlen)},
                        {"window", absl::StrCat(info.window)},
                        {"model", ModelConfigToJson(info.model)},
                        {"config", info.config},
                        {"data_fingerprint", info.data_fingerprint}};
  if (info.tokenizer.has_value()) metadata["tokenizer"] = info.tokenizer->ToJson();
  return WriteSafetensors(path, tensors, metadata);
}

absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(const std::string& path) {
  BURST_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  const StringMap& metadata = file.metadata();
  const auto get = [&](const char* key) {
    const auto it = metadata.find(key);
    return it == metadata.end() ? std::string() : it->second;
  };
  if (get("format") != kFormat) return NotACheckpoint(path, absl::StrCat("no '", kFormat, "'"));
  CheckpointInfo info;
  for (const auto& [key, number] : {std::pair<const char*, int64_t*>{"step", &info.step},
                                    {"updates", &info.updates},
                                    {"seqlen", &info.seqlen},
                                    {"window", &info.window}}) {
    if (!absl::SimpleAtoi(get(key), number) || *number < 0) {
      return NotACheckpoint(path, absl::StrCat("no '", key, "'"));
    }
  }
  absl::StatusOr<ModelConfig> model = ModelConfigFromJson(get("model"));
  if (!model.ok()) return NotACheckpoint(path, model.status().message());
  info.model = *std::move(model);
  if (metadata.count("tokenizer") > 0) {
    absl::StatusOr<Tokenizer> tokenizer = Tokenizer::FromJson(get("tokenizer"));
    if (!tokenizer.ok()) return NotACheckpoint(path, tokenizer.status().message());
    info.tokenizer = *std::move(tokenizer);
  }
  info.config = get("config");
  info.data_fingerprint = get("data_fingerprint");
  return info;
}

absl::Status LoadCheckpoint(const std::string& path, ParameterList* parameters, AdamW* optimizer) {
  BURST_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  for (const Parameter& p : parameters->all()) {
    BURST_RETURN_IF_ERROR(ReadInto(file, p.name, PartOf(parameters->masters(), p)));
    if (optimizer == nullptr) continue;
    BURST_RETURN_IF_ERROR(
        ReadInto(file, absl::StrCat("adam.m.", p.name), PartOf(optimizer->first_moment(), p)));
    BURST_RETURN_IF_ERROR(
        ReadInto(file, absl::StrCat("adam.v.", p.name), PartOf(optimizer->second_moment(), p)));
  }
  parameters->RoundMasters();
  if (optimizer != nullptr) {
    BURST_ASSIGN_OR_RETURN(const CheckpointInfo info, ReadCheckpointInfo(path));
    optimizer->set_updates(info.updates);
  }
  return absl::OkStatus();
}

}  // namespace burst
