#include "burst/comm/tcp/tcp_communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/comm/launch/job_token.h"
#include "burst/comm/message_time.h"
#include "burst/comm/tcp/rendezvous.h"

namespace burst {

TcpCommunicator::TcpCommunicator(std::shared_ptr<PeerConnections> world, uint64_t group,
                                 std::vector<int> world_ranks, int rank)
    : world_(std::move(world)), group_(group), world_ranks_(std::move(world_ranks)), rank_(rank) {}

TcpCommunicator::~TcpCommunicator() {
  for (auto& pending : pending_) {
    for (Transfer& transfer : pending) world_->Cancel(&transfer);
  }
}

std::unique_ptr<TcpCommunicator> TcpCommunicator::Create(int rank, std::vector<PeerLink> links,
                                                         const TcpOptions& options) {
  std::vector<int> world_ranks(links.size());
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  auto world = std::make_shared<PeerConnections>(rank, std::move(links), options);
  return std::unique_ptr<TcpCommunicator>(
      new TcpCommunicator(std::move(world), 0, std::move(world_ranks), rank));
}

absl::StatusOr<std::unique_ptr<TcpCommunicator>> TcpCommunicator::Create(
    const ProcessLaunch& launch, const TcpOptions& options) {
  RendezvousOptions rendezvous;
  BURST_ASSIGN_OR_RETURN(rendezvous.token, FindJobToken(launch, std::getenv));
  if (!launch.several_hosts) {
    absl::StatusOr<SocketFolder> folder = SocketFolder::Open(SocketFolder::Default(std::getenv));
    if (folder.ok()) {
      rendezvous.folder = *std::move(folder);
    } else if (rendezvous.token.empty()) {
      return folder.status();
    }
  }
  rendezvous.rank = launch.rank;
  rendezvous.world_size = launch.world_size;
  rendezvous.several_hosts = launch.several_hosts;
  rendezvous.address = launch.address;
  rendezvous.port = launch.port;
  rendezvous.num_ports = kPortsOfRank0;
  rendezvous.job = launch.job;
  rendezvous.timeout = launch.patience;
  BURST_ASSIGN_OR_RETURN(Connections met, Rendezvous(rendezvous));
  const auto turned_away = [&](int number, const char* which) {
    if (number == 0) return;
    std::fprintf(stderr, "note: rank %d turned away %d %s that %s\n", launch.rank, number,
                 number == 1 ? "connection" : "connections", which);
  };
  turned_away(met.strangers, "did not prove the job's token");
  turned_away(met.doubles, "came of a rank that was there already");
  return Create(launch.rank, std::move(met.links), options);
}

absl::Status TcpCommunicator::DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                                     absl::Span<const ReceiveBuffer> receives) {
  BURST_RETURN_IF_ERROR(CheckHostMemory("TCP", sends, receives));
  const int c = static_cast<int>(channel);
  std::deque<Transfer>& pending = pending_[c];
  const auto start = [&](bool is_send, void* data, int64_t bytes, int peer) {
    pending.push_back({is_send, group_, c, world_ranks_[peer], static_cast<char*>(data), bytes});
    return world_->Start(&pending.back());
  };
  // Receives are posted first, so that a message finds its place.
  for (const ReceiveBuffer& receive : receives) {
    BURST_RETURN_IF_ERROR(start(false, receive.data, receive.bytes, receive.peer));
  }
  for (const SendBuffer& send : sends) {
    BURST_RETURN_IF_ERROR(start(true, const_cast<void*>(send.data), send.bytes, send.peer));
  }
  return absl::OkStatus();
}

absl::Status TcpCommunicator::Wait(Channel channel) {
  const ScopedMessageTime timed;
  std::deque<Transfer>& pending = pending_[static_cast<int>(channel)];
  absl::Status first_error;
  for (Transfer& transfer : pending) {
    const absl::Status status = Finish(transfer);
    if (!status.ok()) world_->Cancel(&transfer);  // its peer may have finished without it
    first_error.Update(status);
  }
  pending.clear();
  return first_error;
}

absl::Status TcpCommunicator::Finish(const Transfer& transfer) {
  const absl::Status status = world_->Wait(transfer);
  const auto who = [this] { return absl::StrCat("rank ", rank_, " of ", world_ranks_.size()); };
  const auto peer = [&] {
    return std::find(world_ranks_.begin(), world_ranks_.end(), transfer.peer) -
           world_ranks_.begin();
  };
  if (absl::IsNotFound(status)) {
    return absl::UnavailableError(
        absl::StrCat(who(), " waits for rank ", peer(), ", ", std::string(status.message())));
  }
  BURST_RETURN_IF_ERROR(status);
  if (transfer.wrong_bytes < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(who(), " expected ", transfer.bytes,
                                                 " bytes from rank ", peer(), ", which sent ",
                                                 transfer.wrong_bytes));
}

void TcpCommunicator::Abort(const absl::Status& reason) {
  BURST_CHECK(!reason.ok()) << "Abort without a reason";
  world_->GiveUp(reason);
}

absl::StatusOr<std::unique_ptr<Communicator>> TcpCommunicator::Split(int color, int key) {
  struct Wish {
    int64_t color, key;
    uint64_t group;  // the number of the new group, if this rank comes first in it
  };
  const Wish mine = {color, key, world_->NewGroup()};
  std::vector<Wish> wishes(world_ranks_.size());
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  for (int peer = 0; peer < world_size(); ++peer) {
    sends.push_back({&mine, sizeof(mine), peer});
    receives.push_back({&wishes[peer], sizeof(Wish), peer});
  }
  BURST_RETURN_IF_ERROR(DoPost(Channel::kCollective, sends, receives));
  BURST_RETURN_IF_ERROR(Wait(Channel::kCollective));

  std::unique_ptr<Communicator> result;
  if (color < 0) return result;
  std::vector<int> group;  // ranks of this rank's group
  for (int peer = 0; peer < world_size(); ++peer) {
    if (wishes[peer].color == color) group.push_back(peer);
  }
  std::stable_sort(group.begin(), group.end(),
                   [&](int a, int b) { return wishes[a].key < wishes[b].key; });
  const int rank = std::find(group.begin(), group.end(), rank_) - group.begin();
  std::vector<int> world_ranks;
  for (int peer : group) world_ranks.push_back(world_ranks_[peer]);
  result.reset(
      new TcpCommunicator(world_, wishes[group.front()].group, std::move(world_ranks), rank));
  return result;
}

}  // namespace burst
