#include "burst/comm/mpi/mpi_communicator.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "burst/base/check.h"
#include "burst/base/print_error.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/comm/message_time.h"

namespace burst {
namespace {

// MPI counts in int, so longer messages travel in pieces.
constexpr int64_t kMaxMessageBytes = 1 << 30;

absl::Status MpiError(const std::string& who, const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return absl::UnavailableError(
      absl::StrCat(who, ": ", call, ": ", absl::string_view(text, length)));
}

class MpiCommunicator : public Communicator {
 public:
  // Takes over the communicator.
  explicit MpiCommunicator(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &world_size_);
    MPI_Group world, group;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Comm_group(comm_, &group);
    std::vector<int> ranks(world_size_);
    std::iota(ranks.begin(), ranks.end(), 0);
    world_ranks_.resize(world_size_);
    MPI_Group_translate_ranks(group, world_size_, ranks.data(), world, world_ranks_.data());
    MPI_Group_free(&group);
    MPI_Group_free(&world);
  }

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized) MPI_Comm_free(&comm_);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  int WorldRank(int rank) const override { return world_ranks_[rank]; }

  absl::Status Wait(Channel channel) override;
  void Abort(const absl::Status& reason) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override;

 private:
  struct Pending {
    MPI_Request request;
    bool receives;
    int bytes, peer;
  };

  std::string Who() const { return absl::StrCat("rank ", rank_, " of ", world_size_); }
  absl::Status Check(int code, const char* call) const {
    return code == MPI_SUCCESS ? absl::OkStatus() : MpiError(Who(), call, code);
  }
  absl::Status Complete(Channel channel, Pending& pending) const;

  MPI_Comm comm_;
  int rank_ = 0, world_size_ = 0;
  std::vector<int> world_ranks_;  // world ranks of the group's ranks
  std::array<std::vector<Pending>, kNumChannels> pending_;
};

// Calls start(offset, bytes) for the pieces of a message.
template <typename Start>
absl::Status ForEachPiece(int64_t bytes, Start start) {
  for (int64_t offset = 0; offset < bytes; offset += kMaxMessageBytes) {
    BURST_RETURN_IF_ERROR(
        start(offset, static_cast<int>(std::min(kMaxMessageBytes, bytes - offset))));
  }
  return absl::OkStatus();
}

absl::Status MpiCommunicator::DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                                     absl::Span<const ReceiveBuffer> receives) {
  const int tag = static_cast<int>(channel);
  std::vector<Pending>& pending = pending_[tag];
  MPI_Request request;
  for (const ReceiveBuffer& receive : receives) {
    BURST_RETURN_IF_ERROR(ForEachPiece(receive.bytes, [&](int64_t offset, int bytes) {
      BURST_RETURN_IF_ERROR(Check(MPI_Irecv(static_cast<char*>(receive.data) + offset, bytes,
                                            MPI_BYTE, receive.peer, tag, comm_, &request),
                                  "MPI_Irecv"));
      pending.push_back({request, true, bytes, receive.peer});
      return absl::OkStatus();
    }));
  }
  for (const SendBuffer& send : sends) {
    BURST_RETURN_IF_ERROR(ForEachPiece(send.bytes, [&](int64_t offset, int bytes) {
      BURST_RETURN_IF_ERROR(Check(MPI_Isend(static_cast<const char*>(send.data) + offset, bytes,
                                            MPI_BYTE, send.peer, tag, comm_, &request),
                                  "MPI_Isend"));
      pending.push_back({request, false, bytes, send.peer});
      return absl::OkStatus();
    }));
  }
  return absl::OkStatus();
}

// Waits for the requests one by one. All of them make progress during each wait, and each gets its
// own error code. Open MPI 4.1's MPI_Waitall can spin for ever when one of several requests fails.
absl::Status MpiCommunicator::Wait(Channel channel) {
  const ScopedMessageTime timed;
  std::vector<Pending>& pending = pending_[static_cast<int>(channel)];
  absl::Status first_error;
  for (Pending& one : pending) first_error.Update(Complete(channel, one));
  pending.clear();
  return first_error;
}

absl::Status MpiCommunicator::Complete(Channel channel, Pending& pending) const {
  const ScopedWait wait(pending.receives ? "receives" : "sends", Name(channel),
                        WorldRank(pending.peer), pending.bytes);
  MPI_Status status;
  const int code = MPI_Wait(&pending.request, &status);
  if (!pending.receives) return Check(code, "MPI_Wait for a send");
  int error_class = MPI_SUCCESS, bytes = 0;
  MPI_Error_class(code, &error_class);
  const bool too_long = error_class == MPI_ERR_TRUNCATE;
  if (!too_long) {
    BURST_RETURN_IF_ERROR(Check(code, "MPI_Wait for a receive"));
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    if (bytes == pending.bytes) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(Who(), " expected ", pending.bytes,
                                                 " bytes from rank ", pending.peer, ", which sent ",
                                                 too_long ? "more" : absl::StrCat(bytes)));
}

void MpiCommunicator::Abort(const absl::Status& reason) {
  BURST_CHECK(!reason.ok()) << "Abort without a reason";
  PrintError(absl::Status(reason.code(), absl::StrCat(Who(), " gave up: ", reason.message())));
  MPI_Abort(comm_, 1);
  std::_Exit(1);  // in case MPI_Abort returns
}

absl::StatusOr<std::unique_ptr<Communicator>> MpiCommunicator::Split(int color, int key) {
  const ScopedWait wait("waits for the other ranks of a split");
  MPI_Comm comm;
  BURST_RETURN_IF_ERROR(Check(MPI_Comm_split(comm_, color < 0 ? MPI_UNDEFINED : color, key, &comm),
                              "MPI_Comm_split"));
  std::unique_ptr<Communicator> result;
  if (comm != MPI_COMM_NULL) result = std::make_unique<MpiCommunicator>(comm);
  return result;
}

// Finalizes MPI, which waits for the other processes. A failed process must not wait. mpirun sees
// its exit status and ends the others, which may be waiting for it.
void FinalizeAtExit(int exit_status, void*) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized && exit_status == 0) MPI_Finalize();
}

absl::Status Initialize() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized) return absl::OkStatus();
  int provided = MPI_THREAD_SINGLE;
  const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  if (code != MPI_SUCCESS) return MpiError("this process", "MPI_Init_thread", code);
  on_exit(FinalizeAtExit, nullptr);
  if (provided < MPI_THREAD_FUNNELED) {
    return absl::FailedPreconditionError("this MPI cannot be used in a program with threads");
  }
  return absl::OkStatus();
}

// Refuses a launcher of another MPI. It starts processes that do not find each other: N worlds of
// one rank.
absl::Status CheckLauncher(int world_size) {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const char* value = std::getenv(variable);
    int launched = 0;
    if (value == nullptr || !absl::SimpleAtoi(value, &launched) || launched == world_size) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "launched as one of ", launched, " processes (", variable, "), but MPI connects ",
        world_size, ": use the mpirun of the Open MPI that this program is linked with"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator() {
  BURST_RETURN_IF_ERROR(Initialize());
  MPI_Comm comm;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  const int code = MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  if (code != MPI_SUCCESS) return MpiError("this process", "MPI_Comm_dup", code);
  auto communicator = std::make_unique<MpiCommunicator>(comm);
  BURST_RETURN_IF_ERROR(CheckLauncher(communicator->world_size()));
  return communicator;
}

}  // namespace burst
