// The safetensors format: 8 bytes of header length (little-endian), a JSON header that names each
// tensor's dtype, shape and range of bytes, then the data. Strings are in "__metadata__".
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/tensor/tensor.h"

namespace burst {

using StringMap = std::map<std::string, std::string>;

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous
};

// Atomic: `path` holds the old content or all of the new one. ResourceExhausted when the disk is
// full.
absl::Status WriteSafetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                              const StringMap& metadata);

// A file opened for reading; its header has been checked against its length.
class SafetensorsFile {
 public:
  // DataLoss, naming the path, for a file that is truncated or not of this format.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  SafetensorsFile(SafetensorsFile&& other);
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;
  ~SafetensorsFile();

  const StringMap& metadata() const { return metadata_; }
  std::vector<std::string> names() const;

  // Fills `tensor` (contiguous). NotFound, or InvalidArgument when shape or dtype differ.
  absl::Status Read(const std::string& name, const Tensor& tensor) const;

 private:
  struct Entry {
    DType dtype = DType::kFloat32;
    Shape shape;
    int64_t begin = 0;  // bytes from the start of the file
    int64_t bytes = 0;
  };

  SafetensorsFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status ParseHeader();

  std::string path_;
  int fd_ = -1;
  StringMap metadata_;
  std::map<std::string, Entry> entries_;
};

}  // namespace burst
