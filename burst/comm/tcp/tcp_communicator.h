// Ranks as processes connected by sockets. Host memory, for control messages rather than for bulk
// data: a message is copied twice on its way.
//
// Each process has one thread that serves its connections. It sends heartbeats even while the rank
// computes or waits for its GPU, and watches the other ranks. A rank is lost if its connection
// closes before it has finished, or if it sends nothing for some time; every rank is told which one
// was lost.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/tcp/socket.h"

namespace burst {

struct TcpOptions {
  // Every rank sends something at least once per `heartbeat`; a rank that sends nothing for
  // `lost_after` is lost.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(2);
  std::chrono::milliseconds lost_after = std::chrono::seconds(20);
  // Called once, on the thread that serves the connections, when a rank was lost or gave up: after
  // the other ranks were told, and after waiting calls have returned. Unavailable: "rank 2 of 4 was
  // lost: ...", "rank 1 of 4 gave up: ...".
  std::function<void(const absl::Status& failure)> on_failure;
};

class TcpCommunicator : public Communicator {
 public:
  // Over existing connections with every rank, in order of rank (rendezvous.h).
  static std::unique_ptr<TcpCommunicator> Create(int rank, std::vector<Socket> connections,
                                                 const TcpOptions& options);
  // The same after a rendezvous of the processes of `launch`. Collective; Unavailable if a process
  // does not come.
  static absl::StatusOr<std::unique_ptr<TcpCommunicator>> Create(const ProcessLaunch& launch,
                                                                 const TcpOptions& options);
  ~TcpCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(world_ranks_.size()); }

  absl::Status Wait(Channel channel) override;
  void Abort(const absl::Status& reason) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override;

 private:
  class World;

  TcpCommunicator(std::shared_ptr<World> world, uint64_t group, std::vector<int> world_ranks,
                  int rank);
  absl::Status Take(Channel channel, const ReceiveBuffer& receive);

  const std::shared_ptr<World> world_;
  const uint64_t group_;
  const std::vector<int> world_ranks_;  // of the group's ranks
  const int rank_;
  std::vector<ReceiveBuffer> pending_[kNumChannels];
};

}  // namespace burst
