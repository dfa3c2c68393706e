// KernelMask: the mask between two blocks of tokens in the forms that kernels take, with a copy on
// the kernels' device. KernelArray: such a copy of other arrays.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "burst/device/simulated_gpu.h"
#include "burst/kernels/flash_attention.h"
#include "burst/mask/block_mask.h"
#include "burst/mask/mask.h"
#include "burst/tensor/tensor.h"

namespace burst {

// Makes an array of the host readable for kernels. There is one copy, made at the first use, since
// a schedule serves one rank on one device.
template <typename T>
class KernelArray {
 public:
  // `values` are the same in every call. Points into them, or into their copy on the GPU.
  const T* On(DeviceType device, const std::vector<T>& values) const {
    if (device == DeviceType::kCpu) return values.data();
    const Shape shape = {static_cast<int64_t>(values.size())};
    if (on_gpu_.null() && SimulatedGpu::Current() != nullptr) {
      on_gpu_ = Tensor::Empty(shape, DTypeOf<T>::value, device);  // no kernel reads it
    } else if (on_gpu_.null()) {
      on_gpu_ = Tensor::FromVector(values, shape, device);
    }
    return static_cast<const T*>(on_gpu_.raw_data());
  }

 private:
  mutable Tensor on_gpu_;
};

// There is one copy, as of a KernelArray.
class KernelKeys : public VisibleKeys {
 public:
  KernelKeys() = default;
  // documents: KeyRanges::documents.
  explicit KernelKeys(VisibleKeys keys, bool documents)
      : VisibleKeys(std::move(keys)), documents_(documents) {}

  // Points into begin and end, or into their copy on the GPU.
  KeyRanges ranges(DeviceType device) const;
  // Counts what a simulated GPU's kernels ask for, and drops begin and end. The masks of all ranks
  // of a plan would take tens of GiB.
  void CountForSimulation();

 private:
  KeyRanges OnHost() const;

  bool documents_ = false;
  int64_t tiles_ = -1;     // VisibleTiles, if begin and end were dropped
  mutable Tensor on_gpu_;  // [2, rows, q_len]: begin and end
  mutable int64_t most_queries_ = 0;
};

class KernelBlocks : public VisibleBlocks {
 public:
  KernelBlocks() = default;
  explicit KernelBlocks(VisibleBlocks blocks) : VisibleBlocks(std::move(blocks)) {}

  // Points into the lists, or into their copy on the GPU. `block` must be kListBlock.
  KeyBlocks lists(DeviceType device) const;
  // Gives these keys to kernels that take no lists; made at the first use.
  const std::vector<KernelKeys>& parts() const;

 private:
  mutable Tensor on_gpu_;  // all lists
  mutable std::vector<KernelKeys> as_parts_;
};

// A BlockMask for the kernels: each part is one call.
struct KernelMask {
  KernelMask(const Mask& mask, const std::vector<int32_t>& queries,
             const std::vector<int32_t>& keys);

  std::vector<KernelKeys> parts;
  KernelBlocks blocks;

  int64_t pairs() const;
  bool none() const { return pairs() == 0; }
};

}  // namespace burst
