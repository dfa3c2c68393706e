// A set: a checkpoint of which several ranks write their parts at the same time.
//
//   checkpoint.safetensors   the index: a safetensors file without tensors. It has the strings of
//                            any checkpoint (checkpoint.h), and "set": JSON with the folder's name,
//                            and each file's name, bytes and checksum of its header
//   checkpoint-12.set/       00001-of-00004.safetensors, ...: a file of each rank. Its tensors are
//                            flat parts of the whole ones; the string "parts" says which parts
//
// The index is written last, when all files are flushed to the disk: it makes the set a checkpoint.
// A parameter's part is a range of its elements in order. With tensor parallelism it is a range of
// the elements in the rank's slices along an axis, one slice after the other. The moments have
// equal parts. Parts may overlap; an element in several parts has equal values there.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "burst/tensor/tensor.h"
#include "model/parameters.h"
#include "train/checkpoint/safetensors.h"
#include "train/checkpoint/state_copy.h"

namespace burst {

// A part of a tensor's elements.
struct TensorPart {
  Shape full_shape;
  int axis = 0;
  std::vector<std::pair<int64_t, int64_t>> slices;  // (begin, length) along axis; none: all
  int64_t begin = 0;                                // in the row of the slices' elements
  int64_t length = 0;
};

// Returns the elements [begin, begin + length) of this rank's part of the parameter.
TensorPart PartOfParameter(const Parameter& parameter, int64_t begin, int64_t length);

// Returns the ranges that one rank writes, so that all ranks together write the whole state and
// each writes about as much as the others. They are its pieces of a divided state, and its share of
// the state that several ranks have. `rank` is the rank's number among the `ranks` with the same
// parameters, `part` its number among the `parts` tensor-parallel ranks.
std::vector<StateRange> ShareOfState(const ParameterList& parameters, int rank, int ranks, int part,
                                     int parts);

// Returns "checkpoint-12.set". With number > 1, for a repeated step, it is
// "checkpoint-12-<number>.set".
std::string SetName(int64_t step, int64_t number);
// Returns the path of a set's file. The first of `files` has number 0.
std::string SetFilePath(const std::string& set, int number, int files);

// Writes the file of one rank, atomically, on any thread.
absl::Status WriteSetFile(const std::string& path, const StateCopy& state);

// Writes the index, atomically: `strings` and "set". `set` is the folder next to `path` that holds
// the files. FailedPrecondition means that one of its `files` files is missing.
absl::Status WriteSetIndex(const std::string& path, const StringMap& strings,
                           const std::string& set, int files);

// Returns the folder that an index names, or nullopt if the file is not an index.
std::optional<std::string> SetOfIndex(const SafetensorsFile& file);

// Reads the tensors of a checkpoint in one file or a set.
class CheckpointReader {
 public:
  // Opens a checkpoint. DataLoss names a file that is damaged or, in a set, missing.
  static absl::StatusOr<CheckpointReader> Open(const std::string& path);

  const StringMap& metadata() const { return metadata_; }
  bool has_checksums() const { return has_checksums_; }
  // Returns the checksum of the header, which holds the checksums of all tensors or files. It is
  // equal for equal checkpoints, and empty without checksums.
  const std::string& identity() const { return identity_; }
  std::vector<std::string> names() const;
  int64_t numel() const;  // the elements of all whole tensors together

  // A whole tensor ([full shape], contiguous, on the CPU), of which `part` is wanted. Read may
  // leave other elements as they are.
  struct Wanted {
    std::string name;
    Tensor whole;
    TensorPart part;
  };
  // Fills the wanted tensors with finite numbers. In a set, only files that hold some of them are
  // read. It returns the errors of SafetensorsFile::Read, and DataLoss for a file that was replaced
  // since Open.
  absl::Status Read(absl::Span<const Wanted> wanted) const;
  // Reads and checks everything, and keeps nothing.
  absl::Status Verify() const;

 private:
  struct FilePart {
    size_t file;
    TensorPart part;
  };
  explicit CheckpointReader(std::string path) : path_(std::move(path)) {}
  absl::Status OpenSet(const std::string& text);
  absl::Status TakeParts(size_t file, const SafetensorsFile& opened);
  // Opens a file again. Its header's checksum must be the one that Open saw.
  static absl::StatusOr<SafetensorsFile> OpenAgain(const std::string& path,
                                                   const std::string& checksum);

  std::string path_, identity_;
  StringMap metadata_;
  bool has_checksums_ = false;
  bool is_set_ = false;
  std::map<std::string, int64_t> numel_;  // by tensor
  std::vector<std::string> files_;        // the files of a set
  std::vector<std::string> checksums_;    // the checksums of their headers
  std::map<std::string, std::vector<FilePart>> parts_;
};

}  // namespace burst
