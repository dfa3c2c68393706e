// The state of an optimizer that is in the host's memory, updated on a device. Pieces of it are
// copied there, updated and copied back; one piece is updated while its neighbors are copied. Some
// pieces can stay on the device. A private part of AdamW (train/optimizer/adamw.h).
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/device/copy_stream.h"
#include "burst/tensor/tensor.h"
#include "train/optimizer/update_step.h"

namespace burst {

// Belongs to one thread.
class StateStream {
 public:
  // Takes memory of the device for `resident` elements of `dtype`. Pieces that find room there stay
  // from one Run to the next.
  StateStream(DeviceType device, DType dtype, int64_t resident);

  // Runs the steps in order. Their state is in the host's memory, and each of them gets it on the
  // device. What a step writes into it is in the host's memory, too, after WriteBack. Returns the
  // first error of a step; the steps behind it do not run.
  absl::Status Run(absl::Span<const UpdateStep> steps);

  // Queues copies of the pieces that stay on the device and have changed. The host's memory has the
  // whole state once the device has done all queued work.
  void WriteBack();

  int64_t resident_bytes() const {
    return resident_memory_.null() ? 0 : resident_memory_.size_bytes();
  }

 private:
  // Memory of the device for a step: one is filled, one is updated, one is copied back.
  struct Buffer {
    explicit Buffer(DeviceType device) : filled(device), emptied(device) {}
    Tensor memory;  // [most tensors of a step, most elements of one]
    CopyStream::Mark filled, emptied;
  };
  // The state of a step that stays on the device.
  struct Resident {
    std::vector<Tensor> on_host, here;
  };

  bool Admit(const UpdateStep& step);

  const DeviceType device_;
  std::array<Buffer, 3> buffers_;
  const Tensor resident_memory_;  // [resident], or null
  int64_t taken_ = 0;             // the elements of resident_memory_ that have an owner
  // By the place in the host's memory of the first tensor.
  std::unordered_map<const void*, Resident> residents_;
  CopyStream::Mark moved_;  // behind the copies of residents
  bool changed_ = false;    // residents are newer than the host's memory
  CopyStream in_, out_;     // copies of both directions run at the same time
};

}  // namespace burst
