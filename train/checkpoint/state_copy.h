// Copies the part of a model's state that a rank writes. The copy is taken between two steps and
// written during the next ones. State that a GPU's rank has in the host's memory (--offload) is not
// copied: it is written before the next update.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "burst/device/device.h"
#include "model/parameters.h"
#include "train/optimizer/adamw.h"

namespace burst {

// The elements [begin, begin + length) of a parameter, in this rank's order.
struct StateRange {
  int parameter = 0;
  int64_t begin = 0;
  int64_t length = 0;
};

// Returns the ranges of all elements that this rank has.
std::vector<StateRange> OwnState(const ParameterList& parameters);

class StateCopy {
 public:
  // `parameters`, whose masters are float32, and the optimizer must outlive the object; this rank
  // has the ranges.
  StateCopy(const ParameterList& parameters, const AdamW& optimizer,
            std::vector<StateRange> ranges);

  // Takes bytes() of the host's memory, page-locked for a GPU's state, and keeps them. Ranks that
  // share a process call it before they wait for one another's kernels.
  void Reserve();
  // 4 bytes for each copied element: of the masters, both moments, and an average. Muon's matrices
  // have one moment.
  int64_t bytes() const;
  // Copies masters and the optimizer's state as they are now. Waits for the device, and reserves
  // memory if needed.
  void Take();
  // Returns whether some parts() are the state itself. It must not be updated until they are
  // written.
  bool in_place() const { return parameters_.sharding().optimizer_on_host; }

  const std::vector<StateRange>& ranges() const { return ranges_; }
  // In a checkpoint's order: the ranges' masters, then for each the optimizer's state.
  struct Part {
    std::string name;      // "layers.0.ffn.up.weight", "adam.m.layers.0.ffn.up.weight"
    size_t range = 0;      // the range's index
    const void* elements;  // the elements at the last Take
    int64_t bytes = 0;
  };
  std::vector<Part> parts() const;
  const Parameter& ParameterOf(const Part& part) const {
    return parameters_[ranges_[part.range].parameter];
  }

 private:
  const Parameter& ParameterOf(const StateRange& range) const {
    return parameters_[range.parameter];
  }

  const ParameterList& parameters_;
  const AdamW& optimizer_;
  const std::vector<AdamW::StateTensor> state_;
  const std::vector<StateRange> ranges_;
  int64_t numel_ = 0;        // the elements of all ranges
  int64_t state_numel_ = 0;  // their elements in all tensors of the optimizer's state
  std::unique_ptr<HostBuffer> buffer_;
  std::vector<const void*> elements_;  // from the last Take, in the order of parts()
};

}  // namespace burst
