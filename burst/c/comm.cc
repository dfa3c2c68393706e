// Implements the ranks of burst.h: the unique id, and the connections that it leads to.
#include <sys/random.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/c/objects.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/tcp/tcp_communicator.h"

namespace burst {
namespace c {
namespace {

// The content of a burst_unique_id.
struct Place {
  char magic[8];
  char token[33];    // hexadecimal
  char folder[80];   // where the ranks of one host meet; empty for TCP
  char address[64];  // numeric
  uint16_t several_hosts;
  uint16_t port;
};
static_assert(sizeof(Place) <= sizeof(burst_unique_id), "the id's size is part of the interface");
constexpr char kMagic[8] = "burst02";

// The sockets on which ranks 0 of this process wait for their groups, by token.
struct Listeners {
  std::mutex mutex;
  std::map<std::string, Listener> waiting;
};
Listeners& GetListeners() {
  static auto* listeners = new Listeners;
  return *listeners;
}

absl::StatusOr<RendezvousOptions> OptionsOf(const Place& place) {
  RendezvousOptions options;
  if (place.folder[0] != '\0') {
    BURST_ASSIGN_OR_RETURN(options.folder, SocketFolder::Open(place.folder));
  }
  options.several_hosts = place.several_hosts != 0;
  options.address = place.address;
  options.port = place.port;
  options.num_ports = 1;
  options.job = "burst.h";
  options.token = place.token;
  return options;
}

// Listens in this user's folder if it may be used and no address is given. Otherwise it listens on
// `host`.
absl::StatusOr<Listener> ListenFor(const char* address, const std::string& host, Place* place) {
  if (address == nullptr) {
    const std::string folder = SocketFolder::Default(std::getenv);
    if (folder.size() < sizeof(Place::folder) && SocketFolder::Open(folder).ok()) {
      std::memcpy(place->folder, folder.c_str(), folder.size());
      BURST_ASSIGN_OR_RETURN(const RendezvousOptions options, OptionsOf(*place));
      return ListenInFolder(options);
    }
  }
  BURST_ASSIGN_OR_RETURN(Listener listener, Listen(host, 0));
  place->port = static_cast<uint16_t>(listener.port());
  return listener;
}

absl::Status MakeId(const char* address, burst_unique_id* id) {
  const std::string host = address == nullptr ? "127.0.0.1" : address;
  if (!IsNumericAddress(host) || host.size() >= sizeof(Place::address)) {
    return absl::InvalidArgumentError(
        absl::StrCat("address: must be a numeric address; got ", host));
  }
  char random[16];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) {
    return absl::InternalError("the system has no random numbers");
  }
  const std::string token = absl::BytesToHexString(absl::string_view(random, sizeof(random)));
  Place place = {};
  std::memcpy(place.magic, kMagic, sizeof(kMagic));
  place.several_hosts = address != nullptr && !IsLoopbackAddress(host);
  std::memcpy(place.token, token.c_str(), token.size());
  std::memcpy(place.address, host.c_str(), host.size());
  BURST_ASSIGN_OR_RETURN(Listener listener, ListenFor(address, host, &place));
  Listeners& listeners = GetListeners();
  std::lock_guard<std::mutex> lock(listeners.mutex);
  listeners.waiting[token] = std::move(listener);
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id, &place, sizeof(place));
  return absl::OkStatus();
}

absl::StatusOr<Listener> TakeListener(const std::string& token) {
  Listeners& listeners = GetListeners();
  std::lock_guard<std::mutex> lock(listeners.mutex);
  const auto found = listeners.waiting.find(token);
  if (found == listeners.waiting.end()) {
    return absl::InvalidArgumentError("id: rank 0 must use it once, in the process that made it");
  }
  Listener listener = std::move(found->second);
  listeners.waiting.erase(found);
  return listener;
}

absl::StatusOr<std::unique_ptr<Communicator>> Meet(const Place& place, int rank, int size,
                                                   double timeout_s, TcpOptions tcp) {
  BURST_ASSIGN_OR_RETURN(RendezvousOptions options, OptionsOf(place));
  options.rank = rank;
  options.world_size = size;
  const auto patience =
      std::chrono::milliseconds(static_cast<int64_t>(std::ceil(1000 * timeout_s)));
  if (patience.count() > 0) options.timeout = patience;
  Listener listener;
  if (rank == 0) {
    BURST_ASSIGN_OR_RETURN(listener, TakeListener(place.token));
  }
  BURST_ASSIGN_OR_RETURN(Connections met, Rendezvous(options, std::move(listener)));
  tcp.ends_process = false;
  tcp.patience = patience;
  return std::unique_ptr<Communicator>(TcpCommunicator::Create(rank, std::move(met.links), tcp));
}

absl::StatusOr<std::unique_ptr<Communicator>> Connect(const Context& context, const Place& place,
                                                      int rank, int size, double timeout_s) {
  const auto meet = [&](const TcpOptions& tcp) { return Meet(place, rank, size, timeout_s, tcp); };
  if (context.device == DeviceType::kCpu) return meet({});
  return CreateGpuCommunicator(meet);
}

absl::StatusOr<std::shared_ptr<Comm>> MakeComm(std::shared_ptr<Context> context,
                                               const burst_unique_id* id, int rank, int size,
                                               double timeout_s) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank: must be below the number of ranks, which is 1 to ", kMaxRanks,
                     "; got rank ", rank, " of ", size));
  }
  if (!(timeout_s >= 0 && timeout_s < 1e9)) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeout_s: must be in [0, 1e9); got ", timeout_s));
  }
  auto comm = std::make_shared<Comm>(std::move(context));
  comm->rank = rank;
  comm->size = size;
  if (size == 1) return comm;
  Place place;
  std::memcpy(&place, id, sizeof(place));
  if (std::memcmp(place.magic, kMagic, sizeof(kMagic)) != 0 || place.token[32] != '\0' ||
      place.folder[sizeof(place.folder) - 1] != '\0' ||
      place.address[sizeof(place.address) - 1] != '\0') {
    return absl::InvalidArgumentError("id: must be made by burst_unique_id_create");
  }
  const Use use(comm->context.get());
  BURST_ASSIGN_OR_RETURN(auto communicator, Connect(*comm->context, place, rank, size, timeout_s));
  comm->communicator = std::move(communicator);
  comm->ranks = std::make_shared<AttentionRanks>(comm->communicator.get());
  return comm;
}

absl::Status AllGather(const Comm& comm, const char* mine, int64_t bytes, char* all) {
  BURST_RETURN_IF_ERROR(CheckNotFinished(&comm));
  if (bytes < 0)
    return absl::InvalidArgumentError(absl::StrCat("bytes: must be at least 0; got ", bytes));
  if (comm.communicator != nullptr) return comm.communicator->AllGather(mine, bytes, all);
  if (bytes > 0) std::memmove(all, mine, bytes);
  return absl::OkStatus();
}

}  // namespace

// Closes the communicator and its groups. Strategies hold groups that share its connections. The
// other ranks learn that this one has finished only when all are gone.
void Comm::Finish() {
  const Use use(context.get());
  finished = true;
  for (const std::weak_ptr<Attention>& made : attentions) {
    const std::shared_ptr<Attention> attention = made.lock();
    if (attention != nullptr) Destroy(context, &attention->attention);
  }
  attentions.clear();
  Destroy(context, &ranks);
  Destroy(context, &communicator);
}

}  // namespace c
}  // namespace burst

using burst::c::Guard;
using burst::c::Use;

extern "C" {

burst_code burst_unique_id_create(const char* address, burst_unique_id* id) {
  return Guard([&] { return burst::c::MakeId(address, id); });
}

burst_code burst_comm_create(burst_context* context, const burst_unique_id* id, int32_t rank,
                             int32_t size, double timeout_s, burst_comm** comm) {
  return Guard([&]() -> absl::Status {
    BURST_ASSIGN_OR_RETURN(auto made,
                           burst::c::MakeComm(context->value, id, rank, size, timeout_s));
    *comm = new burst_comm{std::move(made)};
    return absl::OkStatus();
  });
}

void burst_comm_destroy(burst_comm* comm) {
  (void)Guard([&] {
    delete comm;
    return absl::OkStatus();
  });
}

burst_code burst_comm_finish(burst_comm* comm) {
  return Guard([&] {
    comm->value->Finish();
    return absl::OkStatus();
  });
}

burst_code burst_comm_abort(burst_comm* comm, const char* reason) {
  return Guard([&] {
    if (comm->value->communicator != nullptr) {
      comm->value->communicator->Abort(absl::CancelledError(reason));
    }
    return absl::OkStatus();
  });
}

burst_code burst_comm_all_gather(burst_comm* comm, const void* mine, int64_t bytes, void* all) {
  return Guard([&] {
    const Use use(comm->value->context.get());
    return burst::c::AllGather(*comm->value, static_cast<const char*>(mine), bytes,
                               static_cast<char*>(all));
  });
}

}  // extern "C"
