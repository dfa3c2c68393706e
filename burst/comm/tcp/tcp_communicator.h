// Ranks as processes connected by sockets: host memory, for control rather than for bulk. A message
// is copied twice on its way.
//
// A thread of its own keeps the connections of a process. It answers for the process even while the
// rank computes or waits for its GPU, and watches the others: one whose connection closes before it
// said goodbye, or of which nothing has been heard for a while, is lost, and every rank is told
// which one it was.
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
  // A rank of which nothing is heard for `lost_after` is lost; each says something in every
  // `heartbeat`.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(2);
  std::chrono::milliseconds lost_after = std::chrono::seconds(20);
  // Called once, on the thread that keeps the connections, when a rank is lost or gave up, after
  // the other ranks were told and the calls that wait were freed. Unavailable: "rank 2 of 4 was
  // lost: ...", "rank 1 of 4 gave up: ...".
  std::function<void(const absl::Status& failure)> on_failure;
};

class TcpCommunicator : public Communicator {
 public:
  // Over existing connections with every rank, in order of rank (rendezvous.h).
  static std::unique_ptr<TcpCommunicator> Create(int rank, std::vector<Socket> connections,
                                                 const TcpOptions& options);
  // The same for processes that find each other first. Collective; Unavailable if one of them does
  // not come.
  static absl::StatusOr<std::unique_ptr<TcpCommunicator>> Create(const ProcessLaunch& launch,
                                                                 const TcpOptions& options);
  ~TcpCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(members_.size()); }

  absl::Status Wait(Channel channel) override;
  void Abort(const absl::Status& reason) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override;

 private:
  class World;

  TcpCommunicator(std::shared_ptr<World> world, uint64_t group, std::vector<int> members, int rank);
  absl::Status Take(Channel channel, const ReceiveBuffer& receive);

  const std::shared_ptr<World> world_;
  const uint64_t group_;
  const std::vector<int> members_;  // their ranks in the world
  const int rank_;
  std::vector<ReceiveBuffer> pending_[kNumChannels];
};

}  // namespace burst
