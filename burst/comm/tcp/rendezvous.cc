#include "burst/comm/tcp/rendezvous.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "burst/base/status.h"

namespace burst {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long to wait for an answer: rank 0 waits less for a process of another job that connects,
// than a rank waits for rank 0, which may have several of those to deal with first.
constexpr milliseconds kStrangerCalls{1000}, kStrangerAnswers{10000};
constexpr uint64_t kMagic = 0x315652'5453525542;  // "BURSTRV1"

struct Hello {
  uint64_t magic = kMagic;
  uint64_t job = 0;
  int32_t rank = 0;
  int32_t world_size = 0;
  int32_t port = 0;  // where the rank listens itself
  int32_t unused = 0;
};

// Where a rank listens; an empty address: on the host of rank 0.
struct Place {
  char address[60] = {};
  int32_t port = 0;
};

class Meeting {
 public:
  explicit Meeting(const RendezvousOptions& options)
      : options_(options),
        deadline_(steady_clock::now() + options.timeout),
        sockets_(options.world_size) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (unsigned char c : options.job) hash = (hash ^ c) * 0x100000001b3;
    hello_.job = hash;
    hello_.rank = options.rank;
    hello_.world_size = options.world_size;
  }

  // Rank 0.
  absl::Status Host(Socket listener) {
    if (listener.fd() < 0) {
      BURST_ASSIGN_OR_RETURN(listener, ListenOnFreePort());
    }
    std::vector<Place> places(options_.world_size);
    BURST_RETURN_IF_ERROR(Gather(listener, 1, &places));
    for (int peer = 1; peer < options_.world_size; ++peer) {
      BURST_RETURN_IF_ERROR(Named(
          peer, sockets_[peer].Write(places.data(), places.size() * sizeof(Place), deadline_)));
    }
    return absl::OkStatus();
  }

  // The others: call rank 0, then those below; those above call.
  absl::Status Join() {
    BURST_ASSIGN_OR_RETURN(const Socket listener, Listen(options_.address, 0));
    hello_.port = listener.port();
    BURST_RETURN_IF_ERROR(FindRank0());
    std::vector<Place> places(options_.world_size);
    const absl::Status read =
        sockets_[0].Read(places.data(), places.size() * sizeof(Place), deadline_);
    if (!read.ok()) {
      return absl::UnavailableError(
          absl::StrCat("rank ", options_.rank, ": rank 0 gave up before all ", options_.world_size,
                       " ranks had come (", std::string(read.message()), ")"));
    }
    for (int peer = 1; peer < options_.rank; ++peer) {
      const Place& place = places[peer];
      const std::string address = *place.address == '\0' ? options_.address : place.address;
      absl::StatusOr<Socket> socket = Connect(address, place.port, deadline_);
      BURST_RETURN_IF_ERROR(Named(peer, socket.status()));
      BURST_RETURN_IF_ERROR(Named(peer, socket->Write(&hello_, sizeof(hello_), deadline_)));
      sockets_[peer] = *std::move(socket);
    }
    return Gather(listener, options_.rank + 1, nullptr);
  }

  std::vector<Socket> Take() { return std::move(sockets_); }

 private:
  absl::Status Named(int peer, const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::UnavailableError(absl::StrCat("rank ", options_.rank, " cannot reach rank ", peer,
                                               ": ", std::string(status.message())));
  }

  absl::StatusOr<Socket> ListenOnFreePort() const {
    for (int i = 0; i < options_.num_ports; ++i) {
      absl::StatusOr<Socket> listener = Listen(options_.address, options_.port + i);
      if (!absl::IsAlreadyExists(listener.status())) return listener;
    }
    return absl::UnavailableError(absl::StrCat("no port is free from ", options_.port, " to ",
                                               options_.port + options_.num_ports - 1,
                                               "; MASTER_PORT says where rank 0 listens"));
  }

  // Accepts the ranks from `first` on.
  absl::Status Gather(const Socket& listener, int first, std::vector<Place>* places) {
    for (int missing = options_.world_size - first; missing > 0;) {
      absl::StatusOr<Socket> accepted = listener.Accept(deadline_);
      if (absl::IsDeadlineExceeded(accepted.status())) return Missing(first);
      if (!accepted.ok()) return accepted.status();
      Hello hello;
      const Deadline soon = std::min(deadline_, steady_clock::now() + kStrangerCalls);
      if (!accepted->Read(&hello, sizeof(hello), soon).ok() || hello.magic != kMagic ||
          hello.job != hello_.job) {
        continue;  // a stranger
      }
      if (places != nullptr && !accepted->Write(&hello_, sizeof(hello_), soon).ok()) continue;
      if (hello.world_size != options_.world_size || hello.rank < first ||
          hello.rank >= options_.world_size) {
        return Disagree(hello);
      }
      Socket& socket = sockets_[hello.rank];
      if (socket.fd() >= 0 && !socket.IsClosed()) {
        return absl::InvalidArgumentError(
            absl::StrCat("two processes say that they are rank ", hello.rank));
      }
      if (places != nullptr) {
        Place& place = (*places)[hello.rank];
        std::strncpy(place.address, accepted->PeerAddress().c_str(), sizeof(place.address) - 1);
        place.port = hello.port;
      }
      if (socket.fd() < 0) --missing;
      socket = *std::move(accepted);
    }
    return absl::OkStatus();
  }

  absl::Status Disagree(const Hello& other) const {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", options_.rank, " of ", options_.world_size, " met rank ", other.rank, " of ",
        other.world_size, ": the processes of a job must agree on their number"));
  }

  absl::Status Missing(int first) const {
    std::vector<int> missing;
    for (int peer = first; peer < options_.world_size; ++peer) {
      if (sockets_[peer].fd() < 0) missing.push_back(peer);
    }
    return absl::UnavailableError(absl::StrCat(
        "rank ", options_.rank, " waited ", options_.timeout.count() / 1000.0,
        " s in vain for rank ", absl::StrJoin(missing, ", "), " of ", options_.world_size));
  }

  // Goes through the ports until rank 0 answers on one.
  absl::Status FindRank0() {
    while (steady_clock::now() < deadline_) {
      for (int i = 0; i < options_.num_ports; ++i) {
        const Deadline soon = std::min(deadline_, steady_clock::now() + kStrangerAnswers);
        absl::StatusOr<Socket> socket = Connect(options_.address, options_.port + i, soon);
        Hello answer;
        if (!socket.ok() || !socket->Write(&hello_, sizeof(hello_), soon).ok() ||
            !socket->Read(&answer, sizeof(answer), soon).ok() || answer.magic != kMagic ||
            answer.job != hello_.job || answer.rank != 0) {
          continue;
        }
        if (answer.world_size != options_.world_size) return Disagree(answer);
        sockets_[0] = *std::move(socket);
        return absl::OkStatus();
      }
      std::this_thread::sleep_for(milliseconds(50));
    }
    return absl::UnavailableError(absl::StrCat(
        "rank ", options_.rank, " of ", options_.world_size, " found no rank 0 at ",
        options_.address, ":", options_.port, " in ", options_.timeout.count() / 1000.0,
        " s; MASTER_ADDR and MASTER_PORT say where it listens"));
  }

  const RendezvousOptions& options_;
  const Deadline deadline_;
  Hello hello_;
  std::vector<Socket> sockets_;
};

}  // namespace

absl::StatusOr<std::vector<Socket>> Rendezvous(const RendezvousOptions& options, Socket listener) {
  Meeting meeting(options);
  BURST_RETURN_IF_ERROR(options.rank == 0 ? meeting.Host(std::move(listener)) : meeting.Join());
  return meeting.Take();
}

}  // namespace burst
