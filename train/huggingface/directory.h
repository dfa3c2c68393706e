// A Hugging Face directory: config.json, and the weights in model.safetensors or in several files
// that model.safetensors.index.json lists, never both.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/parameters.h"
#include "train/checkpoint/safetensors.h"
#include "train/huggingface/config.h"
#include "train/huggingface/families/family.h"

namespace burst {

// Returns the names of the files that hold a directory's weights. InvalidArgument means that there
// are two sources of weights, or that the only one cannot be read here.
absl::StatusOr<std::set<std::string>> WeightFiles(const std::string& path);

// A directory opened for reading. Every header was read, and the tensors are exactly the model's,
// with its shapes and readable dtypes. A tensor's bytes are read when they are wanted, and not
// kept.
class HuggingFaceDirectory {
 public:
  // Opens a directory, whose config.json is read without the fields `ignored`. InvalidArgument or
  // DataLoss names the directory, and the file, field or tensor.
  static absl::StatusOr<HuggingFaceDirectory> Open(const std::string& path,
                                                   const std::vector<std::string>& ignored = {});

  const HuggingFaceConfig& config() const { return config_; }
  // Returns the model's parameters, without memory.
  const std::vector<Parameter>& parameters() const { return parameters_; }

  // Fills a whole parameter of the model, float32 or float64 on the CPU.
  absl::Status Read(const Parameter& parameter, const Tensor& whole) const;
  // Fills this rank's part of all parameters of such a model, on its device. The model may have a
  // larger vocabulary. Each row of its other tokens becomes the mean of the rows that are there.
  absl::Status Load(ParameterList* parameters) const;
  // Returns a text that differs for other weights (SafetensorsFile::Fingerprint).
  absl::StatusOr<std::string> Fingerprint() const;

 private:
  explicit HuggingFaceDirectory(std::string path) : path_(std::move(path)) {}
  absl::Status Init(const std::vector<std::string>& ignored);
  absl::Status OpenFiles();
  absl::Status OpenFile(const std::string& name);
  absl::Status CheckTensors();
  absl::Status CheckScales(const std::string& name, const SafetensorsFile::Entry& weight) const;
  absl::Status CheckTiedHead() const;
  // Fills `to`, of the tensor's shape, with the numbers that it stands for.
  absl::Status ReadTensor(const std::string& name, const Tensor& to) const;
  // Fills a whole parameter of a model whose vocabulary may be larger.
  absl::Status ReadGrown(const Parameter& parameter, const Tensor& whole) const;
  const SafetensorsFile::Entry& EntryOf(const std::string& name) const;
  std::string NameThere(const ForeignTensor& tensor) const;

  std::string path_;
  HuggingFaceConfig config_;
  std::vector<Parameter> parameters_;
  std::vector<SafetensorsFile> files_;
  std::vector<std::string> file_names_;
  std::map<std::string, int> file_of_;  // tensor: index into files_
  std::string missing_prefix_;          // the prefix that the directory's names lack
};

}  // namespace burst
