#include "train/huggingface/directory.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "model/transformer.h"
#include "train/data/input_file.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr char kOneFile[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr auto kFinite = SafetensorsFile::Numbers::kFinite;

constexpr char kFloat8[] = "F8_E4M3";
// Follows the name of a float8 weight in the name of its scales, [blocks of rows, blocks of
// columns]. Despite "inv", a weight is its float8 numbers times the scale.
constexpr char kScales[] = "_scale_inv";

// Multiplies each block of [block_rows, block_cols] elements by its scale.
void MultiplyBlocks(const Tensor& weight, int64_t block_rows, int64_t block_cols,
                    const Tensor& scales) {
  DispatchFloat(weight.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t cols = weight.dim(1);
    for (int64_t i = 0; i < weight.dim(0); ++i) {
      T* row = weight.data<T>() + i * cols;
      const T* scale = scales.data<T>() + i / block_rows * scales.dim(1);
      for (int64_t j = 0; j < cols; ++j) row[j] *= scale[j / block_cols];
    }
  });
}

// Sets to[i, j] = from[j, i].
void Transpose(const Tensor& from, const Tensor& to) {
  const int64_t rows = to.dim(0), cols = to.dim(1);
  DispatchFloat(to.dtype(), [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kBlock = 64;
    const T* source = from.data<T>();
    T* target = to.data<T>();
    for (int64_t i0 = 0; i0 < rows; i0 += kBlock) {
      for (int64_t j = 0; j < cols; ++j) {
        const int64_t end = std::min(rows, i0 + kBlock);
        for (int64_t i = i0; i < end; ++i) target[i * cols + j] = source[j * rows + i];
      }
    }
  });
}

// Fills rows [begin, end of `to`) with the mean of the rows before them, summed in double.
void FillWithMean(const Tensor& to, int64_t begin) {
  const int64_t rows = to.dim(0), cols = to.dim(1);
  DispatchFloat(to.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* values = to.data<T>();
    std::vector<double> sums(cols, 0);
    for (int64_t i = 0; i < begin; ++i) {
      for (int64_t j = 0; j < cols; ++j) sums[j] += values[i * cols + j];
    }
    for (int64_t i = begin; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        values[i * cols + j] = static_cast<T>(sums[j] / static_cast<double>(begin));
      }
    }
  });
}

// Returns the files that an index names, each once.
absl::StatusOr<std::set<std::string>> FilesOfIndex(const std::string& path) {
  BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxTokenizerBytes));
  const auto damaged = [&](const std::string& why) {
    return absl::DataLossError(absl::StrCat(path, ": ", why));
  };
  const absl::StatusOr<nlohmann::json> index = ParseJson(text);
  if (!index.ok()) return damaged(std::string(index.status().message()));
  const auto map = index->is_object() ? index->find("weight_map") : index->end();
  if (!index->is_object() || map == index->end() || !map->is_object()) {
    return damaged("holds no weight_map");
  }
  std::set<std::string> files;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) return damaged("the weight_map names no file for a tensor");
    const std::string name = file.get<std::string>();
    if (absl::StrContains(name, "/") || name.find('\0') != std::string::npos ||
        !absl::EndsWith(name, ".safetensors")) {
      return damaged("the weight_map names something else than safetensors files next to it");
    }
    files.insert(name);
  }
  return files;
}

}  // namespace

absl::StatusOr<std::set<std::string>> WeightFiles(const std::string& path) {
  std::error_code error;  // what cannot be seen cannot be opened either
  const auto has = [&](const char* name) { return fs::exists(fs::path(path) / name, error); };
  if (!has(kIndex)) {
    for (const char* other : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
      if (has(kOneFile) || !has(other)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": the weights must be in ", kOneFile, "; got ", other,
          "; convert them: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"));
    }
    return std::set<std::string>{kOneFile};
  }
  BURST_ASSIGN_OR_RETURN(std::set<std::string> names,
                         FilesOfIndex((fs::path(path) / kIndex).string()));
  if (has(kOneFile) && names.count(kOneFile) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": the weights must be there once; got ",
                                                   kOneFile, " and the files of ", kIndex,
                                                   "; remove one of the two"));
  }
  return names;
}

absl::StatusOr<HuggingFaceDirectory> HuggingFaceDirectory::Open(
    const std::string& path, const std::vector<std::string>& ignored) {
  HuggingFaceDirectory directory(path);
  const absl::Status status = directory.Init(ignored);
  if (status.ok()) return directory;
  if (absl::StrContains(status.message(), path)) return status;
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status HuggingFaceDirectory::Init(const std::vector<std::string>& ignored) {
  BURST_ASSIGN_OR_RETURN(const std::string json,
                         ReadFile((fs::path(path_) / "config.json").string(), kMaxSettingsBytes));
  BURST_ASSIGN_OR_RETURN(const std::string read, WithoutFields(json, ignored));
  BURST_ASSIGN_OR_RETURN(config_, ParseHuggingFaceConfig(read));
  BURST_RETURN_IF_ERROR(OpenFiles());
  // A model cannot have more layers than tensors. Without this check, the list of its tensors could
  // be too long to make.
  if (config_.model.layers > static_cast<int64_t>(file_of_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("holds ", file_of_.size(), " tensors, fewer than the model has layers"));
  }
  BURST_ASSIGN_OR_RETURN(parameters_, Transformer::ParametersOf(config_.model));
  BURST_RETURN_IF_ERROR(CheckTensors());
  return CheckTiedHead();
}

absl::Status HuggingFaceDirectory::OpenFiles() {
  BURST_ASSIGN_OR_RETURN(const std::set<std::string> names, WeightFiles(path_));
  for (const std::string& name : names) BURST_RETURN_IF_ERROR(OpenFile(name));
  return absl::OkStatus();
}

absl::Status HuggingFaceDirectory::OpenFile(const std::string& name) {
  BURST_ASSIGN_OR_RETURN(SafetensorsFile file,
                         SafetensorsFile::Open((fs::path(path_) / name).string()));
  for (const std::string& tensor : file.names()) {
    if (!file_of_.emplace(tensor, static_cast<int>(files_.size())).second) {
      return absl::DataLossError(absl::StrCat("the tensor '", tensor, "' is in two files"));
    }
  }
  files_.push_back(std::move(file));
  file_names_.push_back(name);
  return absl::OkStatus();
}

// Checks that every tensor of the model is there with its shape and dtype, and no other tensor.
absl::Status HuggingFaceDirectory::CheckTensors() {
  const ForeignTensor first = ForeignTensors(config_, parameters_[0])[0];
  if (file_of_.count(first.name) == 0) {
    missing_prefix_ = NamePrefix(config_);
    if (file_of_.count(NameThere(first)) == 0) missing_prefix_.clear();
  }
  std::set<std::string> wanted;
  for (const Parameter& parameter : parameters_) {
    for (const ForeignTensor& tensor : ForeignTensors(config_, parameter)) {
      const std::string name = NameThere(tensor);
      wanted.insert(name);
      const auto file = file_of_.find(name);
      if (file == file_of_.end()) {
        return absl::InvalidArgumentError(absl::StrCat("the tensor '", name, "' is missing"));
      }
      const SafetensorsFile::Entry& entry = EntryOf(name);
      if (entry.shape != tensor.shape) {
        return absl::InvalidArgumentError(
            absl::StrCat("the tensor '", name, "' is ", ToString(entry.shape),
                         "; with this config.json it must be ", ToString(tensor.shape)));
      }
      if (!IsConvertible(entry.dtype)) {
        return absl::InvalidArgumentError(DTypeError(name, entry.dtype));
      }
      if (entry.dtype == kFloat8) {
        BURST_RETURN_IF_ERROR(CheckScales(name, entry));
        wanted.insert(name + kScales);
      }
    }
  }
  for (const auto& [name, file] : file_of_) {
    if (wanted.count(name) == 0 && !IsComputed(config_, name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the tensor '", name, "' does not belong to a model with this config.json"));
    }
  }
  return absl::OkStatus();
}

// Checks that a float8 weight has its scales.
absl::Status HuggingFaceDirectory::CheckScales(const std::string& name,
                                               const SafetensorsFile::Entry& weight) const {
  if (config_.scale_rows == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensor '", name, "' is of the dtype ", kFloat8,
                     ", but config.json has no quantization_config.weight_block_size"));
  }
  const std::string scales = name + kScales;
  if (file_of_.count(scales) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the tensor '", scales, "' is missing"));
  }
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  const SafetensorsFile::Entry& entry = EntryOf(scales);
  const Shape expected = weight.shape.size() != 2
                             ? Shape()
                             : Shape({blocks(weight.shape[0], config_.scale_rows),
                                      blocks(weight.shape[1], config_.scale_cols)});
  if (entry.shape == expected && entry.dtype != kFloat8 && IsConvertible(entry.dtype)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("the tensor '", scales, "' is ",
                                                 ToString(entry.shape), " ", entry.dtype,
                                                 "; it must be ", ToString(expected), " F32"));
}

// Checks that a stored head of a tied model equals the embedding, which is the head. Otherwise one
// of the two would be lost.
absl::Status HuggingFaceDirectory::CheckTiedHead() const {
  constexpr char kHead[] = "lm_head.weight";
  const auto head_file = file_of_.find(kHead);
  if (!config_.model.tied_embeddings || head_file == file_of_.end()) return absl::OkStatus();
  const std::string embedding = NameThere(ForeignTensors(config_, parameters_[0])[0]);
  const auto differs = [&](const auto&... how) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensors '", kHead, "' and '", embedding,
                     "' must be equal, as config.json says tie_word_embeddings; got ", how...,
                     "; give tie_word_embeddings = false to keep both, or remove '", kHead, "'"));
  };
  const int embedding_file = file_of_.at(embedding);
  const SafetensorsFile::Entry& a = *files_[head_file->second].Find(kHead);
  const SafetensorsFile::Entry& b = *files_[embedding_file].Find(embedding);
  if (a.shape != b.shape) return differs(ToString(a.shape), " and ", ToString(b.shape));
  if (a.dtype != b.dtype) return differs(a.dtype, " and ", b.dtype);
  const auto open = [&](int file) {
    return InputFile::Open((fs::path(path_) / file_names_[file]).string());
  };
  BURST_ASSIGN_OR_RETURN(const InputFile head_bytes, open(head_file->second));
  BURST_ASSIGN_OR_RETURN(const InputFile embedding_bytes, open(embedding_file));
  constexpr int64_t kBlock = int64_t{1} << 20;
  std::string one(std::min(kBlock, a.bytes), '\0'), other = one;
  for (int64_t at = 0; at < a.bytes; at += kBlock) {
    const int64_t bytes = std::min(kBlock, a.bytes - at);
    BURST_RETURN_IF_ERROR(head_bytes.ReadAt(a.begin + at, bytes, one.data()));
    BURST_RETURN_IF_ERROR(embedding_bytes.ReadAt(b.begin + at, bytes, other.data()));
    const auto end = one.begin() + bytes;
    const auto first = std::mismatch(one.begin(), end, other.begin()).first;
    if (first == end) continue;
    const int64_t rows = std::max<int64_t>(1, a.shape[0]);
    return differs("other numbers in row ",
                   (at + (first - one.begin())) / std::max<int64_t>(1, a.bytes / rows));
  }
  return absl::OkStatus();
}

std::string HuggingFaceDirectory::NameThere(const ForeignTensor& tensor) const {
  return std::string(absl::StripPrefix(tensor.name, missing_prefix_));
}

const SafetensorsFile::Entry& HuggingFaceDirectory::EntryOf(const std::string& name) const {
  return *files_[file_of_.at(name)].Find(name);
}

absl::Status HuggingFaceDirectory::ReadTensor(const std::string& name, const Tensor& to) const {
  const auto read = [&](const std::string& name, const Tensor& to) {
    const NamedTensor named = {name, to};
    return files_[file_of_.at(name)].ReadConverted({&named, 1}, kFinite);
  };
  BURST_RETURN_IF_ERROR(read(name, to));
  if (EntryOf(name).dtype != kFloat8) return absl::OkStatus();
  const Tensor scales = Tensor::Empty(EntryOf(name + kScales).shape, to.dtype());
  BURST_RETURN_IF_ERROR(read(name + kScales, scales));
  MultiplyBlocks(to, config_.scale_rows, config_.scale_cols, scales);
  return absl::OkStatus();
}

absl::Status HuggingFaceDirectory::Read(const Parameter& parameter, const Tensor& whole) const {
  int64_t row = 0;
  for (const ForeignTensor& tensor : ForeignTensors(config_, parameter)) {
    const int64_t rows = tensor.shape_here()[0];
    const Tensor to = whole.Slice(0, row, rows);
    const Tensor stored = tensor.transposed ? Tensor::Empty(tensor.shape, whole.dtype()) : to;
    BURST_RETURN_IF_ERROR(ReadTensor(NameThere(tensor), stored));
    if (tensor.transposed) Transpose(stored, to);
    row += rows;
  }
  return absl::OkStatus();
}

absl::Status HuggingFaceDirectory::ReadGrown(const Parameter& parameter,
                                             const Tensor& whole) const {
  const Parameter& there = parameters_[parameter.number];
  const int64_t rows = there.full_shape[0];
  BURST_RETURN_IF_ERROR(Read(there, whole.Slice(0, 0, rows)));
  if (rows < whole.dim(0)) FillWithMean(whole, rows);
  return absl::OkStatus();
}

absl::Status HuggingFaceDirectory::Load(ParameterList* parameters) const {
  const bool in_place = parameters->has_masters();
  // Tensors that are read into their final place.
  std::vector<std::vector<NamedTensor>> direct(files_.size());
  for (int i = 0; i < parameters->size(); ++i) {
    const Parameter& parameter = (*parameters)[i];
    const std::vector<ForeignTensor> tensors = ForeignTensors(config_, parameter);
    if (!in_place) {
      const Tensor whole = Tensor::Empty(parameter.full_shape, parameters->master_dtype());
      BURST_RETURN_IF_ERROR(ReadGrown(parameter, whole));
      parameters->Set(i, parameter.OwnShard(whole));
      continue;
    }
    const Tensor part = parameters->Masters(i).View(parameter.shape);
    const bool whole = part.device() == DeviceType::kCpu && parameter.sharding.shards.empty();
    const bool as_stored =
        !tensors[0].transposed &&
        parameter.full_shape == parameters_[parameter.number].full_shape &&
        std::none_of(tensors.begin(), tensors.end(), [&](const ForeignTensor& tensor) {
          return EntryOf(NameThere(tensor)).dtype == kFloat8;
        });
    if (whole && as_stored) {
      int64_t row = 0;
      for (const ForeignTensor& tensor : tensors) {
        direct[file_of_.at(NameThere(tensor))].push_back(
            {NameThere(tensor), part.Slice(0, row, tensor.shape[0])});
        row += tensor.shape[0];
      }
      continue;
    }
    const Tensor staged = Tensor::Empty(parameter.full_shape, part.dtype());
    BURST_RETURN_IF_ERROR(ReadGrown(parameter, staged));
    parameter.TakeShard(parameter.sharding.rank, staged, part);
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    BURST_RETURN_IF_ERROR(files_[i].ReadConverted(direct[i], kFinite));
  }
  if (in_place) parameters->RoundMasters();
  return absl::OkStatus();
}

absl::StatusOr<std::string> HuggingFaceDirectory::Fingerprint() const {
  std::vector<uint64_t> of_files;
  for (const SafetensorsFile& file : files_) {
    BURST_ASSIGN_OR_RETURN(const uint64_t fingerprint, file.Fingerprint());
    of_files.push_back(fingerprint);
  }
  std::sort(of_files.begin(), of_files.end());
  std::string text;
  for (const uint64_t fingerprint : of_files) {
    absl::StrAppend(&text, absl::Hex(fingerprint, absl::kZeroPad16));
  }
  return text;
}

}  // namespace burst
