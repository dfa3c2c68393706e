#include "burst/comm/tcp/rendezvous.h"

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "burst/base/status.h"
#include "burst/comm/tcp/handshake.h"

namespace burst {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Between two calls of one port: short at first, then longer.
constexpr milliseconds kFirstPause{50}, kLongestPause{500};
// Greetings of others that may be under way at once; beyond it the oldest one is dropped, which an
// honest process starts anew.
constexpr size_t kMostPending = 256;

// A port that may be that of a rank.
struct Target {
  int peer;
  std::string host;
  int port;
  bool calling = false;  // a handshake is under way
  Deadline next = {};    // not before then
  milliseconds pause = kFirstPause;
  int attempts = 0;
};

struct Pending {
  Handshake handshake;
  int target;  // that it calls; -1: another process called
};

class Meeting {
 public:
  explicit Meeting(const RendezvousOptions& options)
      : options_(options),
        deadline_(steady_clock::now() + options.timeout),
        sockets_(options.world_size) {
    self_.job_tag = JobTag(options.job);
    self_.rank = options.rank;
    self_.world_size = options.world_size;
  }

  // Rank 0.
  absl::Status Host(Socket listener) {
    BURST_ASSIGN_OR_RETURN(const std::string token, options_.token());
    self_.key = MakeJobKey(token, options_.job);
    if (listener.fd() < 0) {
      BURST_ASSIGN_OR_RETURN(listener, ListenOnFreePort());
    }
    BURST_RETURN_IF_ERROR(Meet(&listener, {}));
    std::string places;
    for (int peer = 0; peer < options_.world_size; ++peer) {
      Place place;
      if (peer > 0) {
        uint8_t port[2];
        BURST_RETURN_IF_ERROR(Named(peer, sockets_[peer].Read(port, sizeof(port), deadline_)));
        place = {sockets_[peer].PeerAddress(), GetNumber<uint16_t>(port)};
      }
      const PlaceBytes bytes = ToBytes(place);
      places.append(bytes.begin(), bytes.end());
    }
    for (int peer = 1; peer < options_.world_size; ++peer) {
      BURST_RETURN_IF_ERROR(
          Named(peer, sockets_[peer].Write(places.data(), places.size(), deadline_)));
    }
    return absl::OkStatus();
  }

  // The others: call rank 0, then those below; those above call.
  absl::Status Join() {
    std::vector<Target> targets;
    for (int i = 0; i < options_.num_ports; ++i) {
      targets.push_back({0, options_.address, options_.port + i});
    }
    BURST_RETURN_IF_ERROR(Meet(nullptr, std::move(targets)));
    BURST_ASSIGN_OR_RETURN(const Socket listener, ListenBesideRank0());
    uint8_t port[2];
    PutNumber(static_cast<uint16_t>(listener.port()), port);
    BURST_RETURN_IF_ERROR(Named(0, sockets_[0].Write(port, sizeof(port), deadline_)));
    std::vector<uint8_t> places(options_.world_size * kPlaceBytes);
    const absl::Status read = sockets_[0].Read(places.data(), places.size(), deadline_);
    if (!read.ok()) {
      return absl::UnavailableError(
          absl::StrCat("rank ", options_.rank, ": rank 0 gave up before all ", options_.world_size,
                       " ranks had come (", std::string(read.message()), ")"));
    }
    targets.clear();
    for (int peer = 1; peer < options_.rank; ++peer) {
      const absl::StatusOr<Place> place =
          ParsePlace(absl::MakeConstSpan(&places[peer * kPlaceBytes], kPlaceBytes));
      BURST_RETURN_IF_ERROR(Named(peer, place.status()));
      const bool with_rank0 = place->address.empty();
      targets.push_back({peer, with_rank0 ? options_.address : place->address, place->port});
    }
    return Meet(&listener, std::move(targets));
  }

  Connections Take() { return {std::move(sockets_), strangers_}; }

 private:
  absl::Status Named(int peer, const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::UnavailableError(absl::StrCat("rank ", options_.rank, " cannot reach rank ", peer,
                                               ": ", std::string(status.message())));
  }

  absl::StatusOr<Socket> ListenAsRank0(int port) const {
    if (!options_.several_hosts) return Listen("127.0.0.1", port);
    if (IsNumericAddress(options_.address) && !IsLoopbackAddress(options_.address)) {
      absl::StatusOr<Socket> listener = Listen(options_.address, port);
      if (!absl::IsNotFound(listener.status())) return listener;
    }
    return Listen("", port);
  }

  absl::StatusOr<Socket> ListenOnFreePort() const {
    for (int i = 0; i < options_.num_ports; ++i) {
      absl::StatusOr<Socket> listener = ListenAsRank0(options_.port + i);
      if (!absl::IsAlreadyExists(listener.status())) return listener;
    }
    return absl::UnavailableError(absl::StrCat("no port is free from ", options_.port, " to ",
                                               options_.port + options_.num_ports - 1,
                                               "; MASTER_PORT says where rank 0 listens"));
  }

  // For the ranks above: where rank 0 was reached from, or, on its host, where rank 0 listens.
  absl::StatusOr<Socket> ListenBesideRank0() const {
    const bool on_its_host = sockets_[0].PeerAddress().empty();
    return on_its_host ? ListenAsRank0(0) : Listen(sockets_[0].OwnAddress(), 0);
  }

  bool IsMissing(int peer) const { return sockets_[peer].fd() < 0; }

  // Calls the targets, of which one for each of their ranks must answer, and accepts the ranks
  // above this one if `listener` is given, until all of them are there.
  absl::Status Meet(const Socket* listener, std::vector<Target> targets) {
    targets_ = std::move(targets);
    std::vector<int> wanted;
    for (const Target& target : targets_) {
      if (wanted.empty() || wanted.back() != target.peer) wanted.push_back(target.peer);
    }
    for (int peer = options_.rank + 1; listener != nullptr && peer < options_.world_size; ++peer) {
      wanted.push_back(peer);
    }
    const auto missing = [this](int peer) { return IsMissing(peer); };
    while (std::any_of(wanted.begin(), wanted.end(), missing)) {
      if (steady_clock::now() >= deadline_) return Vain(listener == nullptr, wanted);
      CallTargets();
      BURST_RETURN_IF_ERROR(PollAll(listener));
    }
    // Whoever has not proved anything by now is no part of the job.
    for (const Pending& pending : pending_) strangers_ += pending.target < 0;
    pending_.clear();
    return absl::OkStatus();
  }

  void CallTargets() {
    const auto now = steady_clock::now();
    for (size_t i = 0; i < targets_.size(); ++i) {
      Target& target = targets_[i];
      if (target.calling || !IsMissing(target.peer) || now < target.next) continue;
      const absl::Status started = Call(static_cast<int>(i), now);
      if (started.ok()) continue;
      last_error_ = started;
      Pause(&target);
    }
  }

  absl::Status Call(int index, Deadline now) {
    Target& target = targets_[index];
    if (target.peer == 0) {
      BURST_ASSIGN_OR_RETURN(const std::string token, options_.token());
      self_.key = MakeJobKey(token, options_.job);
    }
    BURST_ASSIGN_OR_RETURN(const auto addresses, Resolve(target.host, target.port));
    const SocketAddress& address = addresses[target.attempts++ % addresses.size()];
    BURST_ASSIGN_OR_RETURN(Socket socket, StartConnect(address));
    pending_.push_back({Handshake(std::move(socket), Side::kCaller, self_, target.peer,
                                  std::min(deadline_, now + options_.greeting_timeout)),
                        index});
    target.calling = true;
    return absl::OkStatus();
  }

  static void Pause(Target* target) {
    target->calling = false;
    target->next = steady_clock::now() + target->pause;
    target->pause = std::min(kLongestPause, target->pause * 3 / 2);
  }

  // Waits until something can be done, and does it.
  absl::Status PollAll(const Socket* listener) {
    std::vector<pollfd> polled = {{listener == nullptr ? -1 : listener->fd(), POLLIN, 0}};
    Deadline wake = deadline_;
    for (const Pending& pending : pending_) {
      polled.push_back({pending.handshake.socket().fd(), pending.handshake.events(), 0});
      wake = std::min(wake, pending.handshake.deadline());
    }
    for (const Target& target : targets_) {
      if (!target.calling && IsMissing(target.peer)) wake = std::min(wake, target.next);
    }
    const auto left = duration_cast<milliseconds>(wake - steady_clock::now()).count();
    poll(polled.data(), polled.size(), static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60'000)));

    auto request = polled.begin();
    for (auto pending = pending_.begin(); pending != pending_.end();) {
      Handshake& handshake = pending->handshake;
      auto state = Handshake::State::kGoing;
      if ((++request)->revents != 0) state = handshake.Advance();
      const bool late = steady_clock::now() >= handshake.deadline();
      if (state == Handshake::State::kGoing && late) state = Handshake::State::kRefused;
      if (state == Handshake::State::kGoing) {
        ++pending;
        continue;
      }
      BURST_RETURN_IF_ERROR(Settle(&*pending, state));
      pending = pending_.erase(pending);
    }
    if (polled[0].revents != 0) return AcceptAll(*listener);
    return absl::OkStatus();
  }

  absl::Status AcceptAll(const Socket& listener) {
    while (true) {
      absl::StatusOr<Socket> accepted = listener.Accept();
      if (absl::IsNotFound(accepted.status())) return absl::OkStatus();
      const bool full = absl::IsResourceExhausted(accepted.status());
      if (full || pending_.size() >= kMostPending) {
        const auto oldest = std::find_if(pending_.begin(), pending_.end(),
                                         [](const Pending& p) { return p.target < 0; });
        if (oldest != pending_.end()) {
          pending_.erase(oldest);
          ++strangers_;
        } else if (full) {
          return accepted.status();
        }
      }
      if (!accepted.ok()) continue;
      const Deadline soon = std::min(deadline_, steady_clock::now() + options_.greeting_timeout);
      pending_.push_back({Handshake(*std::move(accepted), Side::kListener, self_, -1, soon), -1});
    }
  }

  // A handshake has ended.
  absl::Status Settle(Pending* pending, Handshake::State state) {
    const bool called = pending->target < 0;
    if (!called) Pause(&targets_[pending->target]);
    if (state != Handshake::State::kProven) {
      if (called && state == Handshake::State::kRefused) ++strangers_;
      return absl::OkStatus();
    }
    const Claim& claim = pending->handshake.claim();
    const int peer = static_cast<int>(claim.rank);
    if (claim.world_size != static_cast<uint32_t>(options_.world_size)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", options_.rank, " of ", options_.world_size, " met rank ", peer, " of ",
          claim.world_size, ": the processes of a job must agree on their number"));
    }
    Socket& socket = sockets_[peer];
    if (peer == options_.rank || (called && peer < options_.rank) ||
        (called && socket.fd() >= 0 && !socket.IsClosed())) {
      return absl::InvalidArgumentError(
          absl::StrCat("two processes say that they are rank ", peer));
    }
    if (!called) self_.key = pending->handshake.self().key;
    socket = pending->handshake.TakeSocket();
    return absl::OkStatus();
  }

  absl::Status Vain(bool for_rank0, const std::vector<int>& wanted) const {
    const double seconds = options_.timeout.count() / 1000.0;
    std::string text;
    if (for_rank0) {
      text = absl::StrCat("rank ", options_.rank, " of ", options_.world_size,
                          " found no rank 0 at ", options_.address, ":", options_.port, " in ",
                          seconds, " s; MASTER_ADDR and MASTER_PORT say where it listens");
      if (!last_error_.ok()) absl::StrAppend(&text, " (", std::string(last_error_.message()), ")");
    } else {
      std::vector<int> missing;
      for (int peer : wanted) {
        if (IsMissing(peer)) missing.push_back(peer);
      }
      text = absl::StrCat("rank ", options_.rank, " waited ", seconds, " s in vain for rank ",
                          absl::StrJoin(missing, ", "), " of ", options_.world_size);
    }
    int strangers = strangers_;
    for (const Pending& pending : pending_) strangers += pending.target < 0;
    if (strangers > 0) {
      absl::StrAppend(&text, "; ", strangers, strangers == 1 ? " connection" : " connections",
                      " came that did not prove the job's token");
    }
    return absl::UnavailableError(text);
  }

  const RendezvousOptions& options_;
  const Deadline deadline_;
  Identity self_;
  std::vector<Socket> sockets_;
  std::vector<Target> targets_;
  std::list<Pending> pending_;  // oldest first
  int strangers_ = 0;
  absl::Status last_error_;
};

// Every other rank takes a file of this process, and so does every greeting.
absl::Status AllowFiles(int world_size) {
  const rlim_t needed = world_size + kMostPending + 64;
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return absl::OkStatus();
  limit.rlim_cur = std::min(limit.rlim_max, needed);
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur > static_cast<rlim_t>(world_size) + 64) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("a job of ", world_size, " processes needs ",
                                                   needed, " open files in each, and only ",
                                                   limit.rlim_cur, " are allowed (ulimit -n)"));
}

}  // namespace

absl::StatusOr<Connections> Rendezvous(const RendezvousOptions& options, Socket listener) {
  BURST_RETURN_IF_ERROR(AllowFiles(options.world_size));
  Meeting meeting(options);
  BURST_RETURN_IF_ERROR(options.rank == 0 ? meeting.Host(std::move(listener)) : meeting.Join());
  return meeting.Take();
}

}  // namespace burst
