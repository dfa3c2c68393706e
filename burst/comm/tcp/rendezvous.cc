#include "burst/comm/tcp/rendezvous.h"

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <thread>
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

// The pause between two calls of one port, which grows from the first to the longest.
constexpr milliseconds kFirstPause{50}, kLongestPause{500};
// The most greetings of others at once. Beyond it the oldest one is dropped, and an honest process
// starts a new one.
constexpr size_t kMostPending = 256;
// The time after which a name is looked up again, because it may now mean another address. The
// look-up blocks, and greetings wait meanwhile.
constexpr milliseconds kLookUpAgain{30'000};
// The pause between two attempts of rank 0 to listen.
constexpr milliseconds kListenAgain{100};

// Rank 0's answer to a process that has proved that it belongs to the job.
enum class Answer : uint8_t { kWelcome = 1, kTaken = 2 };  // kTaken: another one is that rank

// Returns the file name of a job's sockets, without the number.
std::string NameInFolder(const RendezvousOptions& options) {
  const uint64_t tag = JobTag(absl::StrCat(options.job, " ", options.port, " ", options.token));
  return absl::StrCat("burst-", absl::Hex(tag, absl::kZeroPad16));
}

// A port that may belong to a rank.
struct Target {
  int peer;
  std::string host;
  int port;
  bool calling = false;  // a handshake is under way
  Deadline next = {};    // the earliest time of the next call
  milliseconds pause = kFirstPause;
  int attempts = 0;
};

struct Pending {
  Handshake handshake;
  int target;  // the target that it calls; -1: another process called
};

struct KnownHost {
  std::vector<SocketAddress> addresses;
  Deadline looked_up = {};
};

class Meeting {
 public:
  explicit Meeting(const RendezvousOptions& options)
      : options_(options),
        deadline_(steady_clock::now() + options.timeout),
        name_(NameInFolder(options)),
        links_(options.world_size) {
    self_.job_tag = JobTag(options.job);
    self_.key = MakeJobKey(options.token, options.job);
    self_.rank = options.rank;
    self_.world_size = options.world_size;
  }

  // Meets the others as rank 0.
  absl::Status Host(Listener listener) {
    if (!listener.listens()) {
      BURST_ASSIGN_OR_RETURN(listener, ListenUntilFree());
    }
    BURST_RETURN_IF_ERROR(Meet(&listener, {}));
    std::string places;
    for (int peer = 0; peer < options_.world_size; ++peer) {
      Place place;
      if (peer > 0) {
        uint8_t port[2];
        BURST_RETURN_IF_ERROR(Named(peer, Read(links_[peer], port, sizeof(port))));
        place.port = GetNumber<uint16_t>(port);
        if (!IsOnThisHost(peer)) place.address = links_[peer].socket.PeerAddress();
      }
      const PlaceBytes bytes = ToBytes(place);
      places.append(bytes.begin(), bytes.end());
    }
    for (int peer = 1; peer < options_.world_size; ++peer) {
      BURST_RETURN_IF_ERROR(Named(peer, Write(links_[peer], places.data(), places.size())));
    }
    return absl::OkStatus();
  }

  // Meets the others as another rank. It calls rank 0, then the ranks below this one; ranks above
  // call it.
  absl::Status Join() {
    std::vector<Target> targets;
    for (int i = 0; i < (options_.folder.has_value() ? 1 : options_.num_ports); ++i) {
      targets.push_back({0, options_.address, options_.folder ? 0 : options_.port + i});
    }
    BURST_RETURN_IF_ERROR(MeetRank0(targets));
    BURST_ASSIGN_OR_RETURN(const Listener listener, ListenBesideRank0());
    uint8_t port[2];
    PutNumber(static_cast<uint16_t>(listener.port()), port);
    BURST_RETURN_IF_ERROR(UnlessRank0GaveUp(Write(links_[0], port, sizeof(port))));
    std::vector<uint8_t> places(options_.world_size * kPlaceBytes);
    BURST_RETURN_IF_ERROR(UnlessRank0GaveUp(Read(links_[0], places.data(), places.size())));
    targets.clear();
    for (int peer = 1; peer < options_.rank; ++peer) {
      const absl::StatusOr<Place> place =
          ParsePlace(absl::MakeConstSpan(&places[peer * kPlaceBytes], kPlaceBytes));
      BURST_RETURN_IF_ERROR(Named(peer, place.status()));
      std::string host = place->address;
      if (host.empty() && !options_.folder) host = links_[0].socket.PeerAddress();
      targets.push_back({peer, std::move(host), place->port});
    }
    return Meet(&listener, std::move(targets));
  }

  Connections Take() { return {std::move(links_), strangers_, doubles_}; }

 private:
  absl::Status Named(int peer, const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::UnavailableError(absl::StrCat("rank ", options_.rank, " cannot reach rank ", peer,
                                               ": ", std::string(status.message())));
  }

  absl::Status UnlessRank0GaveUp(const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::UnavailableError(
        absl::StrCat("rank ", options_.rank, ": rank 0 gave up before all ", options_.world_size,
                     " ranks had come (", std::string(status.message()), ")"));
  }

  // Calls until a rank 0 has no other process as this rank. If two jobs have one name, that is the
  // other job.
  absl::Status MeetRank0(const std::vector<Target>& targets) {
    while (true) {
      BURST_RETURN_IF_ERROR(Meet(nullptr, targets));
      Answer answer;
      BURST_RETURN_IF_ERROR(UnlessRank0GaveUp(Read(links_[0], &answer, sizeof(answer))));
      if (answer == Answer::kWelcome) return absl::OkStatus();
      links_[0] = PeerLink();
      ++times_taken_;
      std::this_thread::sleep_for(kLongestPause);
    }
  }

  // Writes a record to the greeted connection, sealed if it has a seal.
  absl::Status Write(PeerLink& link, const void* data, size_t bytes) {
    if (!link.seal.has_value()) return link.socket.Write(data, bytes, deadline_);
    std::vector<uint8_t> record(bytes + Seal::kTagBytes);
    link.seal->Close(data, bytes, record.data());
    return link.socket.Write(record.data(), record.size(), deadline_);
  }
  absl::Status Read(PeerLink& link, void* data, size_t bytes) {
    BURST_RETURN_IF_ERROR(link.socket.Read(data, bytes, deadline_));
    if (!link.seal.has_value()) return absl::OkStatus();
    uint8_t tag[Seal::kTagBytes];
    BURST_RETURN_IF_ERROR(link.socket.Read(tag, sizeof(tag), deadline_));
    if (link.seal->Open(data, bytes, tag)) return absl::OkStatus();
    return absl::UnavailableError("what came was changed on its way");
  }

  bool IsOnThisHost(int peer) const {
    return options_.folder.has_value() || IsLoopbackAddress(links_[peer].socket.PeerAddress());
  }

  absl::StatusOr<Socket> ListenAsRank0(int port) const {
    if (!options_.several_hosts) return Listen("127.0.0.1", port);
    if (IsNumericAddress(options_.address) && !IsLoopbackAddress(options_.address)) {
      absl::StatusOr<Socket> listener = Listen(options_.address, port);
      if (!absl::IsNotFound(listener.status())) return listener;
    }
    return Listen("", port);
  }

  absl::StatusOr<Listener> ListenOnFreePort() const {
    if (options_.folder.has_value()) return ListenInFolder(options_);
    for (int i = 0; i < options_.num_ports; ++i) {
      absl::StatusOr<Socket> listener = ListenAsRank0(options_.port + i);
      if (!absl::IsAlreadyExists(listener.status())) return listener;
    }
    return absl::AlreadyExistsError(absl::StrCat("no port is free from ", options_.port, " to ",
                                                 options_.port + options_.num_ports - 1));
  }

  // Others may hold the ports, or the name, for a while.
  absl::StatusOr<Listener> ListenUntilFree() const {
    while (true) {
      absl::StatusOr<Listener> listener = ListenOnFreePort();
      if (!absl::IsAlreadyExists(listener.status())) return listener;
      if (steady_clock::now() >= deadline_) {
        return absl::UnavailableError(absl::StrCat(
            "rank 0 waited ", Seconds(), " s in vain: ", std::string(listener.status().message()),
            "; MASTER_PORT says where rank 0 listens"));
      }
      std::this_thread::sleep_for(kListenAgain);
    }
  }

  // Listens for the ranks above, at the address from which rank 0 was reached. On rank 0's host it
  // listens where rank 0 does.
  absl::StatusOr<Listener> ListenBesideRank0() const {
    if (options_.folder.has_value()) return options_.folder->Listen(name_);
    return IsOnThisHost(0) ? ListenAsRank0(0) : Listen(links_[0].socket.OwnAddress(), 0);
  }

  bool IsMissing(int peer) const { return links_[peer].socket.fd() < 0; }

  // Calls the targets until one answers for each of their ranks. If `listener` is given, it also
  // accepts all ranks above this one.
  absl::Status Meet(const Listener* listener, std::vector<Target> targets) {
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
    // A connection that has proved nothing by now does not belong to the job.
    for (const Pending& pending : pending_) {
      if (pending.target < 0) CountStranger(pending);
    }
    pending_.clear();
    return absl::OkStatus();
  }

  void CallTargets() {
    const auto now = steady_clock::now();
    for (size_t i = 0; i < targets_.size(); ++i) {
      Target& target = targets_[i];
      if (target.calling || !IsMissing(target.peer) || now < target.next) continue;
      const absl::Status started = Call(static_cast<int>(i));
      if (started.ok()) continue;
      last_error_ = started;
      Pause(&target);
    }
  }

  absl::Status Call(int index) {
    Target& target = targets_[index];
    BURST_ASSIGN_OR_RETURN(Socket socket, ConnectTo(&target));
    const Deadline soon = steady_clock::now() + options_.greeting_timeout;
    pending_.push_back({Handshake(std::move(socket), Side::kCaller, target.port, self_, target.peer,
                                  std::min(deadline_, soon)),
                        index});
    target.calling = true;
    return absl::OkStatus();
  }

  absl::StatusOr<Socket> ConnectTo(Target* target) {
    if (options_.folder.has_value()) return options_.folder->Connect(name_, target->port);
    BURST_ASSIGN_OR_RETURN(const std::vector<SocketAddress>* addresses, AddressesOf(target->host));
    const SocketAddress& address = (*addresses)[target->attempts++ % addresses->size()];
    return StartConnect(WithPort(address, target->port));
  }

  // Looks up a name once for all of its ports, and again only after a while.
  absl::StatusOr<const std::vector<SocketAddress>*> AddressesOf(const std::string& name) {
    KnownHost& host = hosts_[name];
    const bool old = steady_clock::now() - host.looked_up > kLookUpAgain;
    if (host.addresses.empty() || (old && !IsNumericAddress(name))) {
      absl::StatusOr<std::vector<SocketAddress>> found = Resolve(name, 0);
      host.looked_up = steady_clock::now();
      if (found.ok()) host.addresses = *std::move(found);
      if (host.addresses.empty()) return found.status();
    }
    return &host.addresses;
  }

  static void Pause(Target* target) {
    target->calling = false;
    target->next = steady_clock::now() + target->pause;
    target->pause = std::min(kLongestPause, target->pause * 3 / 2);
  }

  // Waits for an event, and handles it.
  absl::Status PollAll(const Listener* listener) {
    std::vector<pollfd> polled = {{listener == nullptr ? -1 : listener->socket().fd(), POLLIN, 0}};
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

  absl::Status AcceptAll(const Listener& listener) {
    while (true) {
      absl::StatusOr<Socket> accepted = listener.socket().Accept();
      if (absl::IsNotFound(accepted.status())) return absl::OkStatus();
      const bool full = absl::IsResourceExhausted(accepted.status());
      if (full || pending_.size() >= kMostPending) {
        const auto oldest = std::find_if(pending_.begin(), pending_.end(),
                                         [](const Pending& p) { return p.target < 0; });
        if (oldest != pending_.end()) {
          CountStranger(*oldest);
          pending_.erase(oldest);
        } else if (full) {
          return accepted.status();
        }
      }
      if (!accepted.ok()) continue;
      if (options_.folder.has_value() && !SocketFolder::IsOwnUser(*accepted)) {
        ++strangers_;
        continue;
      }
      const Deadline soon = std::min(deadline_, steady_clock::now() + options_.greeting_timeout);
      pending_.push_back(
          {Handshake(*std::move(accepted), Side::kListener, listener.port(), self_, -1, soon), -1});
    }
  }

  // A handshake has ended.
  absl::Status Settle(Pending* pending, Handshake::State state) {
    const bool called = pending->target < 0;
    if (!called) Pause(&targets_[pending->target]);
    if (state != Handshake::State::kProven) {
      if (called && state == Handshake::State::kRefused) CountStranger(*pending);
      return absl::OkStatus();
    }
    const Claim& claim = pending->handshake.claim();
    const int peer = static_cast<int>(claim.rank);
    if (claim.world_size != static_cast<uint32_t>(options_.world_size)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", options_.rank, " of ", options_.world_size, " met rank ", peer, " of ",
          claim.world_size, ": the processes of a job must agree on their number"));
    }
    PeerLink link = {pending->handshake.TakeSocket(), std::nullopt};
    if (!options_.folder.has_value()) link.seal.emplace(pending->handshake.keys());
    // The first connection of a rank stays; later ones are closed.
    const bool is_there = !IsMissing(peer) && !links_[peer].socket.IsClosed();
    const bool taken = is_there || peer == options_.rank || (called && peer < options_.rank);
    doubles_ += taken;
    absl::Status answered;
    if (options_.rank == 0) {
      const Answer answer = taken ? Answer::kTaken : Answer::kWelcome;
      answered = Write(link, &answer, sizeof(answer));
    }
    if (!taken && answered.ok()) links_[peer] = std::move(link);
    return absl::OkStatus();
  }

  void CountStranger(const Pending& pending) {
    ++strangers_;
    of_this_job_ += pending.handshake.said_job();
  }

  double Seconds() const { return options_.timeout.count() / 1000.0; }

  std::string WhereRank0IsCalled() const {
    if (options_.folder.has_value()) return absl::StrCat(options_.folder->path(), "/", name_, ".0");
    return absl::StrCat(options_.address, ":", options_.port);
  }

  absl::Status Vain(bool for_rank0, const std::vector<int>& wanted) {
    std::string text;
    if (for_rank0) {
      text = absl::StrCat("rank ", options_.rank, " of ", options_.world_size,
                          " found no rank 0 at ", WhereRank0IsCalled(), " in ", Seconds(), " s; ",
                          options_.folder.has_value()
                              ? "all processes of a job on one host must see this folder"
                              : "MASTER_ADDR and MASTER_PORT say where it listens");
      if (times_taken_ > 0) {
        absl::StrAppend(&text, "; it has answered ", times_taken_,
                        " times that another process is "
                        "rank ",
                        options_.rank);
      }
      if (!last_error_.ok()) absl::StrAppend(&text, " (", std::string(last_error_.message()), ")");
    } else {
      std::vector<int> missing;
      for (int peer : wanted) {
        if (IsMissing(peer)) missing.push_back(peer);
      }
      text = absl::StrCat("rank ", options_.rank, " waited ", Seconds(), " s in vain for rank ",
                          absl::StrJoin(missing, ", "), " of ", options_.world_size);
    }
    for (const Pending& pending : pending_) {
      if (pending.target < 0) CountStranger(pending);
    }
    if (strangers_ > 0) {
      absl::StrAppend(&text, "; ", strangers_, strangers_ == 1 ? " connection" : " connections",
                      " came that did not prove the job's token");
    }
    if (of_this_job_ > 0) {
      absl::StrAppend(&text, "; ", of_this_job_,
                      " of them named this job: do all processes have "
                      "the same BURST_TOKEN, and call the port on which rank 0 listens?");
    }
    if (doubles_ > 0) {
      absl::StrAppend(&text, "; ", doubles_, doubles_ == 1 ? " connection" : " connections",
                      " came of a rank that is there already: do two processes have one rank?");
    }
    return absl::UnavailableError(text);
  }

  const RendezvousOptions& options_;
  const Deadline deadline_;
  const std::string name_;  // name of the job's sockets in a folder
  Identity self_;
  std::vector<PeerLink> links_;
  std::vector<Target> targets_;
  std::map<std::string, KnownHost> hosts_;
  std::list<Pending> pending_;  // oldest first
  int strangers_ = 0, of_this_job_ = 0, doubles_ = 0;
  int times_taken_ = 0;  // number of rank 0's answers kTaken
  absl::Status last_error_;
};

// Raises the limit of open files. Every other rank takes one, and so does every greeting.
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

absl::StatusOr<Listener> ListenInFolder(const RendezvousOptions& options) {
  absl::StatusOr<Listener> listener = options.folder->ListenAsFirst(NameInFolder(options));
  if (!absl::IsAlreadyExists(listener.status())) return listener;
  return absl::AlreadyExistsError(
      absl::StrCat("another job of the same name and port meets in ", options.folder->path()));
}

absl::StatusOr<Connections> Rendezvous(const RendezvousOptions& options, Listener listener) {
  BURST_RETURN_IF_ERROR(AllowFiles(options.world_size));
  Meeting meeting(options);
  BURST_RETURN_IF_ERROR(options.rank == 0 ? meeting.Host(std::move(listener)) : meeting.Join());
  return meeting.Take();
}

}  // namespace burst
