// A communicator for GPU memory on top of one for host memory: every message goes through the host.
// Any number of ranks may share one GPU, so the ring is tested where there is only one.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/device/device.h"
#include "burst/tensor/tensor.h"

namespace burst {

class StagedCommunicator : public Communicator {
 public:
  explicit StagedCommunicator(Communicator* host) : host_(host) {}

  int rank() const override { return host_->rank(); }
  int world_size() const override { return host_->world_size(); }

  absl::Status Wait(Channel channel) override {
    Pending& pending = pending_[static_cast<int>(channel)];
    BURST_RETURN_IF_ERROR(host_->Wait(channel));
    for (const auto& [buffer, staged] : pending.receives) {
      CopyMemory(buffer.data, DeviceType::kCuda, staged.raw_data(), DeviceType::kCpu, buffer.bytes);
    }
    pending = Pending();
    return absl::OkStatus();
  }

  void Abort(const absl::Status& reason) override { host_->Abort(reason); }

  absl::StatusOr<std::unique_ptr<Communicator>> Split(int, int) override {
    return absl::UnimplementedError("Split");
  }

 private:
  struct Pending {
    std::vector<Tensor> sends;
    std::vector<std::pair<ReceiveBuffer, Tensor>> receives;
  };

  static Tensor HostBytes(int64_t bytes) {
    return Tensor::Empty({(bytes + 3) / 4}, DType::kFloat32, DeviceType::kCpu);
  }

  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override {
    Pending& pending = pending_[static_cast<int>(channel)];
    std::vector<SendBuffer> host_sends;
    std::vector<ReceiveBuffer> host_receives;
    for (const SendBuffer& send : sends) {
      const Tensor staged = HostBytes(send.bytes);
      CopyMemory(staged.raw_data(), DeviceType::kCpu, send.data, DeviceType::kCuda, send.bytes);
      host_sends.push_back({staged.raw_data(), send.bytes, send.peer});
      pending.sends.push_back(staged);
    }
    for (const ReceiveBuffer& receive : receives) {
      const Tensor staged = HostBytes(receive.bytes);
      host_receives.push_back({staged.raw_data(), receive.bytes, receive.peer});
      pending.receives.emplace_back(receive, staged);
    }
    return host_->Post(channel, host_sends, host_receives);
  }

  Communicator* const host_;
  Pending pending_[kNumChannels];
};

}  // namespace burst
