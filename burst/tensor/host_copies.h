// Keeps tensors of a device in the host's memory until they are needed again. The copies there and
// back run in parallel with kernels.
//
//    HostCopies copies(device);
//    auto kept = copies.Store(std::move(x));   // x's last owner here: the copy begins
//    ...                                       // more work is queued
//    kept->Release();                          // x's memory serves work that is queued from here
//    on
//    ...
//    kept->Fetch();                            // begins the copy back, ahead of its use
//    x = kept->Take();
#pragma once

#include <memory>
#include <vector>

#include "burst/device/copy_stream.h"
#include "burst/tensor/tensor.h"

namespace burst {

// Belongs to one thread, like its tensors. It keeps its host memory for later tensors.
class HostCopies {
 public:
  explicit HostCopies(DeviceType device);
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Makes memory for `count` more tensors at once, of at most `bytes` bytes each. Call it while no
  // rank waits for another rank's kernels (see HostBuffer). If memory is missing later, Store makes
  // it itself.
  void Reserve(int64_t count, int64_t bytes);
  int64_t host_bytes() const;

  class Stored;
  // Begins to copy the tensor, which must be contiguous, to the host. This object must outlive the
  // result.
  std::unique_ptr<Stored> Store(Tensor tensor);

 private:
  struct Buffer;
  std::unique_ptr<Buffer> TakeBuffer(int64_t bytes);

  const DeviceType device_;
  std::vector<std::unique_ptr<Buffer>> idle_;
  int64_t host_bytes_ = 0;
  CopyStream stream_;  // last: its copies use the buffers
};

class HostCopies::Stored {
 public:
  ~Stored();
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  // Frees the device's memory, unless others share it. Work that is queued from here on comes after
  // the copy.
  void Release();
  // Allocates device memory and begins to fill it. Does nothing if the tensor has memory.
  void Fetch();
  // Returns the tensor for work that is queued from now on. Call it once; it fetches the tensor if
  // nobody did.
  Tensor Take();

 private:
  friend class HostCopies;
  Stored(HostCopies* copies, Tensor tensor);

  HostCopies* const copies_;
  Tensor tensor_;  // without memory between Release and Fetch
  std::unique_ptr<Buffer> buffer_;
  CopyStream::Mark copied_;  // behind the last copy
};

}  // namespace burst
