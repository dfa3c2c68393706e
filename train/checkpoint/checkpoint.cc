#include "train/checkpoint/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "model/transformer.h"
#include "train/checkpoint/checkpoint_set.h"
#include "train/checkpoint/safetensors.h"
#include "train/checkpoint/safetensors_writer.h"
#include "train/optimizer/muon_matrices.h"

namespace burst {
namespace {

constexpr char kFormat[] = "burst checkpoint 2";
constexpr char kWithoutChecksums[] = "burst checkpoint 1";
// Whole tensors that wait for their copy to a device.
constexpr int64_t kStagedBytes = int64_t{256} << 20;

// Returns a view of a parameter's elements in a flat buffer.
Tensor PartOf(const Tensor& flat, const Parameter& parameter) {
  return flat.Slice(0, parameter.offset, parameter.numel()).View(parameter.shape);
}

// A tensor of the checkpoint and the place of this rank's part of it.
struct Destination {
  std::string name;
  const Parameter& parameter;
  Tensor tensor;                                           // this rank's part, [shape]; may be null
  ParameterPiece wanted;                                   // the elements that are read
  std::function<void(const Tensor& part)> take = nullptr;  // receives the part, on the CPU

  bool whole() const {
    return !tensor.null() && tensor.device() == DeviceType::kCpu &&
           parameter.sharding.shards.empty();
  }
};

// Copies this rank's part out of a whole parameter.
void Take(const Destination& to, const Tensor& whole) {
  if (!to.tensor.null()) {
    return to.parameter.TakeShard(to.parameter.sharding.rank, whole, to.tensor);
  }
  to.take(to.parameter.OwnShard(whole));
}

absl::Status ReadAll(const CheckpointReader& reader, DType dtype,
                     const std::vector<Destination>& destinations) {
  for (size_t begin = 0, end; begin < destinations.size(); begin = end) {
    // Reads as many tensors at once as fit. A tensor is staged whole if only a part of it is
    // wanted.
    std::vector<CheckpointReader::Wanted> tensors;
    int64_t staged = 0;
    for (end = begin; end < destinations.size() && staged < kStagedBytes; ++end) {
      const Destination& to = destinations[end];
      const bool whole = to.whole();
      tensors.push_back({to.name, whole ? to.tensor : Tensor::Empty(to.parameter.full_shape, dtype),
                         PartOfParameter(to.parameter, to.wanted.begin, to.wanted.length)});
      if (!whole) staged += tensors.back().whole.size_bytes();
    }
    BURST_RETURN_IF_ERROR(reader.Read(tensors));
    for (size_t i = begin; i < end; ++i) {
      if (!destinations[i].whole()) Take(destinations[i], tensors[i - begin].whole);
    }
  }
  return absl::OkStatus();
}

// Returns a whole parameter on rank 0 of the group, and a null tensor on the others. part: on the
// CPU.
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

// ---- Ranks that divide the state (StateSharding).

constexpr int64_t kMessageElements = int64_t{16} << 20;  // the most elements of a message to rank 0

// A sink receives consecutive elements, on the CPU.
using Sink = std::function<absl::Status(const Tensor& elements)>;

// Sends the elements of a parameter to rank 0 of the world, in order. The parameter is the one that
// tensor parallel rank `part` of `parts` has. own: this rank's elements of it (PieceOf), on any
// device.
absl::Status SendPieces(const ParameterList& parameters, int index, const Tensor& own, int part,
                        int parts, Communicator* world, const Sink& sink) {
  for (int rank = 0; rank < parameters.sharding().ranks; ++rank) {
    const int64_t length = parameters.PieceOf(index, rank).length;
    const int owner = rank * parts + part;
    for (int64_t at = 0; at < length; at += kMessageElements) {
      const int64_t n = std::min(kMessageElements, length - at);
      if (world->rank() == owner) {
        const Tensor piece = own.Slice(0, at, n).To(DeviceType::kCpu);
        if (owner == 0) {
          BURST_RETURN_IF_ERROR(sink(piece));
          continue;
        }
        const SendBuffer send = {piece.raw_data(), piece.size_bytes(), 0};
        BURST_RETURN_IF_ERROR(world->Post(Channel::kCollective, {&send, 1}, {}));
        BURST_RETURN_IF_ERROR(world->Wait(Channel::kCollective));
      } else if (world->rank() == 0) {
        const Tensor piece = Tensor::Empty({n}, own.dtype());
        const ReceiveBuffer receive = {piece.raw_data(), piece.size_bytes(), owner};
        BURST_RETURN_IF_ERROR(world->Post(Channel::kCollective, {}, {&receive, 1}));
        BURST_RETURN_IF_ERROR(world->Wait(Channel::kCollective));
        BURST_RETURN_IF_ERROR(sink(piece));
      }
    }
  }
  return absl::OkStatus();
}

// Sends a whole parameter to rank 0, as SendPieces does.
absl::Status SendWhole(const ParameterList& parameters, int index, const Tensor& own,
                       Communicator* world, const Sink& sink) {
  const Parameter& parameter = parameters[index];
  const int parts = world->world_size() / parameters.sharding().ranks;
  if (parameter.sharding.shards.empty()) {
    return SendPieces(parameters, index, own, /*part=*/0, parts, world, sink);
  }
  const bool receives = world->rank() == 0;
  const Tensor whole = receives ? Tensor::Empty(parameter.full_shape, own.dtype()) : Tensor();
  for (int part = 0; part < parts; ++part) {
    const Tensor shard =
        receives ? Tensor::Empty(parameter.ShardShape(part), own.dtype()) : Tensor();
    int64_t at = 0;
    BURST_RETURN_IF_ERROR(
        SendPieces(parameters, index, own, part, parts, world, [&](const Tensor& elements) {
          shard.View({-1}).Slice(0, at, elements.numel()).CopyFrom(elements);
          at += elements.numel();
          return absl::OkStatus();
        }));
    if (receives) parameter.PutShard(part, shard, whole);
  }
  return receives ? sink(whole) : absl::OkStatus();
}

absl::Status NotACheckpoint(absl::string_view why) {
  return absl::DataLossError(absl::StrCat("not a checkpoint of this program: ", why));
}

bool HasPrefix(const CheckpointReader& file, absl::string_view prefix) {
  const std::vector<std::string> names = file.names();
  return std::any_of(names.begin(), names.end(),
                     [prefix](const std::string& name) { return absl::StartsWith(name, prefix); });
}

// Checks that the file's tensors can be those of the model and its optimizer. This comes before any
// memory is allocated for them.
absl::Status CheckFits(const ModelConfig& given, bool weights_alone, const CheckpointReader& file) {
  const int copies = weights_alone ? 1 : HasPrefix(file, kAveragePrefix) ? 4 : 3;
  const ModelConfig model = given.WithDefaults();
  const auto real = [](int64_t n) { return static_cast<double>(n); };
  const double elements = real(file.numel()), width = real(model.width);
  const double vectors = std::max(real(model.vocab), real(model.layers) * real(model.ffn));
  // The first check takes the largest matrices, in floating point, which does not overflow.
  const bool plausible =
      model.vocab > 0 && real(model.layers) <= real(file.names().size()) &&
      width * vectors <= elements &&
      width * real(model.heads) * real(model.head_dim) * real(model.layers) <= elements &&
      (model.family != Family::kGpt2 || real(model.context) * width <= elements);
  if (plausible) {
    const absl::StatusOr<std::vector<Parameter>> parameters = Transformer::ParametersOf(model);
    int64_t numel = 0;
    if (parameters.ok()) {
      for (const Parameter& parameter : *parameters) numel += copies * parameter.numel();
      const int64_t missing = numel - file.numel();
      if (missing == 0) return absl::OkStatus();
      // Muon's matrices have no second moment.
      if (!weights_alone && missing == MuonNumel(*parameters)) return absl::OkStatus();
    }
  }
  return NotACheckpoint("its tensors are not those of its model");
}

// Returns whether the file lacks the optimizer's state.
bool HoldsWeightsAlone(const CheckpointReader& file) { return !HasPrefix(file, "adam."); }

absl::Status ReadNumbers(const StringMap& metadata, bool weights_alone, CheckpointInfo* info) {
  constexpr int64_t kMost = int64_t{1} << 53, kMostTokens = int64_t{1} << 31;
  const struct {
    const char* key;
    int64_t* number;
    int64_t least, most;
  } rows[] = {{"step", &info->step, weights_alone ? 0 : 1, weights_alone ? 0 : kMost},
              {"updates", &info->updates, 0, kMost},
              {"seqlen", &info->seqlen, 1, kMostTokens},
              {"window", &info->window, 0, kMost}};
  for (const auto& row : rows) {
    const auto found = metadata.find(row.key);
    if (found == metadata.end() || !absl::SimpleAtoi(found->second, row.number) ||
        *row.number < row.least || *row.number > row.most) {
      return NotACheckpoint(absl::StrCat("its '", row.key, "' is missing or makes no sense"));
    }
  }
  const auto val_loss = metadata.find("val_loss");
  if (val_loss == metadata.end()) return absl::OkStatus();
  double number = 0;
  if (!absl::SimpleAtod(val_loss->second, &number) || !std::isfinite(number)) {
    return NotACheckpoint("its 'val_loss' makes no sense");
  }
  info->val_loss = number;
  return absl::OkStatus();
}

absl::Status ReadInfo(const CheckpointReader& file, CheckpointInfo* info) {
  const StringMap& metadata = file.metadata();
  const bool weights_alone = HoldsWeightsAlone(file);
  const auto get = [&](const char* key) {
    const auto it = metadata.find(key);
    return it == metadata.end() ? std::string() : it->second;
  };
  const std::string format = get("format");
  if (format != kFormat && format != kWithoutChecksums) {
    return NotACheckpoint(absl::StrCat("no '", kFormat, "'"));
  }
  info->checksums = file.has_checksums();
  info->identity = file.identity();
  if (format == kFormat && !info->checksums) return NotACheckpoint("its checksums are missing");
  BURST_RETURN_IF_ERROR(ReadNumbers(metadata, weights_alone, info));
  absl::StatusOr<ModelConfig> model = ModelConfigFromJson(get("model"));
  if (!model.ok()) return NotACheckpoint(model.status().message());
  info->model = *std::move(model);
  BURST_RETURN_IF_ERROR(CheckFits(info->model, weights_alone, file));
  if (info->model.family == Family::kGpt2 && info->seqlen > info->model.context) {
    return NotACheckpoint("its 'seqlen' is beyond its model's positions");
  }
  if (metadata.count("tokenizer") > 0) {
    absl::StatusOr<Tokenizer> tokenizer = Tokenizer::FromJson(get("tokenizer"));
    if (!tokenizer.ok()) return NotACheckpoint(tokenizer.status().message());
    if (tokenizer->vocab() > info->model.vocab) {
      return NotACheckpoint("its tokenizer has more tokens than its model's vocabulary");
    }
    info->tokenizer = *std::move(tokenizer);
  }
  info->config = get("config");
  info->data_fingerprint = get("data_fingerprint");
  return absl::OkStatus();
}

absl::Status ReadInfo(const std::string& path, const CheckpointReader& file, CheckpointInfo* info) {
  const absl::Status status = ReadInfo(file, info);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

// Returns the strings that a checkpoint holds in addition to its tensors.
StringMap Strings(const CheckpointInfo& info) {
  StringMap metadata = {{"format", kFormat},
                        {"step", absl::StrCat(info.step)},
                        {"updates", absl::StrCat(info.updates)},
                        {"seqlen", absl::StrCat(info.seqlen)},
                        {"window", absl::StrCat(info.window)},
                        {"model", ModelConfigToJson(info.model)},
                        {"config", info.config},
                        {"data_fingerprint", info.data_fingerprint}};
  if (info.tokenizer.has_value()) metadata["tokenizer"] = info.tokenizer->ToJson();
  if (info.val_loss.has_value()) metadata["val_loss"] = absl::StrFormat("%.17g", *info.val_loss);
  return metadata;
}

absl::Status SaveDivided(const std::string& path, const CheckpointInfo& info,
                         const ParameterList& parameters, const AdamW& optimizer,
                         Communicator* world) {
  std::vector<SafetensorsWriter::Entry> entries;
  for (const Parameter& p : parameters.all()) entries.push_back({p.name, "F32", p.full_shape});
  const std::vector<AdamW::StateTensor> state = optimizer.state();
  for (const Parameter& p : parameters.all()) {
    for (const AdamW::StateTensor& tensor : state) {
      if (tensor.Has(p)) entries.push_back({tensor.prefix + p.name, "F32", p.full_shape});
    }
  }
  BURST_CHECK(parameters.master_dtype() == DType::kFloat32);
  std::optional<SafetensorsWriter> writer;
  if (world->rank() == 0) {
    BURST_ASSIGN_OR_RETURN(SafetensorsWriter created,
                           SafetensorsWriter::Create(path, std::move(entries), Strings(info),
                                                     /*checksums=*/true));
    writer.emplace(std::move(created));
  }
  const auto write = [&](const Tensor& elements) {
    return writer->Write(elements.raw_data(), elements.size_bytes());
  };
  const auto send = [&](int i, const Tensor& own) {
    return SendWhole(parameters, i, own, world, write);
  };
  for (int i = 0; i < parameters.size(); ++i) {
    BURST_RETURN_IF_ERROR(send(i, parameters.Masters(i)));
  }
  for (int i = 0; i < parameters.size(); ++i) {
    const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
    for (const AdamW::StateTensor& tensor : state) {
      if (!tensor.Has(parameters[i])) continue;
      BURST_RETURN_IF_ERROR(send(i, tensor.Slice(piece.at, piece.length)));
    }
  }
  return writer.has_value() ? writer->Commit() : absl::OkStatus();
}

}  // namespace

absl::Status SaveCheckpoint(const std::string& path, const CheckpointInfo& info,
                            const ParameterList& parameters, const AdamW& optimizer,
                            Communicator* group) {
  optimizer.WriteBack();
  SynchronizeDevice(parameters.device());
  if (parameters.sharding().stage > 0) {
    return SaveDivided(path, info, parameters, optimizer, group);
  }
  std::vector<NamedTensor> tensors;
  const auto add = [&](const std::string& prefix, const Parameter& parameter,
                       const Tensor& part) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(Tensor whole, GatherWhole(parameter, part, group));
    tensors.push_back({prefix + parameter.name, std::move(whole)});
    return absl::OkStatus();
  };
  const Tensor masters = parameters.masters().To(DeviceType::kCpu);
  std::vector<AdamW::StateTensor> state = optimizer.state();
  for (AdamW::StateTensor& tensor : state) tensor.flat = tensor.flat.To(DeviceType::kCpu);
  for (const Parameter& p : parameters.all()) BURST_RETURN_IF_ERROR(add("", p, PartOf(masters, p)));
  for (const Parameter& p : parameters.all()) {
    for (const AdamW::StateTensor& tensor : state) {
      if (!tensor.Has(p)) continue;
      BURST_RETURN_IF_ERROR(add(tensor.prefix, p, tensor.Slice(p.offset, p.numel()).View(p.shape)));
    }
  }
  if (group != nullptr && group->rank() > 0) return absl::OkStatus();
  return WriteSafetensors(path, tensors, Strings(info));
}

absl::Status WriteCheckpoint(const std::string& path, const CheckpointInfo& info,
                             const StateCopy& state) {
  const std::vector<StateCopy::Part> parts = state.parts();
  std::vector<SafetensorsWriter::Entry> entries;
  for (const StateCopy::Part& part : parts) {
    entries.push_back({part.name, "F32", state.ParameterOf(part).full_shape});
  }
  BURST_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                         SafetensorsWriter::Create(path, std::move(entries), Strings(info),
                                                   /*checksums=*/true));
  for (const StateCopy::Part& part : parts) {
    BURST_RETURN_IF_ERROR(writer.Write(part.elements, part.bytes));
  }
  return writer.Commit();
}

absl::Status WriteCheckpointIndex(const std::string& path, const CheckpointInfo& info,
                                  const std::string& set, int files) {
  return WriteSetIndex(path, Strings(info), set, files);
}

absl::Status SaveWeights(const std::string& path, const CheckpointInfo& info,
                         const std::vector<Parameter>& parameters, const ReadParameter& read) {
  BURST_CHECK_EQ(info.step, 0);
  std::vector<SafetensorsWriter::Entry> entries;
  for (const Parameter& p : parameters) entries.push_back({p.name, "F32", p.full_shape});
  BURST_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                         SafetensorsWriter::Create(path, std::move(entries), Strings(info),
                                                   /*checksums=*/true));
  for (const Parameter& p : parameters) {
    const Tensor whole = Tensor::Empty(p.full_shape, DType::kFloat32);
    BURST_RETURN_IF_ERROR(read(p, whole));
    BURST_RETURN_IF_ERROR(writer.Write(whole.raw_data(), whole.size_bytes()));
  }
  return writer.Commit();
}

absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(const std::string& path) {
  BURST_ASSIGN_OR_RETURN(const CheckpointReader file, CheckpointReader::Open(path));
  CheckpointInfo info;
  BURST_RETURN_IF_ERROR(ReadInfo(path, file, &info));
  return info;
}

absl::StatusOr<CheckpointInfo> VerifyCheckpoint(const std::string& path) {
  BURST_ASSIGN_OR_RETURN(const CheckpointReader file, CheckpointReader::Open(path));
  CheckpointInfo info;
  BURST_RETURN_IF_ERROR(ReadInfo(path, file, &info));
  BURST_RETURN_IF_ERROR(file.Verify());
  return info;
}

absl::Status LoadCheckpoint(const std::string& path, ParameterList* parameters, AdamW* optimizer,
                            const std::string& identity) {
  BURST_ASSIGN_OR_RETURN(const CheckpointReader file, CheckpointReader::Open(path));
  CheckpointInfo info;
  BURST_RETURN_IF_ERROR(ReadInfo(path, file, &info));
  if (!identity.empty() && info.identity != identity) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, ": another checkpoint, of step ", info.step, ", took its place since it was chosen"));
  }
  if (optimizer != nullptr && info.step == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": holds weights alone; a run can start from them with --model=FOLDER"));
  }
  std::vector<Destination> destinations;
  const bool divided = parameters->sharding().stage > 0, in_place = parameters->has_masters();
  const auto add_state = [&](const AdamW::StateTensor& tensor, int i) {
    const Parameter& p = (*parameters)[i];
    if (!tensor.Has(p)) return;
    const std::string name = tensor.prefix + p.name;
    const ParameterPiece piece = parameters->PieceOf(i, parameters->sharding().rank);
    const Tensor own = tensor.Slice(piece.at, piece.length);
    if (!divided) return destinations.push_back({name, p, own.View(p.shape), piece});
    destinations.push_back({name, p, Tensor(), piece, [piece, own](const Tensor& part) {
                              own.CopyFrom(part.View({-1}).Slice(0, piece.begin, piece.length));
                            }});
  };
  for (int i = 0; i < parameters->size(); ++i) {
    const Parameter& p = (*parameters)[i];
    const ParameterPiece all = {0, p.numel(), 0};
    if (!in_place) {
      // The loop also sets values that are not divided.
      const ParameterPiece wanted = parameters->sharding().stage < 3
                                        ? all
                                        : parameters->PieceOf(i, parameters->sharding().rank);
      destinations.push_back({p.name, p, Tensor(), wanted,
                              [parameters, i](const Tensor& part) { parameters->Set(i, part); }});
    } else {
      destinations.push_back({p.name, p, PartOf(parameters->masters(), p), all});
    }
    if (optimizer == nullptr) continue;
    for (const AdamW::StateTensor& tensor : optimizer->state()) add_state(tensor, i);
  }
  BURST_RETURN_IF_ERROR(ReadAll(file, parameters->master_dtype(), destinations));
  if (in_place) parameters->RoundMasters();
  if (optimizer != nullptr) optimizer->set_updates(info.updates);
  return absl::OkStatus();
}

}  // namespace burst
