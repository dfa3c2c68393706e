// NCCL communicators of the ranks of this process. They carry reductions between GPUs, and messages
// between GPUs that nothing faster carries. For gpu_communicator.cc.
#pragma once

#include <nccl.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "burst/comm/gpu/failure.h"

namespace burst {

class NcclLink;

// All NcclLinks of this process, so that a failure can end them together. Thread-safe.
class NcclLinks {
 public:
  explicit NcclLinks(const FailureState* failure) : failure_(failure) {}

  // The first error that NCCL met in the background.
  absl::Status AsyncError() const;
  // Ends all work of the links, on the GPU too, so that threads stop waiting for their streams.
  // Call it after the failure is set.
  void Abort();

 private:
  friend class NcclLink;

  const FailureState* const failure_;
  mutable std::mutex mutex_;  // taken before a link's
  std::set<NcclLink*> links_;
};

// What the ranks of a link agree on.
struct NcclLinkPlan {
  ncclUniqueId id;
  int channels;  // thread blocks that carry its messages together; 0: as many as NCCL chooses
};

// One ncclComm_t of at least two ranks. One thread uses it, another one watches it.
class NcclLink {
 public:
  // One link for each plan, made at the same time. Collective. `links` must outlive them.
  static absl::StatusOr<std::vector<std::unique_ptr<NcclLink>>> Create(
      NcclLinks* links, int world_size, absl::Span<const NcclLinkPlan> plans, int rank);
  // Work queued on it must be done, unless there was a failure.
  ~NcclLink();

  // Runs function(ncclComm_t) -> ncclResult_t inside one NCCL group.
  template <typename Function>
  absl::Status Group(const char* what, Function&& function) {
    if (links_->failure_->failed()) return links_->failure_->failure();
    std::lock_guard<std::timed_mutex> lock(mutex_);
    if (comm_ == nullptr) return links_->failure_->failure();
    ncclResult_t result = ncclGroupStart();
    if (result == ncclSuccess) {
      result = function(comm_);
      const ncclResult_t end = ncclGroupEnd();
      if (result == ncclSuccess) result = end;
    }
    return result == ncclSuccess ? absl::OkStatus() : Error(what, result);
  }

 private:
  friend class NcclLinks;

  NcclLink(NcclLinks* links, ncclComm_t comm);
  // The lock is held, or no other thread knows the link yet.
  absl::Status Error(const char* what, ncclResult_t result) const;

  NcclLinks* const links_;
  const std::string who_;
  std::timed_mutex mutex_;  // guards comm_
  ncclComm_t comm_;         // null once aborted
};

// Unavailable: the rank and GPU of the calling thread, `what`, and NCCL's error message.
absl::Status NcclError(const char* what, ncclResult_t result);

}  // namespace burst
