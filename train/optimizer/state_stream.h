// The state of an optimizer that is in the host's memory, updated on a device. Pieces of it are
// copied there, updated and copied back; one piece is updated while its neighbors are copied. A
// private part of AdamW (train/optimizer/adamw.h).
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
  // `piece`: the elements of a piece, a multiple of 64, so that pieces begin where vectorized loads
  // can.
  StateStream(DeviceType device, int64_t piece);

  // Calls update(piece) for the pieces of all parts, in order; each has the tensors of its range of
  // the part, all on the device. The moments m and v are in the host's memory, and so are masters
  // where compute is not null. Values that `update` writes into them are there, too, once the
  // device has done all queued work.
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
  CopyStream in_, out_;  // copies of both directions run at the same time
};

}  // namespace burst
