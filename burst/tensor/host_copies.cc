#include "burst/tensor/host_copies.h"

#include <algorithm>
#include <utility>

#include "burst/base/check.h"
#include "burst/device/device.h"

namespace burst {

struct HostCopies::Buffer {
  Buffer(DeviceType device, int64_t bytes) : bytes(bytes), memory(device, bytes) {}

  const int64_t bytes;
  HostBuffer memory;
};

HostCopies::HostCopies(DeviceType device) : device_(device), stream_(device) {}
HostCopies::~HostCopies() = default;

int64_t HostCopies::host_bytes() const { return host_bytes_; }

void HostCopies::Reserve(int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) idle_.push_back(std::make_unique<Buffer>(device_, bytes));
  host_bytes_ += count * bytes;
}

// Returns the smallest buffer that is idle and large enough.
std::unique_ptr<HostCopies::Buffer> HostCopies::TakeBuffer(int64_t bytes) {
  auto best = idle_.end();
  for (auto buffer = idle_.begin(); buffer != idle_.end(); ++buffer) {
    if ((*buffer)->bytes < bytes) continue;
    if (best == idle_.end() || (*buffer)->bytes < (*best)->bytes) best = buffer;
  }
  if (best == idle_.end()) {
    host_bytes_ += bytes;
    return std::make_unique<Buffer>(device_, bytes);
  }
  std::unique_ptr<Buffer> taken = std::move(*best);
  idle_.erase(best);
  return taken;
}

std::unique_ptr<HostCopies::Stored> HostCopies::Store(Tensor tensor) {
  return std::unique_ptr<Stored>(new Stored(this, std::move(tensor)));
}

HostCopies::Stored::Stored(HostCopies* copies, Tensor tensor)
    : copies_(copies),
      tensor_(std::move(tensor)),
      buffer_(copies->TakeBuffer(tensor_.size_bytes())),
      copied_(copies->device_) {
  BURST_CHECK(tensor_.is_contiguous() && tensor_.device() == copies_->device_);
  copies_->stream_.Copy(buffer_->memory.data(), DeviceType::kCpu, tensor_.raw_data(),
                        copies_->device_, tensor_.size_bytes(), &copied_);
}

HostCopies::Stored::~Stored() {
  if (buffer_ == nullptr) return;
  copied_.Wait();  // the copy's device memory is freed now
  copies_->idle_.push_back(std::move(buffer_));
}

void HostCopies::Stored::Release() {
  copied_.Wait();
  tensor_ = tensor_.WithoutMemory();
}

void HostCopies::Stored::Fetch() {
  if (!tensor_.null()) return;
  tensor_ = Tensor::EmptyLike(tensor_);
  copies_->stream_.Copy(tensor_.raw_data(), copies_->device_, buffer_->memory.data(),
                        DeviceType::kCpu, tensor_.size_bytes(), &copied_);
}

Tensor HostCopies::Stored::Take() {
  BURST_CHECK(buffer_ != nullptr) << "taken twice";
  Fetch();
  copied_.Wait();
  // A later copy into the buffer comes after this one, on the same stream.
  copies_->idle_.push_back(std::move(buffer_));
  return std::exchange(tensor_, Tensor());
}

}  // namespace burst
