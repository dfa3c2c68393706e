// Which tensors of a Hugging Face directory make up which parameter.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/parameters.h"

namespace burst {

// A tensor of the directory: [out, in] as here, or [in, out] (`transposed`), GPT-2's.
struct ForeignTensor {
  std::string name;
  Shape shape;  // as it is stored there
  bool transposed = false;

  Shape shape_here() const;  // [out, in]
};

// The tensors whose rows, one behind the other, make up the parameter: queries, keys and values, or
// gate and up; else there is one.
std::vector<ForeignTensor> ForeignTensors(const ModelConfig& config, const Parameter& parameter);

// Whether a tensor of a directory is not read. These are masks and angles, which are computed here,
// and the head of a tied model, which must equal its embedding (HuggingFaceDirectory).
bool IsComputed(const ModelConfig& config, absl::string_view name);

// The prefix of the names ("model.", "transformer."), unless the directory was saved without it.
std::string NamePrefix(const ModelConfig& config);

}  // namespace burst
