// The safetensors format: 8 bytes of header length (little-endian), a JSON header that names each
// tensor's dtype, shape and range of bytes, then the data. Strings are in "__metadata__".
//
// Checksums are among the strings, as 16 hexadecimal digits of XXH3's 64 bits: "xxh3:<tensor>" of a
// tensor's bytes, "xxh3" of the whole header with zeros in place of these 16 digits. Other programs
// may read the file and know nothing of them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "burst/tensor/tensor.h"

namespace burst {

using StringMap = std::map<std::string, std::string>;

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous
};

// Says whether numbers of one of the format's dtypes can be converted to float32: F32, BF16, F16,
// F64 and F8_E4M3.
bool IsConvertible(absl::string_view dtype);
// Returns the error of a tensor that is not convertible.
std::string DTypeError(absl::string_view name, absl::string_view dtype);

// Atomic: `path` holds the old content or all of the new one. ResourceExhausted when the disk is
// full. Checksums are computed on the threads of the caller's pool.
absl::Status WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                              const StringMap& metadata);

// A file opened for reading; its header has been checked: against its checksum, where there are
// checksums, and against the file's length. The tensors fill the data without gap or overlap.
class SafetensorsFile {
 public:
  // Opens a file. DataLoss names the path of a file that is damaged or not of this format.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  SafetensorsFile(SafetensorsFile&& other);
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;
  ~SafetensorsFile();

  const StringMap& metadata() const { return metadata_; }  // without the checksums
  bool has_checksums() const { return has_checksums_; }
  const std::string& header_checksum() const { return header_checksum_; }  // empty: none
  int64_t file_bytes() const { return file_bytes_; }
  std::vector<std::string> names() const;
  struct Entry {
    std::string dtype;  // the format's name: "F32", "BF16", "F16", ...
    Shape shape;
    int64_t begin = 0;  // bytes from the start of the file
    int64_t bytes = 0;
    std::string checksum;  // empty: none
  };
  const Entry* Find(const std::string& name) const;  // null: the file lacks it
  int64_t numel() const;                             // the elements of all tensors together

  enum class Numbers { kAny, kFinite };
  // Fills the tensors (contiguous, on the CPU), several at a time on the threads of the caller's
  // pool, and compares checksums. DataLoss names the first damaged tensor or, with kFinite, the
  // first that holds an infinity or not-a-number. NotFound if a tensor is missing; InvalidArgument
  // when shape or dtype differ.
  absl::Status Read(absl::Span<const NamedTensor> tensors, Numbers numbers = Numbers::kAny) const;
  // Reads like Read into tensors of float32 or float64, and converts numbers of the convertible
  // dtypes (IsConvertible).
  absl::Status ReadConverted(absl::Span<const NamedTensor> tensors,
                             Numbers numbers = Numbers::kAny) const;
  // Checks every tensor of the file as Read does, and keeps nothing.
  absl::Status Verify(Numbers numbers) const;
  // Returns a hash of the names, dtypes, shapes and both ends of every tensor. It tells other
  // weights apart without reading them all.
  absl::StatusOr<uint64_t> Fingerprint() const;

 private:
  // Takes a tensor's bytes, [at, at + bytes) at a time.
  using Sink = std::function<void(int64_t at, const char* chunk, int64_t bytes)>;

  SafetensorsFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status ReadHeader();
  absl::Status TakeHeader(const nlohmann::json& header, int64_t data_begin, int64_t file_bytes);
  absl::Status TakeChecksums();
  // Reads an entry; with data = null it keeps nothing.
  absl::Status ReadEntry(const std::string& name, const Entry& entry, char* data, Numbers numbers,
                         const Sink& sink = nullptr) const;

  std::string path_;
  int fd_ = -1;
  StringMap metadata_;
  bool has_checksums_ = false;
  std::string header_checksum_;
  int64_t file_bytes_ = 0;
  std::map<std::string, Entry> entries_;
};

}  // namespace burst
