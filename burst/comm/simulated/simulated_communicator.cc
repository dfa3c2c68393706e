#include "burst/comm/simulated/simulated_communicator.h"

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/comm/simulated/simulated_times.h"
#include "burst/comm/thread/thread_communicator.h"

namespace burst {
namespace {

using Group = SimulatedTimes::Group;

std::vector<int> WorldRanks(const Communicator& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.world_size(); ++rank) ranks.push_back(group.WorldRank(rank));
  return ranks;
}

// A communicator of simulated GPUs. For a message of GPU memory, ranks exchange only the time at
// which the sender has it (SimulatedTimes). Collectives begin when the last rank has reached them.
// Messages of host memory go through `hosts`, a communicator of threads.
class SimulatedCommunicator : public Communicator {
 public:
  SimulatedCommunicator(Communicator* hosts, SimulatedTimes* times, std::shared_ptr<Group> group,
                        SimulatedGpu* gpu, int ranks_per_node)
      : hosts_(hosts),
        times_(times),
        group_(std::move(group)),
        gpu_(gpu),
        ranks_per_node_(ranks_per_node) {}

  int rank() const override { return hosts_->rank(); }
  int world_size() const override { return hosts_->world_size(); }
  int WorldRank(int rank) const override { return hosts_->WorldRank(rank); }
  void Abort(const absl::Status& reason) override {
    hosts_->Abort(reason);
    times_->Fail();
  }
  absl::Status Barrier() override { return hosts_->Barrier(); }

  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> part, hosts_->Split(color, key));
    const int64_t number = splits_++;
    if (part == nullptr) return part;
    auto comm = std::make_unique<SimulatedCommunicator>(
        part.get(), times_, times_->MakeGroup(group_.get(), number, color, WorldRanks(*part)), gpu_,
        ranks_per_node_);
    comm->owned_ = std::move(part);
    return comm;
  }

  absl::Status Wait(Channel channel) override {
    const int c = static_cast<int>(channel);
    if (hosts_post_[c]) BURST_RETURN_IF_ERROR(hosts_->Wait(channel));
    hosts_post_[c] = false;
    for (const Transfer& transfer : transfers_[c]) {
      double begin = std::max(transfer.begin, arrived_[c]);
      for (const ReceiveBuffer& receive : transfer.receives) {
        SentMessage sent;
        if (!times_->Receive(*group_, c, WorldRank(receive.peer), WorldRank(rank()), &sent)) {
          return Alone(channel);
        }
        if (sent.bytes != receive.bytes) {
          return absl::InvalidArgumentError(absl::StrCat("rank ", WorldRank(receive.peer),
                                                         " sends ", sent.bytes,
                                                         " bytes to a buffer of ", receive.bytes));
        }
        begin = std::max(begin, sent.time);
      }
      if (transfer.collective.has_value()) {
        double last = 0;
        if (!times_->AwaitAll(*group_, *transfer.collective, WorldRank(rank()), &last)) {
          return Alone(channel);
        }
        begin = std::max(begin, last);
      }
      arrived_[c] = begin + gpu_->model().message_seconds + transfer.seconds;
    }
    gpu_->WaitUntil(arrived_[c]);
    transfers_[c].clear();
    return absl::OkStatus();
  }

  absl::Status AllReduceSum(const Tensor& tensor) override {
    if (tensor.device() == DeviceType::kCpu) return hosts_->AllReduceSum(tensor);
    BURST_RETURN_IF_ERROR(PostAllReduceSum(tensor));
    return Wait(Channel::kCollective);
  }
  absl::Status PostAllReduceSum(const Tensor& tensor) override {
    if (tensor.device() == DeviceType::kCpu) {
      HostsPost(Channel::kCollective);
      return hosts_->PostAllReduceSum(tensor);
    }
    CountAllReduce(tensor.numel(), SizeOf(tensor.dtype()));
    return PostCollective(2.0 * tensor.size_bytes());
  }
  absl::Status PostAllGatherParts(const Tensor& own, absl::Span<const int64_t> counts,
                                  const Tensor& all) override {
    if (all.device() == DeviceType::kCpu) {
      HostsPost(Channel::kCollective);
      return hosts_->PostAllGatherParts(own, counts, all);
    }
    CountSent(Channel::kCollective, (world_size() - 1) * own.size_bytes(), world_size() - 1);
    return PostCollective(static_cast<double>(all.size_bytes()));
  }
  absl::Status PostReduceScatterSum(const Tensor& all, absl::Span<const int64_t> counts,
                                    const Tensor& own) override {
    if (all.device() == DeviceType::kCpu) {
      HostsPost(Channel::kCollective);
      return hosts_->PostReduceScatterSum(all, counts, own);
    }
    CountSent(Channel::kCollective, all.size_bytes() - own.size_bytes(), world_size() - 1);
    return PostCollective(static_cast<double>(all.size_bytes()));
  }

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override {
    const int c = static_cast<int>(channel);
    Transfer transfer;
    transfer.begin = gpu_->now();
    Traffic out, in;
    std::vector<SendBuffer> host_sends;
    for (const SendBuffer& send : sends) {
      if (send.device == DeviceType::kCpu) {
        host_sends.push_back(send);
        continue;
      }
      out.Add(*this, send.peer, send.bytes);
      times_->Send(*group_, c, WorldRank(rank()), WorldRank(send.peer),
                   {transfer.begin, send.bytes});
    }
    std::vector<ReceiveBuffer> host_receives;
    for (const ReceiveBuffer& receive : receives) {
      if (receive.device == DeviceType::kCpu) {
        host_receives.push_back(receive);
        continue;
      }
      in.Add(*this, receive.peer, receive.bytes);
      transfer.receives.push_back(receive);
    }
    if (host_sends.size() + host_receives.size() < sends.size() + receives.size()) {
      transfer.seconds = std::max(out.Seconds(gpu_->model()), in.Seconds(gpu_->model()));
      transfers_[c].push_back(std::move(transfer));
    }
    if (host_sends.empty() && host_receives.empty()) return absl::OkStatus();
    HostsPost(channel);
    return hosts_->Post(channel, host_sends, host_receives);
  }

 private:
  struct Transfer {
    double begin = 0;                     // when this rank was ready
    std::vector<ReceiveBuffer> receives;  // messages whose senders must be ready, too
    std::optional<int64_t> collective;    // collective that all ranks must have reached
    double seconds = 0;                   // seconds on the links
  };

  void HostsPost(Channel channel) { hosts_post_[static_cast<int>(channel)] = true; }

  // Returns why another rank sends nothing any more; the hosts' communicator knows the reason.
  absl::Status Alone(Channel channel) {
    BURST_RETURN_IF_ERROR(hosts_->Wait(channel));
    return absl::UnavailableError("another rank ended before its message");
  }

  // The traffic in one direction.
  struct Traffic {
    double near = 0, far = 0;  // bytes to or from this rank's node, and other nodes

    void Add(const SimulatedCommunicator& comm, int peer, int64_t bytes) {
      if (peer == comm.rank()) return;
      (comm.NodeOf(peer) == comm.NodeOf(comm.rank()) ? near : far) += static_cast<double>(bytes);
    }
    double Seconds(const GpuModel& gpu) const {
      return std::max(near / gpu.links, far == 0 ? 0 : far / gpu.network);
    }
  };

  int NodeOf(int rank) const {
    return ranks_per_node_ == 0 ? 0 : WorldRank(rank) / ranks_per_node_;
  }

  // Posts a collective that runs in a ring through all ranks. Each rank sends `bytes` without its
  // own share. Several rings leave a node together, through the networks of all its GPUs.
  absl::Status PostCollective(double bytes) {
    const int n = world_size();
    if (n == 1) return absl::OkStatus();
    const int64_t number = collectives_++;
    times_->Come(*group_, number, gpu_->now());
    double rate = gpu_->model().links;
    int near = 0;
    for (int rank = 0; rank < n; ++rank) near += NodeOf(rank) == NodeOf(hosts_->rank());
    if (near < n) rate = std::min(rate, near * gpu_->model().network);
    transfers_[static_cast<int>(Channel::kCollective)].push_back(
        {gpu_->now(), {}, number, bytes * (n - 1) / n / rate});
    return absl::OkStatus();
  }

  std::unique_ptr<Communicator> owned_;
  Communicator* const hosts_;
  SimulatedTimes* const times_;
  const std::shared_ptr<Group> group_;
  SimulatedGpu* const gpu_;
  const int ranks_per_node_;
  int64_t splits_ = 0, collectives_ = 0;                      // number so far
  std::array<std::deque<Transfer>, kNumChannels> transfers_;  // posted, in order
  // Whether hosts posted since the last Wait.
  std::array<bool, kNumChannels> hosts_post_ = {};
  // When the channel's last transfer arrived.
  std::array<double, kNumChannels> arrived_ = {};
};

}  // namespace

absl::Status RunSimulatedRanks(
    int ranks, int ranks_per_node, const GpuModel& model,
    const std::function<absl::Status(Communicator&, SimulatedGpu&)>& body) {
  SimulatedTimes times(ranks);
  return RunRanks(ranks, [&](Communicator& hosts) {
    SimulatedGpu gpu(model);
    const ScopedSimulatedGpu scoped(&gpu);
    const ScopedRankProgress progress(hosts.rank());
    SimulatedCommunicator comm(&hosts, &times, times.MakeGroup(nullptr, 0, 0, WorldRanks(hosts)),
                               &gpu, ranks_per_node);
    const absl::Status status = body(comm, gpu);
    if (!status.ok()) comm.Abort(status);
    times.Leave(hosts.rank());
    return status;
  });
}

}  // namespace burst
