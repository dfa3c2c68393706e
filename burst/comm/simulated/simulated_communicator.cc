#include "burst/comm/simulated/simulated_communicator.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/comm/simulated/simulated_times.h"
#include "burst/comm/thread/thread_communicator.h"

namespace burst {
namespace {

using Event = SimulatedTimes::Event;

std::vector<int> WorldRanks(const Communicator& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.world_size(); ++rank) ranks.push_back(group.WorldRank(rank));
  return ranks;
}

// The events of one rank's thread, on their way to the clocks of all ranks.
class RankClock : public SimulatedClock {
 public:
  RankClock(SimulatedTimes* times, int rank) : times_(*times), rank_(rank) {}

  SimulatedTimes& times() { return times_; }
  // Hands the rank's events in, and waits until they have happened.
  absl::Status Settle() { return times_.HandIn(rank_, &events_, /*most_left=*/0); }
  // Hands the rank's events in before the thread may wait for the host of another rank.
  absl::Status HandIn() { return times_.HandIn(rank_, &events_, kMostEvents); }
  absl::Status Add(const Event& event) {
    events_.push_back(event);
    return events_.size() < kMostWritten ? absl::OkStatus() : HandIn();
  }

  double Now() override {
    (void)Settle();  // the next call that returns a status says what failed
    return times_.Now(rank_);
  }
  void Advance(double seconds) override { (void)Add({Event::Kind::kKernel, seconds}); }
  void WaitUntil(double time) override { (void)Add({Event::Kind::kWaitUntil, time}); }

 private:
  // The most events that the thread holds, and that it may be ahead of the rank's clock.
  static constexpr size_t kMostWritten = 1 << 10, kMostEvents = 1 << 12;

  SimulatedTimes& times_;
  const int rank_;
  std::vector<Event> events_;
};

// A communicator of simulated GPUs. For a message of GPU memory, ranks exchange only the time at
// which the sender has it (SimulatedTimes). Collectives begin when the last rank has reached them.
// Messages of host memory go through `hosts`, a communicator of threads.
class SimulatedCommunicator : public Communicator {
 public:
  SimulatedCommunicator(Communicator* hosts, SimulatedTimes::Group* group, RankClock* clock,
                        const GpuModel& model, int ranks_per_node)
      : hosts_(hosts),
        group_(group),
        member_(clock->times().MakeMember(group)),
        clock_(*clock),
        model_(model),
        ranks_per_node_(ranks_per_node) {}

  int rank() const override { return hosts_->rank(); }
  int world_size() const override { return hosts_->world_size(); }
  int WorldRank(int rank) const override { return hosts_->WorldRank(rank); }
  void Abort(const absl::Status& reason) override {
    hosts_->Abort(reason);
    clock_.times().Fail();
  }
  absl::Status Barrier() override {
    BURST_RETURN_IF_ERROR(Checked(clock_.HandIn()));
    return hosts_->Barrier();
  }
  // Waits until the rank's events have happened.
  absl::Status Settle() { return Checked(clock_.Settle()); }

  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    BURST_RETURN_IF_ERROR(Checked(clock_.HandIn()));
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> part, hosts_->Split(color, key));
    const int64_t number = splits_++;
    if (part == nullptr) return part;
    auto comm = std::make_unique<SimulatedCommunicator>(
        part.get(), clock_.times().MakeGroup(group_, number, color, WorldRanks(*part)), &clock_,
        model_, ranks_per_node_);
    comm->owned_ = std::move(part);
    return comm;
  }

  absl::Status Wait(Channel channel) override {
    const int c = static_cast<int>(channel);
    if (hosts_post_[c]) {
      BURST_RETURN_IF_ERROR(Checked(clock_.HandIn()));
      BURST_RETURN_IF_ERROR(hosts_->Wait(channel));
    }
    hosts_post_[c] = false;
    return Add({Event::Kind::kWait, 0, 0, channel, member_});
  }

  absl::Status AllReduceSum(const Tensor& tensor) override {
    if (tensor.device() == DeviceType::kCpu) {
      BURST_RETURN_IF_ERROR(Checked(clock_.HandIn()));
      return hosts_->AllReduceSum(tensor);
    }
    BURST_RETURN_IF_ERROR(PostAllReduceSum(tensor));
    return Wait(Channel::kCollective);
  }
  absl::Status PostAllReduceSum(const Tensor& tensor) override {
    if (tensor.device() == DeviceType::kCpu) {
      BURST_RETURN_IF_ERROR(BeginHostsPost(Channel::kCollective));
      return hosts_->PostAllReduceSum(tensor);
    }
    CountAllReduce(tensor.numel(), SizeOf(tensor.dtype()));
    return PostCollective(2.0 * tensor.size_bytes());
  }
  absl::Status PostAllGatherParts(const Tensor& own, absl::Span<const int64_t> counts,
                                  const Tensor& all) override {
    if (all.device() == DeviceType::kCpu) {
      BURST_RETURN_IF_ERROR(BeginHostsPost(Channel::kCollective));
      return hosts_->PostAllGatherParts(own, counts, all);
    }
    CountSent(Channel::kCollective, (world_size() - 1) * own.size_bytes(), world_size() - 1);
    return PostCollective(static_cast<double>(all.size_bytes()));
  }
  absl::Status PostReduceScatterSum(const Tensor& all, absl::Span<const int64_t> counts,
                                    const Tensor& own) override {
    if (all.device() == DeviceType::kCpu) {
      BURST_RETURN_IF_ERROR(BeginHostsPost(Channel::kCollective));
      return hosts_->PostReduceScatterSum(all, counts, own);
    }
    CountSent(Channel::kCollective, all.size_bytes() - own.size_bytes(), world_size() - 1);
    return PostCollective(static_cast<double>(all.size_bytes()));
  }

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override {
    Traffic out, in;
    std::vector<SendBuffer> host_sends;
    for (const SendBuffer& send : sends) {
      if (send.device == DeviceType::kCpu) {
        host_sends.push_back(send);
        continue;
      }
      out.Add(*this, send.peer, send.bytes);
      BURST_RETURN_IF_ERROR(Add({Event::Kind::kSend, 0, send.bytes, channel, member_,
                                 BoxOf(&sent_, channel, send.peer, /*sends=*/true)}));
    }
    std::vector<ReceiveBuffer> host_receives;
    for (const ReceiveBuffer& receive : receives) {
      if (receive.device == DeviceType::kCpu) {
        host_receives.push_back(receive);
        continue;
      }
      in.Add(*this, receive.peer, receive.bytes);
    }
    if (host_sends.size() + host_receives.size() < sends.size() + receives.size()) {
      const double seconds = std::max(out.Seconds(model_), in.Seconds(model_));
      BURST_RETURN_IF_ERROR(Add({Event::Kind::kTransfer, seconds, 0, channel, member_}));
    }
    for (const ReceiveBuffer& receive : receives) {
      if (receive.device == DeviceType::kCpu) continue;
      BURST_RETURN_IF_ERROR(Add({Event::Kind::kReceive, 0, receive.bytes, channel, member_,
                                 BoxOf(&received_, channel, receive.peer, /*sends=*/false)}));
    }
    if (host_sends.empty() && host_receives.empty()) return absl::OkStatus();
    BURST_RETURN_IF_ERROR(BeginHostsPost(channel));
    return hosts_->Post(channel, host_sends, host_receives);
  }

 private:
  using Boxes = std::array<std::vector<SimulatedTimes::Box*>, kNumChannels>;  // by peer

  absl::Status Add(const Event& event) { return Checked(clock_.Add(event)); }

  // Says why another rank sends nothing any more; the hosts' communicator knows the reason.
  absl::Status Checked(const absl::Status& status) {
    if (absl::IsUnavailable(status)) {
      BURST_RETURN_IF_ERROR(hosts_->Wait(Channel::kCollective));
    }
    return status;
  }

  absl::Status BeginHostsPost(Channel channel) {
    hosts_post_[static_cast<int>(channel)] = true;
    return Checked(clock_.HandIn());
  }

  // Returns the messages to a peer, or from it.
  SimulatedTimes::Box* BoxOf(Boxes* boxes, Channel channel, int peer, bool sends) {
    std::vector<SimulatedTimes::Box*>& by_peer = (*boxes)[static_cast<int>(channel)];
    by_peer.resize(world_size());
    if (by_peer[peer] == nullptr) {
      const int own = WorldRank(rank()), other = WorldRank(peer);
      by_peer[peer] =
          clock_.times().BoxOf(group_, channel, sends ? own : other, sends ? other : own);
    }
    return by_peer[peer];
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
    double rate = model_.links;
    int near = 0;
    for (int rank = 0; rank < n; ++rank) near += NodeOf(rank) == NodeOf(hosts_->rank());
    if (near < n) rate = std::min(rate, near * model_.network);
    return Add({Event::Kind::kCollective, bytes * (n - 1) / n / rate, collectives_++,
                Channel::kCollective, member_});
  }

  std::unique_ptr<Communicator> owned_;
  Communicator* const hosts_;
  SimulatedTimes::Group* const group_;
  SimulatedTimes::Member* const member_;
  RankClock& clock_;
  const GpuModel& model_;
  const int ranks_per_node_;
  int64_t splits_ = 0, collectives_ = 0;  // number so far
  Boxes sent_, received_;                 // null: not used yet
  // Whether hosts posted since the last Wait.
  std::array<bool, kNumChannels> hosts_post_ = {};
};

}  // namespace

absl::Status RunSimulatedRanks(
    int ranks, int ranks_per_node, const GpuModel& model,
    const std::function<absl::Status(Communicator&, SimulatedGpu&)>& body) {
  SimulatedTimes times(ranks, model.message_seconds);
  return RunRanks(ranks, [&](Communicator& hosts) {
    RankClock clock(&times, hosts.rank());
    SimulatedGpu gpu(model, &clock);
    const ScopedSimulatedGpu scoped(&gpu);
    const ScopedRankProgress progress(hosts.rank());
    SimulatedCommunicator comm(&hosts, times.MakeGroup(nullptr, 0, 0, WorldRanks(hosts)), &clock,
                               model, ranks_per_node);
    absl::Status status = body(comm, gpu);
    if (status.ok()) status = comm.Settle();
    if (!status.ok()) comm.Abort(status);
    times.Leave(hosts.rank());
    return status;
  });
}

}  // namespace burst
