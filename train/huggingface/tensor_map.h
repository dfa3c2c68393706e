// Maps tensors of a Hugging Face directory to parameters.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/parameters.h"
#include "train/huggingface/config.h"

namespace burst {

// A tensor of the directory: [out, in] as in this program, or [in, out] (`transposed`) as in GPT-2.
struct ForeignTensor {
  std::string name;
  Shape shape;  // the shape in the directory
  bool transposed = false;

  Shape shape_here() const;  // [out, in]
};

// Returns the tensors whose rows, one after the other, make up the parameter: queries, keys and
// values, or gate and up. Other parameters have one tensor. The config's type must be known.
std::vector<ForeignTensor> ForeignTensors(const HuggingFaceConfig& config,
                                          const Parameter& parameter);

// Returns whether a tensor of a directory is not read. These are masks and angles, which this
// program computes, and the head of a tied model, which must equal its embedding
// (HuggingFaceDirectory).
bool IsComputed(const HuggingFaceConfig& config, absl::string_view name);

// Returns the prefix of the names ("model.", "transformer."), which a directory may lack.
std::string NamePrefix(const HuggingFaceConfig& config);

}  // namespace burst
