// The communicator of a rank that owns a GPU. For gpu_communicator.cc.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/failure.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/gpu/nccl_link.h"
#include "burst/comm/gpu/peer_copies.h"
#include "burst/comm/gpu/peer_mail.h"
#include "burst/device/cuda.h"
#include "burst/device/progress.h"

namespace burst {

// State that the ranks of this process share.
struct GpuWorld {
  // `in_threads` says that all ranks are threads of this process.
  explicit GpuWorld(bool in_threads, bool ends_process = true)
      : in_threads(in_threads),
        has_mail(!ends_process),
        watchdog(
            &failure, [this] { return links.AsyncError(); },
            in_threads || !ends_process ? [this] { Free(); } : std::function<void()>(),
            ends_process) {}

  // Ends the waits of this process's streams for other ranks.
  void Free() {
    links.Abort();
    mails.Free();
  }

  const bool in_threads;
  const bool has_mail;  // in a library, whose ranks post on all channels in one order
  FailureState failure;
  NcclLinks links{&failure};
  PeerMails mails{&failure};
  PeerExchanges exchanges;
  FailureWatchdog watchdog;  // the last member, because it uses the others
};

// One rank's communicator. Belongs to the rank's thread.
class GpuCommunicator : public Communicator {
 public:
  // Collective. `host` connects the same ranks; `host` and `world` must outlive the communicator.
  static absl::StatusOr<std::unique_ptr<GpuCommunicator>> Create(Communicator* host,
                                                                 GpuWorld* world);
  // Connects processes, with the host communicator that `connect` makes.
  static absl::StatusOr<std::unique_ptr<GpuCommunicator>> Create(const HostConnector& connect,
                                                                 bool ends_process);
  ~GpuCommunicator() override;

  int rank() const override { return host_->rank(); }
  int world_size() const override { return host_->world_size(); }
  int WorldRank(int rank) const override { return host_->WorldRank(rank); }

  absl::Status Wait(Channel channel) override;
  bool messages_are_kernels(int64_t bytes) const override {
    const bool mailed = mail_ != nullptr && bytes <= PeerMail::kMostBytes;
    return world_size() > 1 && copies_ == nullptr && !mailed;
  }
  void Abort(const absl::Status& reason) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;
  absl::Status AllReduceSum(const Tensor& tensor) override;
  absl::Status PostAllReduceSum(const Tensor& tensor) override;
  absl::Status PostAllGatherParts(const Tensor& own, absl::Span<const int64_t> counts,
                                  const Tensor& all) override;
  absl::Status PostReduceScatterSum(const Tensor& all, absl::Span<const int64_t> counts,
                                    const Tensor& own) override;

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override;

 private:
  // A channel on the GPU: its stream, and its link if NCCL carries its messages.
  struct Lane {
    std::unique_ptr<NcclLink> link;  // null in a world of one rank
    cudaStream_t stream = nullptr;   // made at the first use
    cudaEvent_t done = nullptr;
    std::unique_ptr<MessageMarks> marks;  // made with the stream
    bool posted = false;                  // whether it posted since the last Wait
    bool posted_copies = false;
    bool posted_on_host = false;
  };

  GpuCommunicator(Communicator* host, GpuWorld* world)
      : host_(host), world_(world), device_(cuda::CurrentContext().device) {}

  Lane& lane(Channel channel) { return lanes_[static_cast<int>(channel)]; }
  absl::Status Connect(absl::Span<const ncclUniqueId> ids);
  absl::Status ConnectRing();
  bool IsOneNcclCall(absl::Span<const int64_t> counts, const Tensor& own) const;
  absl::Status Begin(Lane& lane);
  void Join(Lane& lane);
  void CopyToSelf(Lane& lane);
  absl::Status PostMail(Channel channel);
  absl::Status PostNccl(Channel channel);
  // Makes calls of NCCL on the lane, in one group. The watchdog is told what they are, their bytes,
  // and one of the ranks they reach (-1: all).
  template <typename Function>
  absl::Status Group(Lane& lane, const char* what, int peer, int64_t bytes, Function&& function);

  // What this communicator owns, or null. If ranks are processes, the communicator of all ranks
  // owns both. A group made by Split owns its host communicator.
  std::unique_ptr<GpuWorld> owned_world_;
  std::unique_ptr<Communicator> owned_host_;

  Communicator* host_;
  GpuWorld* world_;
  const int device_;
  std::array<Lane, kNumChannels> lanes_;
  std::unique_ptr<PeerCopies> copies_;  // null unless copy engines carry messages
  std::unique_ptr<PeerMail> mail_;      // null unless it carries short messages
  // Buffers of the current Post; they are members so that their memory is reused.
  std::vector<SendBuffer> host_sends_, sends_, mail_sends_;
  std::vector<ReceiveBuffer> host_receives_, receives_, mail_receives_;
};

}  // namespace burst
