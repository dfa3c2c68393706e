#include "train/huggingface/export.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "model/transformer.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/checkpoint_set.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/checkpoint/safetensors.h"
#include "train/checkpoint/safetensors_writer.h"
#include "train/huggingface/config.h"
#include "train/huggingface/export_tokenizer.h"
#include "train/huggingface/families/family.h"
#include "train/huggingface/pretrained.h"
#include "train/optimizer/adamw.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

struct DTypeNames {
  WeightDType dtype;
  const char* format;  // safetensors' name
  int64_t bytes;
};
constexpr DTypeNames kFormats[] = {{WeightDType::kFloat32, "F32", 4},
                                   {WeightDType::kBFloat16, "BF16", 2},
                                   {WeightDType::kFloat16, "F16", 2}};

const DTypeNames& FormatOf(WeightDType dtype) {
  return *std::find_if(std::begin(kFormats), std::end(kFormats),
                       [&](const DTypeNames& format) { return format.dtype == dtype; });
}

// One tensor of the export, which is rows of a parameter.
struct Piece {
  ForeignTensor tensor;
  const Parameter* parameter = nullptr;
  int64_t first_row = 0;
  int64_t bytes = 0;
};

std::vector<Piece> Pieces(const HuggingFaceConfig& model, const std::vector<Parameter>& parameters,
                          const DTypeNames& dtype) {
  std::vector<Piece> pieces;
  for (const Parameter& parameter : parameters) {
    int64_t row = 0;
    for (ForeignTensor& tensor : ForeignTensors(model, parameter)) {
      int64_t bytes = dtype.bytes;
      for (const int64_t dim : tensor.shape) bytes *= dim;
      const int64_t rows = tensor.shape_here()[0];
      pieces.push_back({std::move(tensor), &parameter, row, bytes});
      row += rows;
    }
  }
  return pieces;
}

// Divides the pieces into files, in the model's order. Each file takes as many as fit.
std::vector<std::vector<Piece>> Files(std::vector<Piece> pieces, int64_t file_bytes) {
  std::vector<std::vector<Piece>> files(1);
  int64_t bytes = 0;
  for (Piece& piece : pieces) {
    if (!files.back().empty() && bytes + piece.bytes > file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += piece.bytes;
    files.back().push_back(std::move(piece));
  }
  return files;
}

// Reads parameters of a checkpoint, whose names have a prefix there. It keeps the parameters of the
// layer it read last, because several pieces come from one layer.
class ParameterReader {
 public:
  ParameterReader(const CheckpointReader& checkpoint, std::string prefix)
      : checkpoint_(checkpoint), prefix_(std::move(prefix)) {}

  absl::StatusOr<Tensor> Read(const Parameter& parameter) {
    const std::string layer = parameter.name.substr(0, parameter.name.find('.', sizeof("layers.")));
    if (layer != layer_) kept_.clear();
    layer_ = layer;
    Tensor& tensor = kept_[parameter.name];
    if (!tensor.null()) return tensor;
    tensor = Tensor::Empty(parameter.full_shape, DType::kFloat32);
    const CheckpointReader::Wanted wanted = {prefix_ + parameter.name, tensor,
                                             PartOfParameter(parameter, 0, tensor.numel())};
    BURST_RETURN_IF_ERROR(checkpoint_.Read({&wanted, 1}));
    return tensor;
  }

 private:
  const CheckpointReader& checkpoint_;
  const std::string prefix_;
  std::string layer_;
  std::map<std::string, Tensor> kept_;
};

Tensor Transposed(const Tensor& from) {
  const int64_t rows = from.dim(0), cols = from.dim(1);
  const Tensor to = Tensor::Empty({cols, rows}, DType::kFloat32);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      to.data<float>()[j * rows + i] = from.data<float>()[i * cols + j];
    }
  }
  return to;
}

absl::Status WriteConverted(const Tensor& tensor, const DTypeNames& dtype, const std::string& name,
                            SafetensorsWriter* writer) {
  if (dtype.format == std::string("F32")) {
    return writer->Write(tensor.raw_data(), tensor.size_bytes());
  }
  if (dtype.format == std::string("BF16")) {
    const Tensor rounded = tensor.To(DType::kBFloat16);
    return writer->Write(rounded.raw_data(), rounded.size_bytes());
  }
  constexpr int64_t kElements = 1 << 18;
  const float* values = tensor.data<float>();
  std::vector<Eigen::half> halves;
  for (int64_t begin = 0; begin < tensor.numel(); begin += kElements) {
    const int64_t n = std::min(kElements, tensor.numel() - begin);
    halves.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      halves[i] = Eigen::half(values[begin + i]);
      if (!(Eigen::numext::isfinite)(halves[i])) {
        return absl::InvalidArgumentError(absl::StrCat("--dtype: the tensor '", name, "' holds ",
                                                       values[begin + i],
                                                       ", which float16 cannot; bfloat16 can"));
      }
    }
    BURST_RETURN_IF_ERROR(writer->Write(halves.data(), n * 2));
  }
  return absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, std::vector<Piece> pieces, const DTypeNames& dtype,
                       ParameterReader* reader) {
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.tensor.name < b.tensor.name; });
  std::vector<SafetensorsWriter::Entry> entries;
  for (const Piece& piece : pieces) {
    entries.push_back({piece.tensor.name, dtype.format, piece.tensor.shape});
  }
  BURST_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                         SafetensorsWriter::Create(path, std::move(entries), {{"format", "pt"}},
                                                   /*checksums=*/false));
  for (const Piece& piece : pieces) {
    BURST_ASSIGN_OR_RETURN(const Tensor whole, reader->Read(*piece.parameter));
    Tensor rows = whole.Slice(0, piece.first_row, piece.tensor.shape_here()[0]);
    if (piece.tensor.transposed) rows = Transposed(rows);
    BURST_RETURN_IF_ERROR(WriteConverted(rows, dtype, piece.tensor.name, &writer));
  }
  return writer.Commit();
}

// Returns the config.json that the model came with, if it still describes the model. Otherwise it
// makes a new one, which keeps the fields that change no result.
absl::StatusOr<std::string> ConfigJson(const CheckpointInfo& info, const std::string& companions,
                                       const std::string& dtype) {
  HuggingFaceConfig config{info.model.WithDefaults(), info.window, dtype};
  std::string others = "{}";  // fields of the config.json that it came with
  const absl::StatusOr<std::string> kept =
      ReadFile((fs::path(companions) / "config.json").string(), kMaxSettingsBytes);
  if (kept.ok()) {
    absl::StatusOr<HuggingFaceConfig> before = ParseHuggingFaceConfig(*kept);
    if (before.ok()) {
      others = *kept;
      config.type = before->type;
      if (ComputedDifference(*before, config).empty()) {
        BURST_ASSIGN_OR_RETURN(const std::string same, WithDType(*kept, dtype));
        return info.seqlen > before->model.context ? WithContext(same, info.seqlen) : same;
      }
    }
  }
  config.model.context = std::max(config.model.context, info.seqlen);
  BURST_ASSIGN_OR_RETURN(const std::string json, MakeHuggingFaceConfig(config));
  BURST_ASSIGN_OR_RETURN(const std::string with_others, WithHarmlessFields(json, others));
  if (!info.tokenizer.has_value()) return with_others;
  return WithHarmlessFields(with_others, TokenFields(*info.tokenizer));
}

// Returns whether the imported model's files hold the run's tokenizer.
bool IsTokenizerOf(const Tokenizer& tokenizer, const std::string& companions) {
  const absl::StatusOr<Tokenizer> imported = Tokenizer::Load(companions);
  return imported.ok() && tokenizer.of_file() != nullptr && imported->file() == tokenizer.file();
}

// Returns the dtype of the weights before they were imported, or float32.
WeightDType DefaultDType(const std::string& companions) {
  const absl::StatusOr<std::string> kept =
      ReadFile((fs::path(companions) / "config.json").string(), kMaxSettingsBytes);
  if (!kept.ok()) return WeightDType::kFloat32;
  const absl::StatusOr<HuggingFaceConfig> config = ParseHuggingFaceConfig(*kept);
  if (!config.ok()) return WeightDType::kFloat32;
  const WeightDType dtype = ParseName(config->dtype, kWeightDTypes).value_or(WeightDType::kFloat32);
  return dtype == WeightDType::kAuto ? WeightDType::kFloat32 : dtype;
}

}  // namespace

namespace {

// Returns the names of files that an export may make, but for the numbered ones of its weights.
std::vector<std::string> NamesOfExport() {
  std::vector<std::string> names = {"config.json", "model.safetensors",
                                    "model.safetensors.index.json"};
  names.insert(names.end(), CompanionNames().begin(), CompanionNames().end());
  return names;
}

absl::Status WriteExport(const std::string& checkpoint, const std::string& out,
                         const ExportOptions& options) {
  BURST_ASSIGN_OR_RETURN(const CheckpointInfo info, ReadCheckpointInfo(checkpoint));
  BURST_ASSIGN_OR_RETURN(const CheckpointReader file, CheckpointReader::Open(checkpoint));
  const std::vector<std::string> names = file.names();
  if (options.average && std::none_of(names.begin(), names.end(), [](const std::string& name) {
        return absl::StartsWith(name, kAveragePrefix);
      })) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ema: must be false for a run without --ema; got ", checkpoint,
                     ", which has no average; leave it out"));
  }
  const std::string companions = CompanionsOf(checkpoint);
  const DTypeNames dtype =
      FormatOf(options.dtype == WeightDType::kAuto ? DefaultDType(companions) : options.dtype);
  BURST_ASSIGN_OR_RETURN(const std::string config,
                         ConfigJson(info, companions, NameOf(dtype.dtype, kWeightDTypes)));
  const fs::path folder = out;
  // A tokenizer that is there would be replaced, or stay and belong to the export.
  for (const std::string& name : NamesOfExport()) {
    std::error_code error;
    if (!fs::exists(folder / name, error)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("--out: ", out, " holds ", name, " already; give another folder"));
  }
  const bool writes_tokenizer =
      info.tokenizer.has_value() && !IsTokenizerOf(*info.tokenizer, companions);
  BURST_RETURN_IF_ERROR(CopyCompanions(companions, out, [&](absl::string_view name) {
    return name != "config.json" && (!writes_tokenizer || absl::StartsWith(name, "chat_template"));
  }));
  if (writes_tokenizer) BURST_RETURN_IF_ERROR(WriteTokenizer(*info.tokenizer, out));

  BURST_ASSIGN_OR_RETURN(const HuggingFaceConfig exported, ParseHuggingFaceConfig(config));
  BURST_ASSIGN_OR_RETURN(const std::vector<Parameter> parameters,
                         Transformer::ParametersOf(info.model.WithDefaults()));
  const std::vector<std::vector<Piece>> files =
      Files(Pieces(exported, parameters, dtype), options.file_bytes);
  ParameterReader reader(file, options.average ? kAveragePrefix : "");
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name =
        files.size() == 1 ? "model.safetensors"
                          : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, files.size());
    for (const Piece& piece : files[i]) {
      weight_map[piece.tensor.name] = name;
      total += piece.bytes;
    }
    BURST_RETURN_IF_ERROR(WriteFile((folder / name).string(), files[i], dtype, &reader));
  }
  if (files.size() > 1) {
    const nlohmann::json index = {{"metadata", {{"total_size", total}}},
                                  {"weight_map", weight_map}};
    BURST_RETURN_IF_ERROR(WriteFileAtomically((folder / "model.safetensors.index.json").string(),
                                              index.dump(2) + "\n"));
  }
  return WriteFileAtomically((folder / "config.json").string(), config);
}

// Returns the files of an export that a folder holds.
std::set<fs::path> FilesOfExport(const std::string& folder) {
  std::error_code error;
  std::set<fs::path> files;
  for (const std::string& name : NamesOfExport()) {
    const fs::path file = fs::path(folder) / name;
    if (fs::exists(file, error)) files.insert(file);
  }
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool is_numbered =
        absl::StartsWith(name, "model-") && absl::EndsWith(name, ".safetensors");
    if (is_numbered) files.insert(entry.path());
  }
  return files;
}

}  // namespace

absl::Status ExportHuggingFace(const std::string& checkpoint, const std::string& out,
                               const ExportOptions& options) {
  std::error_code error;
  const bool is_new = !fs::exists(out, error);
  const std::set<fs::path> before = FilesOfExport(out);
  const absl::Status status = WriteExport(checkpoint, out, options);
  if (status.ok()) return status;
  // A part of an export would stand in the way of another try.
  for (const fs::path& made : FilesOfExport(out)) {
    if (before.count(made) == 0) fs::remove(made, error);
  }
  if (is_new) fs::remove(out, error);
  return status;
}

}  // namespace burst
