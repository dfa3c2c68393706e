// Reads safetensors files. A file that opens has the names, shapes and bytes of its header, which
// another parser reads here. Writing it again gives the same file. Every other input is DataLoss.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_file.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/checkpoint/safetensors.h"

namespace burst {
namespace {

// The format knows more dtypes, but there is no tensor of them.
bool IsTensorDType(const std::string& name) {
  return name == "F32" || name == "F64" || name == "I32" || name == "BF16" || name == "F16";
}

DType DTypeOfName(const std::string& name) {
  if (name == "F32") return DType::kFloat32;
  if (name == "F64") return DType::kFloat64;
  if (name == "I32") return DType::kInt32;
  if (name == "BF16") return DType::kBFloat16;
  BURST_CHECK_EQ(name, "F16");
  return DType::kFloat16;
}

std::string Bytes(const Tensor& tensor) {
  return {static_cast<const char*>(tensor.raw_data()), static_cast<size_t>(tensor.size_bytes())};
}

// Returns every tensor, in order of name.
std::vector<NamedTensor> ReadAll(const SafetensorsFile& file, const std::string& content) {
  uint64_t length = 0;
  BURST_CHECK(content.size() >= sizeof(length));
  std::memcpy(&length, content.data(), sizeof(length));
  BURST_CHECK(length <= content.size() - sizeof(length));
  const auto header = nlohmann::json::parse(content.substr(sizeof(length), length));
  const absl::string_view values = absl::string_view(content).substr(sizeof(length) + length);
  std::vector<NamedTensor> tensors;
  for (const std::string& name : file.names()) {
    const auto& entry = header.at(name);
    if (!IsTensorDType(entry.at("dtype"))) continue;
    Shape shape;
    for (const auto& dim : entry.at("shape")) shape.push_back(dim.get<int64_t>());
    const auto offsets = entry.at("data_offsets").get<std::vector<size_t>>();
    // A tensor of this shape fits into memory, because the file holds it.
    const Tensor tensor = Tensor::Zeros(shape, DTypeOfName(entry.at("dtype")));
    const NamedTensor named = {name, tensor};
    const absl::Status status = file.Read({&named, 1});
    if (absl::IsDataLoss(status) && file.has_checksums()) continue;
    BURST_CHECK(status.ok()) << status.ToString();
    BURST_CHECK(Bytes(tensor) == values.substr(offsets[0], offsets[1] - offsets[0])) << name;
    tensors.push_back({name, tensor});
  }
  BURST_CHECK_EQ(header.size() - header.count("__metadata__"), file.names().size());
  return tensors;
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  static const FuzzFolder folder;
  const std::string content = SafetensorsContent(data, size);
  const absl::StatusOr<SafetensorsFile> file =
      SafetensorsFile::Open(folder.Write("input", content));
  if (!file.ok()) {
    BURST_CHECK(absl::IsDataLoss(file.status())) << file.status().ToString();
    return;
  }
  const std::vector<NamedTensor> tensors = ReadAll(*file, content);
  for (const NamedTensor& before : tensors) {
    if (before.tensor.dtype() == DType::kInt32) continue;
    const Tensor converted = Tensor::Zeros(before.tensor.shape(), DType::kFloat64);
    const NamedTensor named = {before.name, converted};
    BURST_CHECK(file->ReadConverted({&named, 1}).ok()) << before.name;
    const Tensor expected = before.tensor.To(DType::kFloat64);
    for (int64_t i = 0; i < converted.numel(); ++i) {
      const double actual = converted.data<double>()[i], value = expected.data<double>()[i];
      BURST_CHECK(actual == value || (std::isnan(actual) && std::isnan(value))) << before.name;
    }
  }
  const std::vector<std::string> names = file->names();
  const std::string path = folder.Path("again");
  const absl::Status written = WriteSafetensors(path, tensors, file->metadata());
  BURST_CHECK(written.ok()) << written.ToString();
  const absl::StatusOr<SafetensorsFile> again = SafetensorsFile::Open(path);
  BURST_CHECK(again.ok()) << again.status().ToString();
  BURST_CHECK_EQ(again->names().size(), tensors.size());
  BURST_CHECK(again->has_checksums());
  const bool foreign = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return !IsTensorDType(file->Find(name)->dtype);
  });
  if (foreign) return;
  const bool whole = tensors.size() == file->names().size();
  BURST_CHECK_EQ(file->Verify(SafetensorsFile::Numbers::kAny).ok(), whole);
  BURST_CHECK(again->Verify(SafetensorsFile::Numbers::kAny).ok());
  for (const auto& [key, value] : file->metadata()) {
    BURST_CHECK(again->metadata().count(key) > 0 && again->metadata().at(key) == value) << key;
  }
  for (const NamedTensor& before : tensors) {
    const Tensor tensor = Tensor::Zeros(before.tensor.shape(), before.tensor.dtype());
    const NamedTensor named = {before.name, tensor};
    const absl::Status status = again->Read({&named, 1});
    BURST_CHECK(status.ok()) << status.ToString();
    BURST_CHECK(Bytes(tensor) == Bytes(before.tensor)) << before.name;
  }
}

}  // namespace burst
