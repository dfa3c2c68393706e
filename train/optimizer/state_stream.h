// The state of an optimizer that is in the host's memory, updated on a device. Pieces of it are
// copied there, updated and copied back; one piece is updated while its neighbors are copied. A
// private part of AdamW (train/optimizer/adamw.h).
#pragma once

#include <array>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/device/copy_stream.h"
#include "burst/tensor/tensor.h"
#include "train/optimizer/update_step.h"

namespace burst {

// Belongs to one thread.
class StateStream {
 public:
  explicit StateStream(DeviceType device);

  // Runs the steps in order. Their state is in the host's memory, and each of them gets it on the
  // device. What a step writes into it is in the host's memory, too, once the device has done all
  // queued work. Returns the first error of a step; the steps behind it do not run.
  absl::Status Run(absl::Span<const UpdateStep> steps);

 private:
  // Memory of the device for a step: one is filled, one is updated, one is copied back.
  struct Buffer {
    explicit Buffer(DeviceType device) : filled(device), emptied(device) {}
    Tensor memory;  // [most tensors of a step, most elements of one]
    CopyStream::Mark filled, emptied;
  };

  const DeviceType device_;
  std::array<Buffer, 3> buffers_;
  CopyStream in_, out_;  // copies of both directions run at the same time
};

}  // namespace burst
