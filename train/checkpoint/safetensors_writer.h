// Writes a safetensors file tensor by tensor. A tensor need not be in memory as a whole.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/cli/files.h"
#include "burst/tensor/tensor.h"
#include "train/checkpoint/safetensors.h"

namespace burst {

class SafetensorsWriter {
 public:
  struct Entry {
    std::string name;
    std::string dtype;  // the format's name: "F32", "BF16", "F16"
    Shape shape;
  };
  // Creates the file. Without `checksums` its bytes equal those of the format's own library, which
  // orders tensors by dtype and name.
  static absl::StatusOr<SafetensorsWriter> Create(const std::string& path,
                                                  std::vector<Entry> entries,
                                                  const StringMap& metadata, bool checksums);
  SafetensorsWriter(SafetensorsWriter&&);
  ~SafetensorsWriter();

  // Writes the next bytes of the data: the tensors in the order of the entries, in pieces of any
  // size within a tensor.
  absl::Status Write(const void* data, int64_t bytes);
  // Ends the file and gives it its name. All data must have been written.
  absl::Status Commit();

 private:
  struct State;
  explicit SafetensorsWriter(std::unique_ptr<State> state);
  std::string HeaderText() const;
  void SkipCompleteTensors();

  std::unique_ptr<State> state_;
};

}  // namespace burst
