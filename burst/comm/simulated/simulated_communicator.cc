#include "burst/comm/simulated/simulated_communicator.h"

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"

namespace burst {
namespace {

// Messages of GPU memory are carried out as messages of 8 bytes between hosts: the time from which
// on the sender has them. Collectives begin when the last rank has come to them.
class SimulatedCommunicator : public Communicator {
 public:
  SimulatedCommunicator(Communicator* hosts, SimulatedGpu* gpu, int ranks_per_node)
      : hosts_(hosts), gpu_(gpu), ranks_per_node_(ranks_per_node) {}
  SimulatedCommunicator(std::unique_ptr<Communicator> hosts, SimulatedGpu* gpu, int ranks_per_node)
      : SimulatedCommunicator(hosts.get(), gpu, ranks_per_node) {
    owned_ = std::move(hosts);
  }

  int rank() const override { return hosts_->rank(); }
  int world_size() const override { return hosts_->world_size(); }
  int WorldRank(int rank) const override { return hosts_->WorldRank(rank); }
  void Abort(const absl::Status& reason) override { hosts_->Abort(reason); }
  absl::Status Barrier() override { return hosts_->Barrier(); }

  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> part, hosts_->Split(color, key));
    if (part == nullptr) return part;
    return std::make_unique<SimulatedCommunicator>(std::move(part), gpu_, ranks_per_node_);
  }

  absl::Status Wait(Channel channel) override {
    BURST_RETURN_IF_ERROR(hosts_->Wait(channel));
    const int c = static_cast<int>(channel);
    std::deque<Transfer>& transfers = transfers_[c];
    for (const Transfer& transfer : transfers) {
      double begin = std::max(transfer.begin, arrived_[c]);
      for (const double sent : transfer.received) begin = std::max(begin, sent);
      arrived_[c] = begin + gpu_->model().message_seconds + transfer.seconds;
    }
    gpu_->WaitUntil(arrived_[c]);
    transfers.clear();
    return absl::OkStatus();
  }

  absl::Status AllReduceSum(const Tensor& tensor) override {
    if (tensor.device() == DeviceType::kCpu) return hosts_->AllReduceSum(tensor);
    BURST_RETURN_IF_ERROR(PostAllReduceSum(tensor));
    return Wait(Channel::kCollective);
  }
  absl::Status PostAllReduceSum(const Tensor& tensor) override {
    if (tensor.device() == DeviceType::kCpu) return hosts_->PostAllReduceSum(tensor);
    CountAllReduce(tensor.numel(), SizeOf(tensor.dtype()));
    return PostCollective(2.0 * tensor.size_bytes());
  }
  absl::Status PostAllGatherParts(const Tensor& own, absl::Span<const int64_t> counts,
                                  const Tensor& all) override {
    if (all.device() == DeviceType::kCpu) return hosts_->PostAllGatherParts(own, counts, all);
    CountSent(Channel::kCollective, (world_size() - 1) * own.size_bytes(), world_size() - 1);
    return PostCollective(static_cast<double>(all.size_bytes()));
  }
  absl::Status PostReduceScatterSum(const Tensor& all, absl::Span<const int64_t> counts,
                                    const Tensor& own) override {
    if (all.device() == DeviceType::kCpu) return hosts_->PostReduceScatterSum(all, counts, own);
    CountSent(Channel::kCollective, all.size_bytes() - own.size_bytes(), world_size() - 1);
    return PostCollective(static_cast<double>(all.size_bytes()));
  }

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override {
    std::deque<Transfer>& transfers = transfers_[static_cast<int>(channel)];
    transfers.emplace_back();
    Transfer& transfer = transfers.back();
    transfer.begin = gpu_->now();
    transfer.received.assign(receives.size(), 0);
    Traffic out, in;
    bool between_gpus = false;
    std::vector<SendBuffer> host_sends(sends.begin(), sends.end());
    for (SendBuffer& send : host_sends) {
      if (send.device == DeviceType::kCpu) continue;
      between_gpus = true;
      out.Add(*this, send.peer, send.bytes);
      send = {&transfer.begin, sizeof(double), send.peer};
    }
    std::vector<ReceiveBuffer> host_receives(receives.begin(), receives.end());
    for (size_t i = 0; i < host_receives.size(); ++i) {
      ReceiveBuffer& receive = host_receives[i];
      if (receive.device == DeviceType::kCpu) continue;
      between_gpus = true;
      in.Add(*this, receive.peer, receive.bytes);
      receive = {&transfer.received[i], sizeof(double), receive.peer};
    }
    transfer.seconds = std::max(out.Seconds(gpu_->model()), in.Seconds(gpu_->model()));
    if (!between_gpus) transfers.pop_back();
    return hosts_->Post(channel, host_sends, host_receives);
  }

 private:
  struct Transfer {
    double begin = 0;              // when this rank was ready
    std::vector<double> received;  // when the senders were
    double seconds = 0;            // on the links
  };

  // In one direction.
  struct Traffic {
    double near = 0, far = 0;  // bytes, to or from this rank's node and others

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

  // In a ring through all ranks, of which each sends `bytes` but for its own share. Several rings
  // leave a node together, through the networks of all its GPUs.
  absl::Status PostCollective(double bytes) {
    const int n = world_size();
    if (n == 1) return absl::OkStatus();
    BURST_ASSIGN_OR_RETURN(const std::vector<double> ready, hosts_->AllGather(gpu_->now()));
    double rate = gpu_->model().links;
    int near = 0;
    for (int rank = 0; rank < n; ++rank) near += NodeOf(rank) == NodeOf(hosts_->rank());
    if (near < n) rate = std::min(rate, near * gpu_->model().network);
    const double begin = *std::max_element(ready.begin(), ready.end());
    transfers_[static_cast<int>(Channel::kCollective)].push_back(
        {begin, {}, bytes * (n - 1) / n / rate});
    return absl::OkStatus();
  }

  std::unique_ptr<Communicator> owned_;
  Communicator* const hosts_;
  SimulatedGpu* const gpu_;
  const int ranks_per_node_;
  std::array<std::deque<Transfer>, kNumChannels> transfers_;  // posted, in order
  std::array<double, kNumChannels> arrived_ = {};             // when the channel's last one did
};

}  // namespace

absl::Status RunSimulatedRanks(
    int ranks, int ranks_per_node, const GpuModel& model,
    const std::function<absl::Status(Communicator&, SimulatedGpu&)>& body) {
  return RunRanks(ranks, [&](Communicator& hosts) {
    SimulatedGpu gpu(model);
    const ScopedSimulatedGpu scoped(&gpu);
    const ScopedRankProgress progress(hosts.rank());
    SimulatedCommunicator comm(&hosts, &gpu, ranks_per_node);
    return body(comm, gpu);
  });
}

}  // namespace burst
