#include "burst/comm/tcp/peer_connections.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/print_error.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/base/watchdog.h"

namespace burst {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kFarewell{1000};  // the longest time for the last messages
constexpr size_t kBufferBytes = 64 << 10;
// The most bytes that a kept message costs in addition to its own: entries of a map and of a list,
// and the allocator's overhead for all three.
constexpr uint64_t kUnexpectedOverhead = 320;

double Seconds(steady_clock::duration time) {
  return duration_cast<milliseconds>(time).count() / 1000.0;
}

}  // namespace

PeerConnections::PeerConnections(int rank, std::vector<PeerLink> links, const TcpOptions& options)
    : rank_(rank),
      options_(options),
      no_memory_(absl::ResourceExhaustedError(
          absl::StrCat("rank ", rank, " of ", links.size(), " has no memory for messages"))),
      peers_(links.size()),
      said_(steady_clock::now()),
      looked_(said_),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    peers_[i].socket = std::move(links[i].socket);
    peers_[i].seal = links[i].seal;
    peers_[i].buffer.resize(kBufferBytes);
    peers_[i].heard = said_;
  }
  thread_ = std::thread([this] { Run(); });
  SetAskOthersToReport([this] {
    {
      Lock lock(mutex_);
      QueueForAll(FrameKind::kReport, "");
    }
    WakeThread();
  });
}

PeerConnections::~PeerConnections() {
  SetAskOthersToReport(nullptr);
  {
    Lock lock(mutex_);
    try {
      if (failure_.ok()) QueueForAll(FrameKind::kFinished, "");
    } catch (const std::bad_alloc&) {
      CloseAll();
    }
    stopping_ = true;
  }
  changed_.notify_all();
  WakeThread();
  thread_.join();
}

std::string PeerConnections::Who(int peer) const {
  return absl::StrCat("rank ", peer, " of ", size());
}

void PeerConnections::WakeThread() {
  const uint64_t one = 1;
  (void)!write(wake_.fd(), &one, sizeof(one));
}

absl::Status PeerConnections::Start(Transfer* transfer) {
  const auto [sends, group, channel, peer, data, bytes, moved, done, wrong] = *transfer;
  Lock lock(mutex_);
  if (!failure_.ok()) return failure_;
  if (!sends) {
    const Key key(group, channel, peer);
    streams_[key].posted.push_back(transfer);
    Match(key);
  } else if (peer == rank_) {
    Arrive({group, channel, peer}, {std::string(data, bytes), uint64_t(bytes), false});
    transfer->done = true;
  } else if (uint64_t(bytes) <= kMaxEagerBytes) {
    Queue(peer, FrameKind::kMessage, channel, group, bytes, {data, size_t(bytes)});
    transfer->done = true;
  } else {
    peers_[peer].announced[{group, channel}].push_back(transfer);
    Queue(peer, FrameKind::kAnnounce, channel, group, bytes, "");
  }
  if (peer == rank_) return absl::OkStatus();
  // Most frames leave here; the thread sends the rest.
  WriteTo(peer);
  const bool more = HasOutput(peers_[peer]);
  lock.unlock();
  if (more) WakeThread();
  return absl::OkStatus();
}

absl::Status PeerConnections::Wait(const Transfer& transfer) {
  const ScopedWait wait(transfer.sends ? "sends" : "receives",
                        Name(static_cast<Channel>(transfer.channel)), transfer.peer,
                        transfer.bytes);
  Lock lock(mutex_);
  const auto begin = steady_clock::now();
  const bool patient = options_.patience.count() == 0;
  while (true) {
    if (!failure_.ok()) return failure_;
    if (transfer.done) return absl::OkStatus();
    if (transfer.peer == rank_ || peers_[transfer.peer].finished) {
      return absl::NotFoundError("which has finished");
    }
    if (patient) {
      changed_.wait(lock);
    } else if (steady_clock::now() < begin + options_.patience) {
      changed_.wait_until(lock, begin + options_.patience);
    } else {
      SetFailure(absl::UnavailableError(absl::StrCat(
          Who(rank_), " waited ", Seconds(options_.patience), " s for rank ", transfer.peer)));
      WakeThread();
    }
  }
}

void PeerConnections::Cancel(Transfer* transfer) {
  const auto is_it = [transfer](Transfer* other) { return other == transfer; };
  const auto erase_from = [&](auto* queue) {
    const auto end = std::remove_if(queue->begin(), queue->end(), is_it);
    const bool found = end != queue->end();
    queue->erase(end, queue->end());
    return found;
  };
  Lock lock(mutex_);
  if (transfer->done || !failure_.ok()) return;
  Peer& peer = peers_[transfer->peer];
  bool under_way = false;
  if (const auto stream = streams_.find({transfer->group, transfer->channel, transfer->peer});
      stream != streams_.end()) {
    erase_from(&stream->second.posted);
    if (stream->second.posted.empty() && stream->second.arrived.empty()) streams_.erase(stream);
  }
  if (const auto announced = peer.announced.find({transfer->group, transfer->channel});
      announced != peer.announced.end()) {
    std::replace_if(announced->second.begin(), announced->second.end(), is_it, nullptr);
  }
  under_way |= erase_from(&peer.coming[transfer->channel]);
  under_way |= erase_from(&peer.sending[transfer->channel]);
  for (Outgoing& frame : peer.outgoing) {
    if (frame.transfer != transfer) continue;
    frame.Own();
    under_way = true;
  }
  if (peer.into == transfer) DropPayload(&peer);
  if (!under_way || peer.finished) return;
  SetFailure(absl::UnavailableError(
      absl::StrCat(Who(rank_), " gave up: it ended in the middle of a message")));
  lock.unlock();
  WakeThread();
}

void PeerConnections::Queue(int peer, FrameKind kind, int channel, uint64_t group, uint64_t bytes,
                            absl::string_view payload) {
  if (peers_[peer].socket.fd() < 0) return;
  const FrameHeader header = {kind, uint32_t(channel), group, bytes};
  Outgoing frame;
  if (peers_[peer].seal.has_value()) {
    frame.head = Sealed(&peers_[peer], header, payload);
  } else {
    const FrameHeaderBytes text = ToBytes(header);
    frame.head.reserve(text.size() + payload.size());
    frame.head.assign(text.begin(), text.end());
    frame.head.append(payload.data(), payload.size());
  }
  peers_[peer].outgoing.push_back(std::move(frame));
}

void PeerConnections::QueueForAll(FrameKind kind, absl::string_view payload) {
  for (int peer = 0; peer < size(); ++peer) Queue(peer, kind, 0, 0, payload.size(), payload);
}

// Only the first failure counts. All ranks are told of the failure before this rank's connections
// close. So none believes that this rank was lost.
void PeerConnections::SetFailure(const absl::Status& failure) {
  if (!failure_.ok()) return;
  failure_ = failure;
  try {
    DropTransfers();
    QueueForAll(FrameKind::kFailed, failure.message().substr(0, kMaxWordsBytes));
  } catch (const std::bad_alloc&) {
    CloseAll();
  }
  changed_.notify_all();
}

// Serves a rank that has no memory to tell the others. They notice that their connections close.
void PeerConnections::CloseAll() {
  streams_.clear();
  for (Peer& peer : peers_) {
    peer.socket.Close();
    peer.outgoing.clear();
    peer.announced.clear();
    for (auto& queue : peer.sending) queue.clear();
    for (auto& queue : peer.coming) queue.clear();
    peer.frame.reset();
    peer.into = nullptr;
  }
}

// After this call no buffer of a transfer is in use. A piece that has left in part is completed
// from a copy, so that the other side can read the next frames.
void PeerConnections::DropTransfers() {
  streams_.clear();
  for (Peer& peer : peers_) {
    for (Outgoing& frame : peer.outgoing) frame.Own();
    peer.announced.clear();
    for (auto& queue : peer.sending) queue.clear();
    for (auto& queue : peer.coming) queue.clear();
    if (peer.into != nullptr) DropPayload(&peer);
  }
}

// Discards the rest of a piece.
void PeerConnections::DropPayload(Peer* peer) {
  peer->payload.resize(peer->frame->bytes);
  peer->into = nullptr;
  peer->dropped = true;
}

// Returns a frame as sealed records.
std::string PeerConnections::Sealed(Peer* peer, const FrameHeader& header,
                                    absl::string_view payload) const {
  const FrameHeaderBytes bytes = ToBytes(header);
  const size_t tags = payload.empty() ? 1 : 2;
  std::string records(bytes.size() + payload.size() + tags * Seal::kTagBytes, '\0');
  auto* const out = reinterpret_cast<uint8_t*>(&records[0]);
  peer->seal->Close(bytes.data(), bytes.size(), out);
  if (!payload.empty()) {
    peer->seal->Close(payload.data(), payload.size(), out + bytes.size() + Seal::kTagBytes);
  }
  return records;
}

void PeerConnections::GiveUp(const absl::Status& reason) {
  Lock lock(mutex_);
  ending_ = options_.ends_process;
  try {
    SetFailure(absl::UnavailableError(
        absl::StrCat(Who(rank_), " gave up: ", std::string(reason.message()))));
  } catch (const std::bad_alloc&) {
    SetFailure(no_memory_);
  }
  if (!options_.ends_process) {
    lock.unlock();
    return WakeThread();
  }
  PrintError(failure_);
  WakeThread();
  changed_.wait_for(lock, kFarewell, [this] { return Flushed(); });
  std::_Exit(1);
}

void PeerConnections::Outgoing::Own() {
  head.append(tail, tail_bytes);
  tail = nullptr;
  tail_bytes = 0;
  transfer = nullptr;
}

void PeerConnections::Lose(int index, const std::string& how) {
  Peer& peer = peers_[index];
  peer.socket.Close();
  if (!peer.finished && !stopping_) {
    SetFailure(absl::UnavailableError(absl::StrCat(Who(index), " was lost: ", how)));
  }
  peer.outgoing.clear();
}

void PeerConnections::Arrive(const Key& key, Arrived message) {
  peers_[std::get<2>(key)].unexpected_bytes += message.payload.size() + kUnexpectedOverhead;
  streams_[key].arrived.push_back(std::move(message));
  Match(key);
}

// Matches arrived messages with the receives that wait for them.
void PeerConnections::Match(const Key& key) {
  const auto [group, channel, source] = key;
  const auto found = streams_.find(key);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  while (!stream.posted.empty() && !stream.arrived.empty()) {
    Transfer* const receive = stream.posted.front();
    const Arrived message = std::move(stream.arrived.front());
    stream.posted.pop_front();
    stream.arrived.pop_front();
    peers_[source].unexpected_bytes -= message.payload.size() + kUnexpectedOverhead;
    if (message.bytes != uint64_t(receive->bytes)) {
      receive->wrong_bytes = message.bytes;
      receive->done = true;
    } else if (message.announced) {
      peers_[source].coming[channel].push_back(receive);
      Queue(source, FrameKind::kGo, channel, group, 0, "");
    } else {
      std::copy(message.payload.begin(), message.payload.end(), receive->data);
      receive->done = true;
    }
    if (receive->done) changed_.notify_all();
  }
  if (stream.posted.empty() && stream.arrived.empty()) streams_.erase(found);
}

void PeerConnections::CheckHeartbeats() {
  const auto now = steady_clock::now();
  // If this process itself was stopped, heartbeats of the others may be unread.
  const bool was_stopped = now - looked_ > options_.lost_after / 2;
  looked_ = now;
  const auto is_silent = [&](const Peer& peer, milliseconds time) {
    return peer.socket.fd() >= 0 && !peer.finished && now - peer.heard >= time;
  };
  for (int index = 0; index < size(); ++index) {
    if (was_stopped) peers_[index].heard = now;
    if (!is_silent(peers_[index], options_.lost_after)) continue;
    std::string how =
        absl::StrCat("nothing heard of it for ", Seconds(now - peers_[index].heard), " s");
    // Names the other silent ranks, because their whole host may be lost.
    for (int other = 0; other < size(); ++other) {
      if (other == index || !is_silent(peers_[other], options_.lost_after / 2)) continue;
      absl::StrAppend(&how, ", nor of rank ", other, " for ", Seconds(now - peers_[other].heard),
                      " s");
    }
    Lose(index, how);
  }
  if (now - said_ < options_.heartbeat) return;
  said_ = now;
  const uint64_t idle_ms = MsWithoutProgress();
  for (int peer = 0; peer < size(); ++peer) {
    Queue(peer, FrameKind::kHeartbeat, 0, /*group=*/idle_ms, 0, "");
  }
}

bool PeerConnections::Flushed() const {
  return std::none_of(peers_.begin(), peers_.end(),
                      [this](const Peer& peer) { return HasOutput(peer); });
}

bool PeerConnections::AllClosed() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.socket.fd() < 0; });
}

// Waits, at most for `timeout`, until something can be sent or received. Then it sends and receives
// everything that does not block.
void PeerConnections::RunOnce(Lock& lock, milliseconds timeout) {
  polled_.assign(1, {wake_.fd(), POLLIN, 0});
  for (const Peer& peer : peers_) {
    const short events = HasOutput(peer) ? POLLIN | POLLOUT : POLLIN;
    polled_.push_back({peer.socket.fd(), events, 0});  // poll ignores descriptors below 0
  }
  lock.unlock();
  poll(polled_.data(), polled_.size(), static_cast<int>(timeout.count()));
  if (polled_[0].revents != 0) {
    uint64_t count;
    (void)!read(wake_.fd(), &count, sizeof(count));
  }
  lock.lock();
  for (int peer = 0; peer < size(); ++peer) {
    if (polled_[peer + 1].revents != 0) ReadFrom(peer);
    WriteTo(peer);
  }
}

// Calls serve(). If memory for it is missing, the job fails.
void PeerConnections::Serve(const std::function<void()>& serve) {
  try {
    serve();
  } catch (const std::bad_alloc&) {
    if (failure_.ok()) failure_ = no_memory_;
    CloseAll();
    changed_.notify_all();
  }
}

void PeerConnections::Run() {
  Lock lock(mutex_);
  Serve([&] {
    while (!stopping_ && failure_.ok()) {
      RunOnce(lock, std::min(options_.heartbeat, options_.lost_after) / 2);
      CheckHeartbeats();
    }
  });
  const bool failed = !failure_.ok() && !stopping_;
  Serve([&] { SayFarewell(lock); });
  changed_.notify_all();
  if (!failed || !options_.on_failure) return;
  changed_.wait_for(lock, options_.grace, [this] { return ending_ || stopping_; });
  if (ending_ || (stopping_ && options_.grace.count() > 0)) return;
  const absl::Status failure = failure_;
  lock.unlock();
  options_.on_failure(failure);
}

// Sends the last messages. Then, unless something failed, it reads until the others have closed,
// because closing a connection with unread data could discard sent data.
void PeerConnections::SayFarewell(Lock& lock) {
  const auto end = steady_clock::now() + kFarewell;
  const auto left = [&] { return duration_cast<milliseconds>(end - steady_clock::now()); };
  while (!Flushed() && left().count() > 0) RunOnce(lock, left());
  for (Peer& peer : peers_) {
    if (peer.socket.fd() >= 0) shutdown(peer.socket.fd(), SHUT_WR);
  }
  while (failure_.ok() && !AllClosed() && left().count() > 0) RunOnce(lock, left());
}

}  // namespace burst
