// Ranks as processes connected by sockets. Host memory. A rank is lost if its connection closes
// before it has finished, or if it is silent for some time. All others then name it
// (peer_connections.h).
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/tcp/link.h"
#include "burst/comm/tcp/peer_connections.h"

namespace burst {

class TcpCommunicator : public Communicator {
 public:
  // Over existing links with every rank, in order of rank (rendezvous.h).
  static std::unique_ptr<TcpCommunicator> Create(int rank, std::vector<PeerLink> links,
                                                 const TcpOptions& options);
  // Creates a communicator after a rendezvous of the processes of `launch`. Collective; Unavailable
  // if a process does not come.
  static absl::StatusOr<std::unique_ptr<TcpCommunicator>> Create(const ProcessLaunch& launch,
                                                                 const TcpOptions& options);
  ~TcpCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(world_ranks_.size()); }
  int WorldRank(int rank) const override { return world_ranks_[rank]; }

  absl::Status Wait(Channel channel) override;
  void Abort(const absl::Status& reason) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override;

 private:
  TcpCommunicator(std::shared_ptr<PeerConnections> world, uint64_t group,
                  std::vector<int> world_ranks, int rank);
  absl::Status Finish(const Transfer& transfer);

  const std::shared_ptr<PeerConnections> world_;
  const uint64_t group_;
  const std::vector<int> world_ranks_;  // the group's ranks as ranks of the world
  const int rank_;
  std::deque<Transfer> pending_[kNumChannels];  // where they stay: the world points to them
};

}  // namespace burst
