#include "train/checkpoint/checkpoint_set.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "train/checkpoint/safetensors_writer.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kSet[] = "set";      // in an index
constexpr char kParts[] = "parts";  // in a file of a set
constexpr int64_t kMost = int64_t{1} << 48;
constexpr auto kFinite = SafetensorsFile::Numbers::kFinite;

int64_t Product(const Shape& shape, size_t first = 0) {
  int64_t product = 1;
  for (size_t i = first; i < shape.size(); ++i) product *= shape[i];
  return product;
}

// Returns the number of elements in a slice of length 1 along the part's axis, at one place of the
// axes before it.
int64_t Inner(const TensorPart& part) { return Product(part.full_shape, part.axis + 1); }

// Returns ranges of the whole tensor's row that cover all elements of the part, and maybe more.
std::vector<std::pair<int64_t, int64_t>> Cover(const TensorPart& part) {
  if (part.slices.empty()) return {{part.begin, part.begin + part.length}};
  if (part.axis > 0) return {{0, Product(part.full_shape)}};
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [begin, length] : part.slices) {
    ranges.emplace_back(begin * Inner(part), (begin + length) * Inner(part));
  }
  return ranges;
}

bool AnyOverlap(const std::vector<std::pair<int64_t, int64_t>>& a,
                const std::vector<std::pair<int64_t, int64_t>>& b) {
  return std::any_of(a.begin(), a.end(), [&](const auto& x) {
    return std::any_of(b.begin(), b.end(), [&](const auto& y) {
      return std::max(x.first, y.first) < std::min(x.second, y.second);
    });
  });
}

// Returns false only if the parts have no element in common.
bool MayOverlap(const TensorPart& a, const TensorPart& b) {
  if (!a.slices.empty() && a.axis == b.axis && a.slices == b.slices) {
    return std::max(a.begin, b.begin) < std::min(a.begin + a.length, b.begin + b.length);
  }
  if (a.axis == b.axis && a.axis > 0 && !a.slices.empty() && !b.slices.empty()) {
    const auto ends = [](std::vector<std::pair<int64_t, int64_t>> slices) {
      for (auto& slice : slices) slice.second += slice.first;
      return slices;
    };
    return AnyOverlap(ends(a.slices), ends(b.slices));
  }
  return AnyOverlap(Cover(a), Cover(b));
}

// Calls move(offset in the whole tensor's row, offset in the part, length) for each contiguous
// range of the part.
template <typename Move>
void ForEachRun(const TensorPart& part, const Move& move) {
  if (part.slices.empty()) return move(part.begin, int64_t{0}, part.length);
  int64_t width = 0;  // width of all slices together
  for (const auto& slice : part.slices) width += slice.second;
  const int64_t inner = Inner(part), row = width * inner;
  const int64_t full_row = part.full_shape[part.axis] * inner;
  for (int64_t done = 0; done < part.length;) {
    const int64_t at = part.begin + done;
    int64_t in_row = at % row, before = 0;  // elements of the slices before this one
    size_t slice = 0;
    while (in_row >= before + part.slices[slice].second * inner) {
      before += part.slices[slice++].second * inner;
    }
    const int64_t left = before + part.slices[slice].second * inner - in_row;
    const int64_t n = std::min(left, part.length - done);
    const int64_t to = at / row * full_row + part.slices[slice].first * inner + in_row - before;
    move(to, done, n);
    done += n;
  }
}

Json ToJson(const TensorPart& part) {
  Json json = {{"shape", std::vector<int64_t>(part.full_shape.begin(), part.full_shape.end())},
               {"begin", part.begin}};
  if (!part.slices.empty()) {
    json["axis"] = part.axis;
    json["slices"] = part.slices;
  }
  return json;
}

bool IsCount(const Json& json) {
  return json.is_number_unsigned() && json.get<double>() < static_cast<double>(kMost);
}

// Reads a part, whose tensor has `length` elements. Returns nullopt if the JSON makes no sense.
std::optional<TensorPart> FromJson(const Json& json, int64_t length) {
  TensorPart part;
  part.length = length;
  if (!json.is_object()) return std::nullopt;
  const Json shape = json.value("shape", Json()), begin = json.value("begin", Json());
  if (!shape.is_array() || !IsCount(begin)) return std::nullopt;
  double elements = 1;
  for (const Json& dim : shape) {
    if (!IsCount(dim) || dim == 0) return std::nullopt;
    part.full_shape.push_back(dim.get<int64_t>());
    elements *= dim.get<double>();
    if (elements >= static_cast<double>(kMost)) return std::nullopt;
  }
  part.begin = begin.get<int64_t>();
  int64_t most = Product(part.full_shape);
  if (json.contains("slices")) {
    const Json axis = json.value("axis", Json()), slices = json["slices"];
    if (!IsCount(axis) || axis.get<size_t>() >= shape.size() || !slices.is_array() ||
        slices.empty()) {
      return std::nullopt;
    }
    part.axis = axis.get<int>();
    const int64_t dim = part.full_shape[part.axis];
    int64_t width = 0;
    for (const Json& slice : slices) {
      if (!slice.is_array() || slice.size() != 2 || !IsCount(slice[0]) || !IsCount(slice[1])) {
        return std::nullopt;
      }
      part.slices.emplace_back(slice[0].get<int64_t>(), slice[1].get<int64_t>());
      const auto& [first, n] = part.slices.back();
      if (first + n > dim) return std::nullopt;
      width += n;
      if (width > dim) return std::nullopt;
    }
    most = most / dim * width;
  }
  if (length > most - part.begin) return std::nullopt;
  return part;
}

bool IsPlainName(const Json& json) {
  if (!json.is_string()) return false;
  const std::string name = json.get<std::string>();
  return !name.empty() && name[0] != '.' && !absl::StrContains(name, '/') &&
         !absl::StrContains(name, '\0');
}

}  // namespace

TensorPart PartOfParameter(const Parameter& parameter, int64_t begin, int64_t length) {
  TensorPart part;
  part.full_shape = parameter.full_shape;
  part.begin = begin;
  part.length = length;
  const ParameterSharding& sharding = parameter.sharding;
  if (sharding.shards.empty()) return part;
  part.axis = sharding.axis;
  for (const ShardSlice& slice : sharding.shards[sharding.rank]) {
    part.slices.emplace_back(slice.begin, slice.length);
  }
  return part;
}

std::vector<StateRange> ShareOfState(const ParameterList& parameters, int rank, int ranks, int part,
                                     int parts) {
  std::vector<StateRange> shares = OwnState(parameters);
  const bool divided = parameters.sharding().stage > 0;
  for (StateRange& range : shares) {
    int64_t holders = divided ? 1 : ranks, number = divided ? 0 : rank;
    if (parameters[range.parameter].sharding.shards.empty()) {
      number = number * parts + part;
      holders *= parts;
    }
    const int64_t begin = range.length * number / holders;
    range.length = range.length * (number + 1) / holders - begin;
    range.begin += begin;
    if (parameters[range.parameter].copy) range.length = 0;
  }
  return shares;
}

std::string SetName(int64_t step, int64_t number) {
  if (number == 1) return absl::StrCat("checkpoint-", step, ".set");
  return absl::StrCat("checkpoint-", step, "-", number, ".set");
}

std::string SetFilePath(const std::string& set, int number, int files) {
  return (fs::path(set) / absl::StrFormat("%05d-of-%05d.safetensors", number + 1, files)).string();
}

absl::Status WriteSetFile(const std::string& path, const StateCopy& state) {
  std::vector<SafetensorsWriter::Entry> entries;
  Json parts = Json::object();
  for (const StateCopy::Part& part : state.parts()) {
    const StateRange& range = state.ranges()[part.range];
    if (range.length == 0) continue;
    entries.push_back({part.name, "F32", {range.length}});
    parts[part.name] = ToJson(PartOfParameter(state.ParameterOf(part), range.begin, range.length));
  }
  BURST_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                         SafetensorsWriter::Create(path, std::move(entries),
                                                   {{kParts, parts.dump()}}, /*checksums=*/true));
  for (const StateCopy::Part& part : state.parts()) {
    if (part.bytes > 0) BURST_RETURN_IF_ERROR(writer.Write(part.elements, part.bytes));
  }
  return writer.Commit();
}

absl::Status WriteSetIndex(const std::string& path, const StringMap& strings,
                           const std::string& set, int files) {
  Json list = Json::array();
  const std::string folder = (fs::path(path).parent_path() / set).string();
  for (int i = 0; i < files; ++i) {
    const std::string file = SetFilePath(folder, i, files);
    const absl::StatusOr<SafetensorsFile> opened = SafetensorsFile::Open(file);
    if (absl::IsNotFound(opened.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat(file, " of another rank is not to be seen here"));
    }
    BURST_RETURN_IF_ERROR(opened.status());
    list.push_back({{"name", fs::path(file).filename().string()},
                    {"bytes", opened->file_bytes()},
                    {"xxh3", opened->header_checksum()}});
  }
  StringMap metadata = strings;
  metadata[kSet] = Json({{"folder", set}, {"files", list}}).dump();
  return WriteSafetensors(path, {}, metadata);
}

std::optional<std::string> SetOfIndex(const SafetensorsFile& file) {
  const auto found = file.metadata().find(kSet);
  if (found == file.metadata().end() || !file.names().empty()) return std::nullopt;
  const absl::StatusOr<Json> set = ParseJson(found->second);
  if (!set.ok() || !set->is_object() || !IsPlainName(set->value("folder", Json()))) {
    return std::nullopt;
  }
  return (*set)["folder"].get<std::string>();
}

absl::StatusOr<CheckpointReader> CheckpointReader::Open(const std::string& path) {
  BURST_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  CheckpointReader reader(path);
  reader.metadata_ = file.metadata();
  reader.has_checksums_ = file.has_checksums();
  reader.identity_ = file.header_checksum();
  const auto set = reader.metadata_.find(kSet);
  reader.is_set_ = set != reader.metadata_.end() && file.names().empty();
  if (!reader.is_set_) {
    for (const std::string& name : file.names()) {
      reader.numel_[name] = Product(file.Find(name)->shape);
    }
    return reader;
  }
  const absl::Status status = reader.OpenSet(set->second);
  if (status.ok()) return reader;
  return absl::DataLossError(absl::StrCat(path, ": ", status.message()));
}

absl::Status CheckpointReader::OpenSet(const std::string& text) {
  const absl::Status bad = absl::DataLossError("its list of files is damaged");
  const absl::StatusOr<Json> set = ParseJson(text);
  if (!has_checksums_ || !set.ok() || !set->is_object()) return bad;
  const Json folder = set->value("folder", Json()), files = set->value("files", Json());
  if (!IsPlainName(folder) || !files.is_array()) return bad;
  const fs::path in = fs::path(path_).parent_path() / folder.get<std::string>();
  for (const Json& file : files) {
    if (!file.is_object() || !IsPlainName(file.value("name", Json()))) return bad;
    const std::string path = (in / file["name"].get<std::string>()).string();
    const absl::StatusOr<SafetensorsFile> opened = SafetensorsFile::Open(path);
    if (absl::IsNotFound(opened.status())) {
      return absl::DataLossError(absl::StrCat("its file ", path, " is missing"));
    }
    BURST_RETURN_IF_ERROR(opened.status());
    if (file.value("bytes", Json()) != opened->file_bytes() ||
        file.value("xxh3", Json()) != opened->header_checksum()) {
      return absl::DataLossError(absl::StrCat(path, " is not the file that was saved"));
    }
    files_.push_back(path);
    checksums_.push_back(opened->header_checksum());
    BURST_RETURN_IF_ERROR(TakeParts(files_.size() - 1, *opened));
  }
  for (const auto& [name, parts] : parts_) {
    double there = 0;
    for (const FilePart& part : parts) there += static_cast<double>(part.part.length);
    if (there < static_cast<double>(numel_[name])) {
      return absl::DataLossError(absl::StrCat("parts of the tensor ", name, " are missing"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::TakeParts(size_t file, const SafetensorsFile& opened) {
  const absl::Status bad = absl::DataLossError(
      absl::StrCat(files_[file], ": not a part of a checkpoint of this program"));
  const auto text = opened.metadata().find(kParts);
  if (text == opened.metadata().end()) return bad;
  const absl::StatusOr<Json> parts = ParseJson(text->second);
  if (!parts.ok() || !parts->is_object()) return bad;
  for (const std::string& name : opened.names()) {
    const SafetensorsFile::Entry& entry = *opened.Find(name);
    if (entry.dtype != "F32" || entry.shape.size() != 1) return bad;
    const std::optional<TensorPart> part = FromJson(parts->value(name, Json()), entry.shape[0]);
    if (!part.has_value()) return bad;
    const int64_t numel = Product(part->full_shape);
    if (numel_.try_emplace(name, numel).first->second != numel) return bad;
    std::vector<FilePart>& all = parts_[name];
    if (!all.empty() && all[0].part.full_shape != part->full_shape) return bad;
    all.push_back({file, *part});
  }
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsFile> CheckpointReader::OpenAgain(const std::string& path,
                                                            const std::string& checksum) {
  absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  if (!file.ok() || file->header_checksum() == checksum) return file;
  return absl::DataLossError(absl::StrCat(path, ": another file took its place while it was read"));
}

std::vector<std::string> CheckpointReader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, numel] : numel_) names.push_back(name);
  return names;
}

int64_t CheckpointReader::numel() const {
  int64_t sum = 0;
  for (const auto& [name, numel] : numel_) sum += numel;
  return sum;
}

absl::Status CheckpointReader::Read(absl::Span<const Wanted> wanted) const {
  if (!is_set_) {
    BURST_ASSIGN_OR_RETURN(const SafetensorsFile file, OpenAgain(path_, identity_));
    std::vector<NamedTensor> tensors;
    for (const Wanted& one : wanted) tensors.push_back({one.name, one.whole});
    return file.Read(tensors, kFinite);
  }
  struct Piece {
    const FilePart* from;
    Tensor to;  // the whole tensor, flat
  };
  std::map<size_t, std::vector<std::pair<NamedTensor, Piece>>> by_file;
  for (const Wanted& one : wanted) {
    const auto found = parts_.find(one.name);
    if (found == parts_.end()) {
      return absl::NotFoundError(absl::StrCat(path_, ": has no tensor ", one.name));
    }
    if (found->second[0].part.full_shape != one.whole.shape() ||
        one.whole.dtype() != DType::kFloat32) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": the tensor ", one.name,
                                                     " has another shape or dtype than is wanted"));
    }
    const Tensor row = one.whole.View({-1});
    // Gaps that no part fills are found afterwards.
    row.Fill(std::numeric_limits<double>::quiet_NaN());
    for (const FilePart& part : found->second) {
      if (!MayOverlap(part.part, one.part)) continue;
      const bool direct = part.part.slices.empty();
      const Tensor tensor = direct ? row.Slice(0, part.part.begin, part.part.length)
                                   : Tensor::Empty({part.part.length}, DType::kFloat32);
      by_file[part.file].push_back({{one.name, tensor}, {&part, row}});
    }
  }
  for (const auto& [file, pieces] : by_file) {
    BURST_ASSIGN_OR_RETURN(const SafetensorsFile opened, OpenAgain(files_[file], checksums_[file]));
    std::vector<NamedTensor> tensors;
    tensors.reserve(pieces.size());
    for (const auto& piece : pieces) tensors.push_back(piece.first);
    BURST_RETURN_IF_ERROR(opened.Read(tensors, kFinite));
    for (const auto& [named, piece] : pieces) {
      if (piece.from->part.slices.empty()) continue;
      const float* const from = named.tensor.data<float>();
      float* const to = piece.to.data<float>();
      ForEachRun(piece.from->part, [&](int64_t there, int64_t here, int64_t n) {
        std::memcpy(to + there, from + here, n * sizeof(float));
      });
    }
  }
  for (const Wanted& one : wanted) {
    const float* const row = one.whole.data<float>();
    bool filled = true;
    ForEachRun(one.part, [&](int64_t at, int64_t, int64_t n) {
      filled =
          filled && std::none_of(row + at, row + at + n, [](float x) { return std::isnan(x); });
    });
    if (!filled) {
      return absl::DataLossError(
          absl::StrCat(path_, ": parts of the tensor ", one.name, " are missing"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::Verify() const {
  const std::vector<std::string> one = {path_};
  for (const std::string& path : is_set_ ? files_ : one) {
    BURST_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
    BURST_RETURN_IF_ERROR(file.Verify(kFinite));
  }
  return absl::OkStatus();
}

}  // namespace burst
