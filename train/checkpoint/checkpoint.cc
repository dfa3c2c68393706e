#include "train/checkpoint/checkpoint.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "train/checkpoint/safetensors.h"

namespace burst {
namespace {

constexpr char kFormat[] = "burst checkpoint 1";

// The elements of a parameter in a flat buffer, as a view.
Tensor PartOf(const Tensor& flat, const Parameter& parameter) {
  return flat.Slice(0, parameter.offset, parameter.numel()).View(parameter.shape);
}

// From the file to where the tensor, this rank's part of the parameter, lives.
absl::Status ReadInto(const SafetensorsFile& file, const std::string& name,
                      const Parameter& parameter, const Tensor& tensor) {
  if (tensor.device() == DeviceType::kCpu && parameter.sharding.shards.empty()) {
    return file.Read(name, tensor);
  }
  const Tensor whole = Tensor::Empty(parameter.full_shape, tensor.dtype());
  BURST_RETURN_IF_ERROR(file.Read(name, whole));
  parameter.TakeShard(parameter.sharding.rank, whole, tensor);
  return absl::OkStatus();
}

// The whole of a parameter on rank 0 of the group, nothing on the others; part: on the CPU.
absl::StatusOr<Tensor> GatherWhole(const Parameter& parameter, const Tensor& part,
                                   Communicator* group) {
  if (group == nullptr || parameter.sharding.shards.empty()) return part;
  if (group->rank() > 0) {
    const SendBuffer send = {part.raw_data(), part.size_bytes(), 0};
    BURST_RETURN_IF_ERROR(group->Post(Channel::kCollective, {&send, 1}, {}));
    BURST_RETURN_IF_ERROR(group->Wait(Channel::kCollective));
    return Tensor();
  }
  std::vector<Tensor> parts = {part};
  std::vector<ReceiveBuffer> receives;
  for (int r = 1; r < group->world_size(); ++r) {
    parts.push_back(Tensor::Empty(parameter.ShardShape(r), part.dtype()));
    receives.push_back({parts[r].raw_data(), parts[r].size_bytes(), r});
  }
  BURST_RETURN_IF_ERROR(group->Post(Channel::kCollective, {}, receives));
  BURST_RETURN_IF_ERROR(group->Wait(Channel::kCollective));
  const Tensor whole = Tensor::Empty(parameter.full_shape, part.dtype());
  for (int r = 0; r < group->world_size(); ++r) parameter.PutShard(r, parts[r], whole);
  return whole;
}

absl::Status NotACheckpoint(const std::string& path, absl::string_view why) {
  return absl::DataLossError(absl::StrCat(path, ": not a checkpoint of this program: ", why));
}

}  // namespace

absl::Status SaveCheckpoint(const std::string& path, const CheckpointInfo& info,
                            const ParameterList& parameters, const AdamW& optimizer,
                            Communicator* group) {
  std::vector<NamedTensor> tensors;
  const auto add = [&](const std::string& prefix, const Parameter& parameter,
                       const Tensor& flat) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(Tensor whole, GatherWhole(parameter, PartOf(flat, parameter), group));
    tensors.push_back({prefix + parameter.name, std::move(whole)});
    return absl::OkStatus();
  };
  const Tensor masters = parameters.masters().To(DeviceType::kCpu);
  const Tensor m = optimizer.first_moment().To(DeviceType::kCpu);
  const Tensor v = optimizer.second_moment().To(DeviceType::kCpu);
  for (const Parameter& p : parameters.all()) BURST_RETURN_IF_ERROR(add("", p, masters));
  for (const Parameter& p : parameters.all()) {
    BURST_RETURN_IF_ERROR(add("adam.m.", p, m));
    BURST_RETURN_IF_ERROR(add("adam.v.", p, v));
  }
  if (group != nullptr && group->rank() > 0) return absl::OkStatus();
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
    const auto read = [&](const char* prefix, const Tensor& flat) {
      return ReadInto(file, absl::StrCat(prefix, p.name), p, PartOf(flat, p));
    };
    BURST_RETURN_IF_ERROR(read("", parameters->masters()));
    if (optimizer == nullptr) continue;
    BURST_RETURN_IF_ERROR(read("adam.m.", optimizer->first_moment()));
    BURST_RETURN_IF_ERROR(read("adam.v.", optimizer->second_moment()));
  }
  parameters->RoundMasters();
  if (optimizer != nullptr) {
    BURST_ASSIGN_OR_RETURN(const CheckpointInfo info, ReadCheckpointInfo(path));
    optimizer->set_updates(info.updates);
  }
  return absl::OkStatus();
}

}  // namespace burst
