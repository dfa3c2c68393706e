// A checkpoint that several ranks wrote, each its part at once with the others: a set.
//
//   checkpoint.safetensors   the index: a safetensors file without tensors, whose strings are
//                            those of any checkpoint (checkpoint.h), and "set": JSON with the
//                            folder's name, and of each file name, bytes and header's checksum
//   checkpoint-12.set/       00001-of-00004.safetensors, ...: a file of each rank. A tensor is a
//                            part of the one of its name, flat; the string "parts" says which
//
// The index is written last, when all files are flushed to the disk: it makes the set a checkpoint.
// A parameter's part is a range of the row of its elements; with tensor parallelism of the elements
// that the rank's slices along an axis have, one slice behind the other. Its moments' parts are the
// same. Parts may overlap; elements that are in several have equal values.
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

// Elements of a tensor.
struct TensorPart {
  Shape full_shape;
  int axis = 0;
  std::vector<std::pair<int64_t, int64_t>> slices;  // (begin, length) along axis; none: all
  int64_t begin = 0;                                // of the row of the slices' elements
  int64_t length = 0;
};

// The elements [begin, begin + length) of what this rank has of the parameter.
TensorPart PartOfParameter(const Parameter& parameter, int64_t begin, int64_t length);

// Returns the ranges that one rank writes, so that all ranks together write the whole state and
// each writes about as much as the others. They are its pieces of a divided state, and its share of
// the state that several ranks have. `rank` is the rank's number among the `ranks` with the same
// parameters, `part` its number among the `parts` tensor-parallel ranks.
std::vector<StateRange> ShareOfState(const ParameterList& parameters, int rank, int ranks, int part,
                                     int parts);

// "checkpoint-12.set"; with number > 1 "checkpoint-12-<number>.set", for a step that is made again.
std::string SetName(int64_t step, int64_t number);
// The path of a set's file. number: 0 for the first of `files`.
std::string SetFilePath(const std::string& set, int number, int files);

// Writes the file of one rank. Atomic; on any thread.
absl::Status WriteSetFile(const std::string& path, const StateCopy& state);

// Writes the index: `strings` and "set". `set` is the folder next to `path` that holds the files.
// Atomic. FailedPrecondition if one of its `files` files is missing.
absl::Status WriteSetIndex(const std::string& path, const StringMap& strings,
                           const std::string& set, int files);

// Returns the folder that an index names, or nullopt if the file is not an index.
std::optional<std::string> SetOfIndex(const SafetensorsFile& file);

// The tensors of a checkpoint, in one file or a set.
class CheckpointReader {
 public:
  // DataLoss for what is damaged or, of a set, missing, naming the file.
  static absl::StatusOr<CheckpointReader> Open(const std::string& path);

  const StringMap& metadata() const { return metadata_; }
  bool has_checksums() const { return has_checksums_; }
  // The checksum of its header, which holds those of all tensors, or of a set's files: equal for
  // equal checkpoints. Empty without checksums.
  const std::string& identity() const { return identity_; }
  std::vector<std::string> names() const;
  int64_t numel() const;  // of all tensors together, whole

  // A tensor, whole ([full shape], contiguous, on the CPU), of which `part` is wanted. Other
  // elements may be left as they are.
  struct Wanted {
    std::string name;
    Tensor whole;
    TensorPart part;
  };
  // Fills the wanted tensors. In a set, only files that hold some of them are read. Every number
  // read is finite. Errors: those of SafetensorsFile::Read, and DataLoss for a file that was
  // replaced since Open.
  absl::Status Read(absl::Span<const Wanted> wanted) const;
  // Reads and checks everything; nothing is kept.
  absl::Status Verify() const;

 private:
  struct FilePart {
    size_t file;
    TensorPart part;
  };
  explicit CheckpointReader(std::string path) : path_(std::move(path)) {}
  absl::Status OpenSet(const std::string& text);
  absl::Status TakeParts(size_t file, const SafetensorsFile& opened);
  // A file that Open has seen, by its header's checksum.
  static absl::StatusOr<SafetensorsFile> OpenAgain(const std::string& path,
                                                   const std::string& checksum);

  std::string path_, identity_;
  StringMap metadata_;
  bool has_checksums_ = false;
  bool is_set_ = false;
  std::map<std::string, int64_t> numel_;  // by tensor
  std::vector<std::string> files_;        // of a set
  std::vector<std::string> checksums_;    // of their headers
  std::map<std::string, std::vector<FilePart>> parts_;
};

}  // namespace burst
