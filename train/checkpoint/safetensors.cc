#include "train/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <Eigen/Core>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "burst/base/check.h"
#include "burst/base/json.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/checkpoint/safetensors_format.h"

namespace burst {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxHeaderBytes = int64_t{100} << 20;  // the format's own limit
constexpr size_t kMostDimensions = 64;                   // no program makes more
// Elements or bytes; a larger number is damage.
constexpr double kMostElements = int64_t{1} << 48;
constexpr int64_t kChunk = int64_t{1} << 20;  // read, summed and checked while it is in the cache

// Quotes a name from a file for a message. The name may hold any bytes.
std::string Quoted(absl::string_view name) {
  return absl::StrCat("'", absl::Utf8SafeCEscape(name.substr(0, 100)), "'");
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

// Returns whether every element is finite: its exponent is below the one of infinities and NaNs.
// Bits is an unsigned type as wide as an element.
template <typename Bits>
bool ExponentsBelow(Bits infinity, const char* data, int64_t bytes) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  Bits largest = 0;
  for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(sizeof(Bits))) {
    Bits element;
    std::memcpy(&element, data + at, sizeof(element));
    largest = std::max<Bits>(largest, element & kMagnitude);
  }
  return largest < infinity;
}

bool AllFinite(absl::string_view dtype, const char* data, int64_t bytes) {
  if (dtype == "F32") return ExponentsBelow<uint32_t>(0x7F800000, data, bytes);
  if (dtype == "F64") return ExponentsBelow<uint64_t>(0x7FF0000000000000, data, bytes);
  if (dtype == "BF16") return ExponentsBelow<uint16_t>(0x7F80, data, bytes);
  if (dtype == "F16") return ExponentsBelow<uint16_t>(0x7C00, data, bytes);
  if (dtype == "F8_E4M3") return ExponentsBelow<uint8_t>(0x7F, data, bytes);  // no infinity
  return true;
}

constexpr const char* kConvertible[] = {"F32", "BF16", "F16", "F64", "F8_E4M3"};

// Returns the e4m3 number of these bits (Micikevicius et al., arXiv 2209.05433): a sign, an
// exponent of 4 bits with a bias of 7, a mantissa of 3. Only all ones are not a number.
float FromE4M3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float magnitude =
      std::ldexp(static_cast<float>(mantissa + (exponent > 0 ? 8 : 0)), std::max(exponent, 1) - 10);
  if ((bits & 0x7F) == 0x7F) magnitude = std::numeric_limits<float>::quiet_NaN();
  return bits & 0x80 ? -magnitude : magnitude;
}

// Converts `bytes` bytes of a floating-point dtype to elements of type To.
template <typename To>
void Convert(absl::string_view dtype, const char* from, int64_t bytes, To* to) {
  const auto each = [&](auto element, auto value) {
    const int64_t n = bytes / static_cast<int64_t>(sizeof(element));
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(&element, from + i * sizeof(element), sizeof(element));
      to[i] = static_cast<To>(value(element));
    }
  };
  if (dtype == "F32") return each(float{}, [](float x) { return x; });
  if (dtype == "F64") return each(double{}, [](double x) { return x; });
  if (dtype == "F16") {
    return each(uint16_t{}, [](uint16_t bits) {
      return Eigen::half_impl::half_to_float(Eigen::half_impl::raw_uint16_to_half(bits));
    });
  }
  if (dtype == "F8_E4M3") return each(uint8_t{}, FromE4M3);
  BURST_CHECK_EQ(dtype, "BF16");
  each(uint16_t{}, [](uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  });
}

std::string HeaderText(const std::vector<NamedTensor>& tensors, const StringMap& metadata) {
  std::vector<std::string> checksums(tensors.size());
  ParallelTasks(static_cast<int64_t>(tensors.size()), [&](int64_t i) {
    const Tensor& tensor = tensors[i].tensor;
    checksums[i] = Digits(XXH3_64bits(tensor.raw_data(), tensor.size_bytes()));
  });
  StringMap strings = metadata;
  strings[kHeaderChecksum] = kNoDigits;
  Json header = Json::object();
  int64_t offset = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i].tensor;
    strings[kTensorChecksum + tensors[i].name] = checksums[i];
    header[tensors[i].name] = {
        {"dtype", SafetensorsName(tensor.dtype())},
        {"shape", std::vector<int64_t>(tensor.shape().begin(), tensor.shape().end())},
        {"data_offsets", {offset, offset + tensor.size_bytes()}}};
    offset += tensor.size_bytes();
  }
  header[kMetadata] = strings;
  // Spaces at the end align the data to 8 bytes. A string that is not UTF-8 must not throw.
  std::string text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const size_t at = text.find(kHeaderChecksumText) + strlen(kHeaderChecksumText);
  const std::string digits = Digits(XXH3_64bits(text.data(), text.size()));
  return text.replace(at, digits.size(), digits);
}

// Returns whether the header's checksum matches its text.
bool HeaderIsWhole(std::string text, const std::string& checksum) {
  const size_t found = text.find(kHeaderChecksumText);
  if (found == std::string::npos) return false;
  const size_t at = found + strlen(kHeaderChecksumText);
  if (text.compare(at, checksum.size(), checksum) != 0) return false;
  text.replace(at, strlen(kNoDigits), kNoDigits);
  return Digits(XXH3_64bits(text.data(), text.size())) == checksum;
}

}  // namespace

absl::Status WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                              const StringMap& metadata) {
  for (const NamedTensor& named : tensors) {
    BURST_CHECK(named.tensor.is_contiguous()) << named.name;
  }
  const std::string header = HeaderText(tensors, metadata);
  const uint64_t length = header.size();  // this machine is little-endian, as is the format
  BURST_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path));
  BURST_RETURN_IF_ERROR(file.Write(&length, sizeof(length)));
  BURST_RETURN_IF_ERROR(file.Write(header.data(), static_cast<int64_t>(header.size())));
  for (const NamedTensor& named : tensors) {
    BURST_RETURN_IF_ERROR(file.Write(named.tensor.raw_data(), named.tensor.size_bytes()));
  }
  return file.Commit();
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  // The open does not block, because a pipe must be refused, not waited for.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const absl::StatusCode code =
        errno == ENOENT ? absl::StatusCode::kNotFound : absl::StatusCode::kFailedPrecondition;
    return absl::Status(code, absl::StrCat("cannot read ", path, ": ", strerror(errno)));
  }
  SafetensorsFile file(path, fd);
  const absl::Status status = file.ReadHeader();
  if (!status.ok()) return absl::DataLossError(absl::StrCat(path, ": ", status.message()));
  return file;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other)
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      metadata_(std::move(other.metadata_)),
      has_checksums_(other.has_checksums_),
      header_checksum_(std::move(other.header_checksum_)),
      file_bytes_(other.file_bytes_),
      entries_(std::move(other.entries_)) {}

SafetensorsFile::~SafetensorsFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status SafetensorsFile::ReadHeader() {
  struct stat info;
  if (fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::DataLossError("not a regular file");
  }
  const int64_t file_bytes = file_bytes_ = info.st_size;
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
  BURST_RETURN_IF_ERROR(ReadExactly(fd_, sizeof(length), text.data(), length));

  const absl::StatusOr<Json> header = ParseJson(text);
  if (!header.ok() || !header->is_object()) {
    return absl::DataLossError(
        absl::StrCat("not a safetensors file, or its header is damaged: ",
                     header.ok() ? "not a JSON object" : header.status().message()));
  }
  BURST_RETURN_IF_ERROR(TakeHeader(*header, data_begin, file_bytes));
  const auto checksum = metadata_.find(kHeaderChecksum);
  has_checksums_ = checksum != metadata_.end();
  if (has_checksums_ && !HeaderIsWhole(std::move(text), checksum->second)) {
    return absl::DataLossError("the header is damaged: its checksum does not agree");
  }
  return TakeChecksums();
}

absl::Status SafetensorsFile::TakeHeader(const Json& header, int64_t data_begin,
                                         int64_t file_bytes) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [name, value] : header.items()) {
    const absl::Status bad =
        absl::DataLossError(absl::StrCat("the header's entry ", Quoted(name), " is damaged"));
    if (!value.is_object()) return bad;
    if (name == kMetadata) {
      for (const auto& [key, string] : value.items()) {
        if (!string.is_string()) return bad;
        metadata_[key] = string;
      }
      continue;
    }
    const auto dtype = value.find("dtype"), found_shape = value.find("shape"),
               found_offsets = value.find("data_offsets");
    if (dtype == value.end() || !dtype->is_string() || found_shape == value.end() ||
        found_offsets == value.end()) {
      return bad;
    }
    const Json &shape = *found_shape, &offsets = *found_offsets;
    Entry entry;
    entry.dtype = dtype->get<std::string>();
    const int64_t element_bytes = SafetensorsElementBytes(entry.dtype);
    const bool is_range = offsets.is_array() && offsets.size() == 2;
    if (element_bytes == 0 || !is_range || !shape.is_array() || shape.size() > kMostDimensions) {
      return bad;
    }
    const auto is_count = [](const Json& number) {
      return number.is_number_unsigned() && number.get<double>() < kMostElements;
    };
    if (!std::all_of(shape.begin(), shape.end(), is_count) ||
        !std::all_of(offsets.begin(), offsets.end(), is_count)) {
      return bad;
    }
    int64_t elements = 1;
    // Leaves out dimensions of 0, because the product of the others must not overflow either.
    double most = 1;
    for (const Json& dim : shape) {
      entry.shape.push_back(dim.get<int64_t>());
      most *= std::max(1.0, dim.get<double>());
      if (most > kMostElements) return bad;
      elements *= entry.shape.back();
    }
    const int64_t begin = offsets[0], end = offsets[1];
    entry.begin = data_begin + begin;
    entry.bytes = end - begin;
    if (entry.bytes != elements * element_bytes) return bad;
    ranges.emplace_back(begin, end);
    entries_[name] = std::move(entry);
  }
  std::sort(ranges.begin(), ranges.end());
  int64_t data_bytes = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != data_bytes) {
      return absl::DataLossError(absl::StrCat("the header is damaged: tensors ",
                                              begin < data_bytes ? "overlap" : "leave a gap",
                                              " at byte ", begin, " of the data"));
    }
    data_bytes = end;
  }
  if (data_begin + data_bytes != file_bytes) {
    return absl::DataLossError(absl::StrCat(
        data_begin + data_bytes > file_bytes ? "truncated: " : "too long: ", file_bytes,
        " bytes, expected ", data_begin + data_bytes));
  }
  return absl::OkStatus();
}

// Moves the checksums from the strings to their tensors.
absl::Status SafetensorsFile::TakeChecksums() {
  size_t found = 0;
  for (auto it = metadata_.begin(); it != metadata_.end();) {
    absl::string_view name = it->first;
    if (name == kHeaderChecksum) {
      header_checksum_ = it->second;
      it = metadata_.erase(it);
    } else if (absl::ConsumePrefix(&name, kTensorChecksum)) {
      const auto entry = entries_.find(std::string(name));
      if (entry != entries_.end()) entry->second.checksum = it->second, ++found;
      it = metadata_.erase(it);
    } else {
      ++it;
    }
  }
  if (found == (has_checksums_ ? entries_.size() : 0)) return absl::OkStatus();
  return absl::DataLossError("the header is damaged: it lacks a checksum");
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

int64_t SafetensorsFile::numel() const {
  int64_t numel = 0;
  for (const auto& [name, entry] : entries_)
    numel += entry.bytes / SafetensorsElementBytes(entry.dtype);
  return numel;
}

const SafetensorsFile::Entry* SafetensorsFile::Find(const std::string& name) const {
  const auto it = entries_.find(name);
  return it == entries_.end() ? nullptr : &it->second;
}

absl::Status SafetensorsFile::ReadEntry(const std::string& name, const Entry& entry, char* data,
                                        Numbers numbers, const Sink& sink) const {
  std::vector<char> buffer(data == nullptr ? std::min(entry.bytes, kChunk) : 0);
  const bool sums = !entry.checksum.empty();
  bool finite = true;
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (int64_t at = 0; at < entry.bytes; at += kChunk) {
    const int64_t bytes = std::min(kChunk, entry.bytes - at);
    char* const chunk = data == nullptr ? buffer.data() : data + at;
    const absl::Status status = ReadExactly(fd_, entry.begin + at, chunk, bytes);
    if (!status.ok()) return absl::DataLossError(absl::StrCat(path_, ": ", status.message()));
    if (sink != nullptr) sink(at, chunk, bytes);
    if (sums) XXH3_64bits_update(&state, chunk, bytes);
    if (numbers == Numbers::kFinite) finite = finite && AllFinite(entry.dtype, chunk, bytes);
  }
  if (sums && Digits(XXH3_64bits_digest(&state)) != entry.checksum) {
    return absl::DataLossError(absl::StrCat(path_, ": damaged: the checksum of the tensor ",
                                            Quoted(name), " does not agree"));
  }
  if (finite) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(path_, ": the tensor ", Quoted(name), " holds a number that is not finite"));
}

bool IsConvertible(absl::string_view dtype) {
  return std::count(std::begin(kConvertible), std::end(kConvertible), dtype) > 0;
}

std::string DTypeError(absl::string_view name, absl::string_view dtype) {
  return absl::StrCat("the tensor '", name, "' is of the dtype ", dtype, "; ",
                      absl::StrJoin(kConvertible, ", "), " can be read");
}

absl::Status SafetensorsFile::Read(absl::Span<const NamedTensor> tensors, Numbers numbers) const {
  std::vector<const Entry*> entries;
  for (const auto& [name, tensor] : tensors) {
    BURST_CHECK(tensor.is_contiguous() && tensor.device() == DeviceType::kCpu) << name;
    const auto it = entries_.find(name);
    if (it == entries_.end()) {
      return absl::NotFoundError(absl::StrCat(path_, ": holds no tensor named '", name, "'"));
    }
    const Entry& entry = it->second;
    if (entry.shape != tensor.shape() || entry.dtype != SafetensorsName(tensor.dtype())) {
      return absl::InvalidArgumentError(absl::StrCat(
          path_, ": '", name, "' is ", ToString(entry.shape), " ", entry.dtype, ", expected ",
          ToString(tensor.shape()), " ", SafetensorsName(tensor.dtype())));
    }
    entries.push_back(&entry);
  }
  std::vector<absl::Status> results(tensors.size());
  ParallelTasks(static_cast<int64_t>(tensors.size()), [&](int64_t i) {
    char* const data = static_cast<char*>(tensors[i].tensor.raw_data());
    results[i] = ReadEntry(tensors[i].name, *entries[i], data, numbers);
  });
  for (const absl::Status& status : results) BURST_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status SafetensorsFile::ReadConverted(absl::Span<const NamedTensor> tensors,
                                            Numbers numbers) const {
  std::vector<const Entry*> entries;
  for (const auto& [name, tensor] : tensors) {
    BURST_CHECK(tensor.is_contiguous() && tensor.device() == DeviceType::kCpu) << name;
    const Entry* const entry = Find(name);
    if (entry == nullptr) {
      return absl::NotFoundError(absl::StrCat(path_, ": holds no tensor named '", name, "'"));
    }
    if (entry->shape != tensor.shape()) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": '", name, "' is ",
                                                     ToString(entry->shape), ", expected ",
                                                     ToString(tensor.shape())));
    }
    if (!IsConvertible(entry->dtype)) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": ", DTypeError(name, entry->dtype)));
    }
    entries.push_back(entry);
  }
  std::vector<absl::Status> results(tensors.size());
  ParallelTasks(static_cast<int64_t>(tensors.size()), [&](int64_t i) {
    const Entry& entry = *entries[i];
    const int64_t size = SafetensorsElementBytes(entry.dtype);
    const Tensor& to = tensors[i].tensor;
    results[i] = ReadEntry(tensors[i].name, entry, /*data=*/nullptr, numbers,
                           [&](int64_t at, const char* chunk, int64_t bytes) {
                             DispatchFloat(to.dtype(), [&](auto zero) {
                               using T = decltype(zero);
                               Convert(entry.dtype, chunk, bytes, to.data<T>() + at / size);
                             });
                           });
  });
  for (const absl::Status& status : results) BURST_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status SafetensorsFile::Verify(Numbers numbers) const {
  const std::vector<std::string> all = names();
  std::vector<absl::Status> results(all.size());
  ParallelTasks(static_cast<int64_t>(all.size()), [&](int64_t i) {
    results[i] = ReadEntry(all[i], entries_.at(all[i]), nullptr, numbers);
  });
  for (const absl::Status& status : results) BURST_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> SafetensorsFile::Fingerprint() const {
  constexpr int64_t kEnd = 4096;  // bytes
  std::string text;
  for (const auto& [name, entry] : entries_) {
    absl::StrAppend(&text, name, " ", entry.dtype, " ", ToString(entry.shape), " ");
    const int64_t bytes = std::min(entry.bytes, kEnd);
    for (const int64_t at : {entry.begin, entry.begin + entry.bytes - bytes}) {
      std::string end(bytes, '\0');
      if (pread(fd_, &end[0], bytes, at) != bytes) {
        return absl::DataLossError(absl::StrCat(path_, ": the tensor ", name, " cannot be read"));
      }
      text += end;
    }
  }
  return XXH3_64bits(text.data(), text.size());
}

}  // namespace burst
