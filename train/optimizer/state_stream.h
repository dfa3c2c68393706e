// The state of an optimizer that is in the host's memory, updated on a device: pieces of it are
// copied there, updated and copied back, one while its neighbors are on their way. A private part
// of AdamW (train/optimizer/adamw.h).
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "absl/types/span.h"
#include "burst/device/copy_stream.h"
#include "burst/tensor/tensor.h"
#include "train/optimizer/adamw_cuda.h"

namespace burst {

// Belongs to one thread.
class StateStream {
 public:
  // Pieces of so many elements: a multiple of 64, so that they begin where vectorized loads can.
  StateStream(DeviceType device, int64_t piece);

  // Calls update(piece) for the pieces of all parts, in order; each has the tensors of its range of
  // the part, all on the device. Of the parts m and v are in the host's memory, and masters, where
  // compute is not null. What `update` writes into them is there, too, once the device has done
  // what is queued.
  void Update(absl::Span<const cuda::AdamWPart> parts,
              const std::function<void(const cuda::AdamWPart& piece)>& update);

 private:
  // Memory of the device for a piece: one is filled, one is updated, one is copied back.
  struct Buffer {
    explicit Buffer(DeviceType device) : filled(device), emptied(device) {}
    Tensor memory;  // [3, piece]
    CopyStream::Mark filled, emptied;
  };

  const DeviceType device_;
  const int64_t piece_;
  std::array<Buffer, 3> buffers_;
  CopyStream in_, out_;  // copies of both directions run beside one another
};

}  // namespace burst
