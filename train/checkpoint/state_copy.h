// A copy of what a rank writes of a model's state: taken between two steps, written while the next
// ones go on. What a GPU's rank has in the host's memory (--offload) is not copied: it is written
// before the next update.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "burst/device/device.h"
#include "model/parameters.h"
#include "train/optimizer/adamw.h"

namespace burst {

// The elements [begin, begin + length) of a parameter, in the order that this rank has them in.
struct StateRange {
  int parameter = 0;
  int64_t begin = 0;
  int64_t length = 0;
};

// All that this rank has of the parameters.
std::vector<StateRange> OwnState(const ParameterList& parameters);

class StateCopy {
 public:
  // `parameters`, whose masters are float32, must outlive the object; this rank has the ranges.
  StateCopy(const ParameterList& parameters, std::vector<StateRange> ranges);

  // Makes room in the host's memory, page-locked for a GPU's state: bytes(), kept from then on.
  // Where ranks share a process, before they wait for one another's kernels.
  void Reserve();
  int64_t bytes() const;  // 12 an element, less what is not copied
  // Copies masters and moments as they are now; waits for the device. Reserves if need be.
  void Take(const AdamW& optimizer);
  // Whether parts() are of the state itself, in part, which must not be updated until they are
  // written.
  bool in_place() const { return parameters_.sharding().optimizer_on_host; }

  const std::vector<StateRange>& ranges() const { return ranges_; }
  // In a checkpoint's order: the ranges' masters, then for each the first and the second moment.
  struct Part {
    std::string name;      // "layers.0.ffn.up.weight", "adam.m.layers.0.ffn.up.weight"
    size_t range = 0;      // its index
    const void* elements;  // as of the last Take
    int64_t bytes = 0;
  };
  std::vector<Part> parts() const;
  const Parameter& ParameterOf(const Part& part) const {
    return parameters_[ranges_[part.range].parameter];
  }

 private:
  const ParameterList& parameters_;
  const std::vector<StateRange> ranges_;
  int64_t numel_ = 0;  // of the ranges
  std::unique_ptr<HostBuffer> buffer_;
  std::vector<const void*> elements_;  // of the last Take, in the order of parts()
};

}  // namespace burst
