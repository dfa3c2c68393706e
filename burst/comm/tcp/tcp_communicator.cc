#include "burst/comm/tcp/tcp_communicator.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/comm/launch/job_token.h"
#include "burst/comm/tcp/rendezvous.h"

namespace burst {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kFarewell{1000};  // at most, to send and receive the last messages
constexpr int64_t kMaxTurnBytes = 1 << 20;

enum class Kind : uint32_t { kMessage, kHeartbeat, kFinished, kFailed };

struct Header {
  Kind kind;
  uint32_t channel;
  uint64_t group;
  uint64_t bytes;
};

using Lock = std::unique_lock<std::mutex>;

}  // namespace

// The connections of this process, which all of its groups share.
class TcpCommunicator::World {
 public:
  World(int rank, std::vector<Socket> connections, const TcpOptions& options);
  ~World();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  uint64_t NewGroup() { return uint64_t(rank_) << 32 | ++groups_; }

  // `peer`: a rank of the world.
  absl::Status Send(uint64_t group, Channel channel, int peer, const void* data, int64_t bytes);
  // The next message, once there is one; `finished` is returned if none will come.
  absl::StatusOr<std::string> Receive(uint64_t group, Channel channel, int peer,
                                      const absl::Status& finished);

  // Ends the process; first tells the others that this rank gave up, unless another rank failed
  // before.
  [[noreturn]] void GiveUp(const absl::Status& reason);

 private:
  struct Peer {
    Socket socket;  // closed once nothing more can arrive
    std::deque<std::string> outgoing;
    size_t written = 0;  // bytes of outgoing.front() that have left
    Header header;
    size_t header_read = 0;
    std::string payload;
    size_t payload_read = 0;
    steady_clock::time_point heard;
    bool finished = false;  // it said so
  };
  using Key = std::tuple<uint64_t, int, int>;  // group, channel, source

  // Below, the lock is held.
  void Queue(int peer, Kind kind, uint32_t channel, uint64_t group, absl::string_view payload);
  void QueueForAll(Kind kind, absl::string_view payload);
  void SetFailure(const absl::Status& failure);
  void Lose(int peer, const std::string& how);
  void ReadFrom(int peer);
  void Dispatch(int peer);
  void WriteTo(int peer);
  void CheckHeartbeats();
  bool Flushed() const;
  bool AllClosed() const;

  void Run();
  void RunOnce(Lock& lock, milliseconds timeout);
  void SayFarewell(Lock& lock);
  void WakeThread();
  std::string Who(int peer) const { return absl::StrCat("rank ", peer, " of ", size()); }

  const int rank_;
  const TcpOptions options_;
  uint64_t groups_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;  // in order of rank; the own one is empty
  std::map<Key, std::deque<std::string>> inbox_;
  absl::Status failure_;
  bool ending_ = false;  // this process gave up itself: on_failure is not called
  bool stopping_ = false;
  steady_clock::time_point said_, looked_;  // last heartbeat, last check of the others

  Socket wake_;  // an eventfd
  std::vector<pollfd> polled_;
  std::thread thread_;  // last: it uses the others
};

TcpCommunicator::World::World(int rank, std::vector<Socket> connections, const TcpOptions& options)
    : rank_(rank),
      options_(options),
      peers_(connections.size()),
      said_(steady_clock::now()),
      looked_(said_),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    peers_[i].socket = std::move(connections[i]);
    peers_[i].heard = said_;
  }
  thread_ = std::thread([this] { Run(); });
}

TcpCommunicator::World::~World() {
  {
    Lock lock(mutex_);
    if (failure_.ok()) QueueForAll(Kind::kFinished, "");
    stopping_ = true;
  }
  WakeThread();
  thread_.join();
}

void TcpCommunicator::World::WakeThread() {
  const uint64_t one = 1;
  (void)!write(wake_.fd(), &one, sizeof(one));
}

absl::Status TcpCommunicator::World::Send(uint64_t group, Channel channel, int peer,
                                          const void* data, int64_t bytes) {
  const absl::string_view payload(static_cast<const char*>(data), bytes);
  Lock lock(mutex_);
  if (!failure_.ok()) return failure_;
  const int c = static_cast<int>(channel);
  if (peer == rank_) {
    inbox_[{group, c, peer}].emplace_back(payload);
    return absl::OkStatus();
  }
  Queue(peer, Kind::kMessage, c, group, payload);
  lock.unlock();
  WakeThread();
  return absl::OkStatus();
}

absl::StatusOr<std::string> TcpCommunicator::World::Receive(uint64_t group, Channel channel,
                                                            int peer,
                                                            const absl::Status& finished) {
  const Key key(group, static_cast<int>(channel), peer);
  Lock lock(mutex_);
  while (true) {
    if (!failure_.ok()) return failure_;
    if (const auto found = inbox_.find(key); found != inbox_.end()) {
      std::string message = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) inbox_.erase(found);
      return message;
    }
    if (peer == rank_ || peers_[peer].finished) return finished;
    changed_.wait(lock);
  }
}

void TcpCommunicator::World::Queue(int peer, Kind kind, uint32_t channel, uint64_t group,
                                   absl::string_view payload) {
  if (peers_[peer].socket.fd() < 0) return;
  const Header header = {kind, channel, group, payload.size()};
  std::string frame(sizeof(header) + payload.size(), '\0');
  std::memcpy(&frame[0], &header, sizeof(header));
  std::copy(payload.begin(), payload.end(), frame.begin() + sizeof(header));
  peers_[peer].outgoing.push_back(std::move(frame));
}

void TcpCommunicator::World::QueueForAll(Kind kind, absl::string_view payload) {
  for (int peer = 0; peer < size(); ++peer) Queue(peer, kind, 0, 0, payload);
}

// Only the first failure counts. All ranks are told of it before this rank's connections close, so
// that none believes that this rank was lost.
void TcpCommunicator::World::SetFailure(const absl::Status& failure) {
  if (!failure_.ok()) return;
  failure_ = failure;
  QueueForAll(Kind::kFailed, failure.message());
  changed_.notify_all();
}

void TcpCommunicator::World::GiveUp(const absl::Status& reason) {
  Lock lock(mutex_);
  ending_ = true;
  std::string words = absl::StrCat("error: ", std::string(failure_.message()));
  if (failure_.ok()) {
    words = absl::StrCat(Who(rank_), " gave up: ", reason.ToString());
    SetFailure(absl::UnavailableError(words));
  }
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", words.c_str());
  std::fflush(stderr);
  WakeThread();
  changed_.wait_for(lock, kFarewell, [this] { return Flushed(); });
  std::_Exit(1);
}

void TcpCommunicator::World::Lose(int peer, const std::string& how) {
  peers_[peer].socket.Close();
  peers_[peer].outgoing.clear();
  if (peers_[peer].finished || stopping_) return;
  SetFailure(absl::UnavailableError(absl::StrCat(Who(peer), " was lost: ", how)));
}

void TcpCommunicator::World::ReadFrom(int index) {
  Peer& peer = peers_[index];
  for (int64_t turn = 0; turn < kMaxTurnBytes && peer.socket.fd() >= 0;) {
    const bool in_header = peer.header_read < sizeof(Header);
    char* to = in_header ? reinterpret_cast<char*>(&peer.header) + peer.header_read
                         : &peer.payload[peer.payload_read];
    const size_t wanted =
        in_header ? sizeof(Header) - peer.header_read : peer.payload.size() - peer.payload_read;
    const ssize_t n = wanted == 0 ? 0 : recv(peer.socket.fd(), to, wanted, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0 || (n == 0 && wanted > 0)) return Lose(index, "its connection closed");
    turn += n;
    peer.heard = steady_clock::now();
    if (in_header) {
      peer.header_read += n;
      if (peer.header_read < sizeof(Header)) continue;
      peer.payload.resize(peer.header.bytes);
      peer.payload_read = 0;
    } else {
      peer.payload_read += n;
    }
    if (peer.payload_read == peer.payload.size()) {
      Dispatch(index);
      peer.header_read = 0;
    }
  }
}

void TcpCommunicator::World::Dispatch(int index) {
  Peer& peer = peers_[index];
  switch (peer.header.kind) {
    case Kind::kMessage:
      inbox_[{peer.header.group, static_cast<int>(peer.header.channel), index}].push_back(
          std::move(peer.payload));
      changed_.notify_all();
      return;
    case Kind::kHeartbeat:
      return;
    case Kind::kFinished:
      peer.finished = true;
      changed_.notify_all();
      return;
    case Kind::kFailed:
      SetFailure(absl::UnavailableError(peer.payload));
      return;
  }
}

void TcpCommunicator::World::WriteTo(int index) {
  Peer& peer = peers_[index];
  while (!peer.outgoing.empty() && peer.socket.fd() >= 0) {
    const std::string& frame = peer.outgoing.front();
    const ssize_t n = send(peer.socket.fd(), frame.data() + peer.written,
                           frame.size() - peer.written, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    // The other end may have sent the reason before it closed: keep reading.
    if (n < 0) {
      peer.outgoing.clear();
      return;
    }
    peer.written += n;
    if (peer.written < frame.size()) continue;
    peer.outgoing.pop_front();
    peer.written = 0;
  }
}

void TcpCommunicator::World::CheckHeartbeats() {
  const auto now = steady_clock::now();
  // If this process itself was stopped, heartbeats of the others may be unread.
  const bool was_stopped = now - looked_ > options_.lost_after / 2;
  looked_ = now;
  for (int index = 0; index < size(); ++index) {
    Peer& peer = peers_[index];
    if (was_stopped) peer.heard = now;
    if (peer.socket.fd() < 0 || peer.finished || now - peer.heard < options_.lost_after) continue;
    Lose(index, absl::StrCat("nothing heard of it for ",
                             duration_cast<milliseconds>(now - peer.heard).count() / 1000.0, " s"));
  }
  if (now - said_ < options_.heartbeat) return;
  said_ = now;
  QueueForAll(Kind::kHeartbeat, "");
}

bool TcpCommunicator::World::Flushed() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.outgoing.empty(); });
}

bool TcpCommunicator::World::AllClosed() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.socket.fd() < 0; });
}

// Waits, at most for `timeout`, until something can be sent or received; then sends and receives
// all that does not block.
void TcpCommunicator::World::RunOnce(Lock& lock, milliseconds timeout) {
  polled_.assign(1, {wake_.fd(), POLLIN, 0});
  for (const Peer& peer : peers_) {
    const short events = peer.outgoing.empty() ? POLLIN : POLLIN | POLLOUT;
    polled_.push_back({peer.socket.fd(), events, 0});  // poll ignores descriptors below 0
  }
  lock.unlock();
  poll(polled_.data(), polled_.size(), static_cast<int>(timeout.count()));
  uint64_t count;
  (void)!read(wake_.fd(), &count, sizeof(count));
  lock.lock();
  for (int peer = 0; peer < size(); ++peer) {
    if (polled_[peer + 1].revents != 0) ReadFrom(peer);
    WriteTo(peer);
  }
}

void TcpCommunicator::World::Run() {
  Lock lock(mutex_);
  while (!stopping_ && failure_.ok()) {
    RunOnce(lock, std::min(options_.heartbeat, options_.lost_after) / 2);
    CheckHeartbeats();
  }
  const bool failed = !failure_.ok() && !stopping_;
  SayFarewell(lock);
  changed_.notify_all();
  if (failed && !ending_ && options_.on_failure) {
    const absl::Status failure = failure_;
    lock.unlock();
    options_.on_failure(failure);
  }
}

// Sends the last messages and then, unless something failed, reads until the others have closed:
// closing a connection that holds unread data could discard what was sent.
void TcpCommunicator::World::SayFarewell(Lock& lock) {
  const auto end = steady_clock::now() + kFarewell;
  const auto left = [&] { return duration_cast<milliseconds>(end - steady_clock::now()); };
  while (!Flushed() && left().count() > 0) RunOnce(lock, left());
  for (Peer& peer : peers_) {
    if (peer.socket.fd() >= 0) shutdown(peer.socket.fd(), SHUT_WR);
  }
  while (failure_.ok() && !AllClosed() && left().count() > 0) RunOnce(lock, left());
}

TcpCommunicator::TcpCommunicator(std::shared_ptr<World> world, uint64_t group,
                                 std::vector<int> world_ranks, int rank)
    : world_(std::move(world)), group_(group), world_ranks_(std::move(world_ranks)), rank_(rank) {}

TcpCommunicator::~TcpCommunicator() = default;

std::unique_ptr<TcpCommunicator> TcpCommunicator::Create(int rank, std::vector<Socket> connections,
                                                         const TcpOptions& options) {
  std::vector<int> world_ranks(connections.size());
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  auto world = std::make_shared<World>(rank, std::move(connections), options);
  return std::unique_ptr<TcpCommunicator>(
      new TcpCommunicator(std::move(world), 0, std::move(world_ranks), rank));
}

absl::StatusOr<std::unique_ptr<TcpCommunicator>> TcpCommunicator::Create(
    const ProcessLaunch& launch, const TcpOptions& options) {
  BURST_ASSIGN_OR_RETURN(const JobToken token, JobToken::Find(launch, std::getenv));
  RendezvousOptions rendezvous;
  rendezvous.token = [&] { return token.Read(); };
  rendezvous.rank = launch.rank;
  rendezvous.world_size = launch.world_size;
  rendezvous.several_hosts = launch.several_hosts;
  rendezvous.address = launch.address;
  rendezvous.port = launch.port;
  rendezvous.job = launch.job;
  BURST_ASSIGN_OR_RETURN(Connections connections, Rendezvous(rendezvous));
  if (connections.strangers > 0) {
    std::fprintf(stderr, "note: rank %d turned away %d %s that did not prove the job's token\n",
                 launch.rank, connections.strangers,
                 connections.strangers == 1 ? "connection" : "connections");
  }
  return Create(launch.rank, std::move(connections.sockets), options);
}

absl::Status TcpCommunicator::DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                                     absl::Span<const ReceiveBuffer> receives) {
  BURST_RETURN_IF_ERROR(CheckHostMemory("TCP", sends, receives));
  std::vector<ReceiveBuffer>& pending = pending_[static_cast<int>(channel)];
  pending.insert(pending.end(), receives.begin(), receives.end());
  for (const SendBuffer& send : sends) {
    BURST_RETURN_IF_ERROR(
        world_->Send(group_, channel, world_ranks_[send.peer], send.data, send.bytes));
  }
  return absl::OkStatus();
}

absl::Status TcpCommunicator::Wait(Channel channel) {
  std::vector<ReceiveBuffer>& pending = pending_[static_cast<int>(channel)];
  absl::Status first_error;
  for (const ReceiveBuffer& receive : pending) first_error.Update(Take(channel, receive));
  pending.clear();
  return first_error;
}

absl::Status TcpCommunicator::Take(Channel channel, const ReceiveBuffer& receive) {
  const std::string who = absl::StrCat("rank ", rank_, " of ", world_ranks_.size());
  BURST_ASSIGN_OR_RETURN(
      const std::string message,
      world_->Receive(group_, channel, world_ranks_[receive.peer],
                      absl::UnavailableError(absl::StrCat(who, " waits for rank ", receive.peer,
                                                          ", which has finished"))));
  if (static_cast<int64_t>(message.size()) != receive.bytes) {
    return absl::InvalidArgumentError(absl::StrCat(who, " expected ", receive.bytes,
                                                   " bytes from rank ", receive.peer,
                                                   ", which sent ", message.size()));
  }
  std::copy(message.begin(), message.end(), static_cast<char*>(receive.data));
  return absl::OkStatus();
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
  std::vector<int> group;  // ranks of this one
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
