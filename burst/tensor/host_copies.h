// Keeps tensors of a device in the host's memory until they are needed again. The copies there and
// back run while kernels do.
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

// Belongs to one thread, like its tensors. Its memory of the host stays for later tensors.
class HostCopies {
 public:
  explicit HostCopies(DeviceType device);
  ~HostCopies();
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  // Makes memory for `count` more tensors at once, of at most `bytes` bytes each. To be called
  // while no rank waits for another's kernels (see HostBuffer). If memory is missing later, Store
  // makes it itself.
  void Reserve(int64_t count, int64_t bytes);
  int64_t host_bytes() const;

  class Stored;
  // tensor: contiguous. Outlives what it returns.
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
  // Takes memory of the device, and begins to fill it. Does nothing if it has any.
  void Fetch();
  // The tensor, for work that is queued from here on. Once; fetches it if nobody did.
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
