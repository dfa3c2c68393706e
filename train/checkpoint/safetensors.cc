#include "train/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"

namespace burst {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxHeaderBytes = int64_t{100} << 20;  // the format's own limit

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kFloat64:
      return "F64";
    case DType::kInt32:
      return "I32";
    case DType::kBFloat16:
      return "BF16";
  }
  return "";
}

bool ParseDType(const Json& name, DType* dtype) {
  for (DType known : {DType::kFloat32, DType::kFloat64, DType::kInt32, DType::kBFloat16}) {
    if (name == DTypeName(known)) return *dtype = known, true;
  }
  return false;
}

absl::Status ReadExactly(int fd, int64_t offset, void* data, int64_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = pread(fd, at, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return absl::DataLossError(strerror(errno));
    if (n == 0) return absl::DataLossError("unexpected end of the file");
    at += n, offset += n, bytes -= n;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                              const StringMap& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const NamedTensor& named : tensors) {
    const Tensor& tensor = named.tensor;
    BURST_CHECK(tensor.is_contiguous()) << named.name;
    header[named.name] = {
        {"dtype", DTypeName(tensor.dtype())},
        {"shape", std::vector<int64_t>(tensor.shape().begin(), tensor.shape().end())},
        {"data_offsets", {offset, offset + tensor.size_bytes()}}};
    offset += tensor.size_bytes();
  }
  // Spaces at the end align the data to 8 bytes. A string that is not UTF-8 must not throw.
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();  // this machine is little-endian, as is the format

  BURST_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path));
  BURST_RETURN_IF_ERROR(file.Write(&length, sizeof(length)));
  BURST_RETURN_IF_ERROR(file.Write(text.data(), static_cast<int64_t>(text.size())));
  for (const NamedTensor& named : tensors) {
    BURST_RETURN_IF_ERROR(file.Write(named.tensor.raw_data(), named.tensor.size_bytes()));
  }
  return file.Commit();
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", strerror(errno)));
  SafetensorsFile file(path, fd);
  const absl::Status status = file.ParseHeader();
  if (!status.ok()) return absl::DataLossError(absl::StrCat(path, ": ", status.message()));
  return file;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other)
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      metadata_(std::move(other.metadata_)),
      entries_(std::move(other.entries_)) {}

SafetensorsFile::~SafetensorsFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status SafetensorsFile::ParseHeader() {
  struct stat info;
  if (fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::DataLossError("not a regular file");
  }
  const int64_t file_bytes = info.st_size;
  uint64_t length = 0;
  if (file_bytes < static_cast<int64_t>(sizeof(length))) {
    return absl::DataLossError(absl::StrCat("truncated: ", file_bytes, " bytes"));
  }
  BURST_RETURN_IF_ERROR(ReadExactly(fd_, 0, &length, sizeof(length)));
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return absl::DataLossError("not a safetensors file: the header's length makes no sense");
  }
  const int64_t data_begin = static_cast<int64_t>(sizeof(length) + length);
  if (data_begin > file_bytes) return absl::DataLossError("truncated inside the header");
  std::string text(length, '\0');
  BURST_RETURN_IF_ERROR(ReadExactly(fd_, sizeof(length), text.data(), text.size()));

  const Json header = Json::parse(text, nullptr, false);
  if (!header.is_object()) {
    return absl::DataLossError("not a safetensors file: the header is not a JSON object");
  }
  int64_t data_bytes = 0;
  for (const auto& [name, value] : header.items()) {
    const absl::Status bad =
        absl::DataLossError(absl::StrCat("the header's entry '", name, "' is damaged"));
    if (!value.is_object()) return bad;
    if (name == "__metadata__") {
      for (const auto& [key, string] : value.items()) {
        if (!string.is_string()) return bad;
        metadata_[key] = string;
      }
      continue;
    }
    const Json shape = value.value("shape", Json()), offsets = value.value("data_offsets", Json());
    Entry entry;
    if (!ParseDType(value.value("dtype", Json()), &entry.dtype) || !shape.is_array() ||
        !offsets.is_array() || offsets.size() != 2) {
      return bad;
    }
    const auto is_count = [](const Json& number) {
      return number.is_number_unsigned() && number.get<uint64_t>() < (uint64_t{1} << 48);
    };
    if (!std::all_of(shape.begin(), shape.end(), is_count) ||
        !std::all_of(offsets.begin(), offsets.end(), is_count)) {
      return bad;
    }
    double elements = 1;  // a damaged product must not overflow
    for (const Json& dim : shape) {
      entry.shape.push_back(dim.get<int64_t>());
      elements *= dim.get<double>();
    }
    const int64_t begin = offsets[0], end = offsets[1];
    entry.begin = data_begin + begin;
    entry.bytes = end - begin;
    if (static_cast<double>(entry.bytes) != elements * static_cast<double>(SizeOf(entry.dtype))) {
      return bad;
    }
    data_bytes = std::max(data_bytes, end);
    entries_[name] = std::move(entry);
  }
  if (data_begin + data_bytes != file_bytes) {
    return absl::DataLossError(absl::StrCat(
        data_begin + data_bytes > file_bytes ? "truncated: " : "too long: ", file_bytes,
        " bytes, expected ", data_begin + data_bytes));
  }
  return absl::OkStatus();
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

absl::Status SafetensorsFile::Read(const std::string& name, const Tensor& tensor) const {
  BURST_CHECK(tensor.is_contiguous());
  const auto it = entries_.find(name);
  if (it == entries_.end()) {
    return absl::NotFoundError(absl::StrCat(path_, ": holds no tensor named '", name, "'"));
  }
  const Entry& entry = it->second;
  if (entry.shape != tensor.shape() || entry.dtype != tensor.dtype()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path_, ": '", name, "' is ", ToString(entry.shape), " ", DTypeName(entry.dtype),
        ", expected ", ToString(tensor.shape()), " ", DTypeName(tensor.dtype())));
  }
  const absl::Status status = ReadExactly(fd_, entry.begin, tensor.raw_data(), entry.bytes);
  if (!status.ok()) return absl::DataLossError(absl::StrCat(path_, ": ", status.message()));
  return status;
}

}  // namespace burst
