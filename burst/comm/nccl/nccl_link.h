// One NCCL communicator, and all those of a process together, so that they can be given up
// together. For nccl_communicator.cc.
#pragma once

#include <nccl.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace burst {

class NcclLink;
class PeerExchange;

// What the ranks of this process share: the links they made and the failure that ended their work.
// Thread-safe.
class NcclWorld {
 public:
  // `threads`: all ranks are in this process.
  explicit NcclWorld(bool threads) : threads_(threads) {}

  // The exchange that the ranks of a communicator share, known by the id of its first link; null
  // unless all ranks are threads.
  std::shared_ptr<PeerExchange> Exchange(const ncclUniqueId& id);

  // The first failure is what every later call of a link returns.
  void Fail(const absl::Status& failure);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status failure() const;

  // The first error that NCCL has met in the background.
  absl::Status AsyncError() const;
  // Ends whatever the links are doing, on the GPU too: threads that wait for their streams go on.
  // After Fail.
  void AbortLinks();

 private:
  friend class NcclLink;

  mutable std::mutex failure_mutex_;
  absl::Status failure_;
  std::atomic<bool> failed_{false};

  mutable std::mutex links_mutex_;  // taken before a link's
  std::set<NcclLink*> links_;

  const bool threads_;
  std::mutex exchanges_mutex_;
  std::map<std::string, std::weak_ptr<PeerExchange>> exchanges_;
};

// An ncclComm_t of at least two ranks, used by one thread and watched by another.
class NcclLink {
 public:
  // One link for each id, made at the same time. Collective. `world` must outlive the links.
  static absl::StatusOr<std::vector<std::unique_ptr<NcclLink>>> Create(
      NcclWorld* world, int world_size, absl::Span<const ncclUniqueId> ids, int rank);
  // What was queued on it must be done, unless the world has failed.
  ~NcclLink();

  // Runs function(ncclComm_t) -> ncclResult_t inside one group.
  template <typename Function>
  absl::Status Group(const char* what, Function&& function) {
    if (world_->failed()) return world_->failure();
    std::lock_guard<std::timed_mutex> lock(mutex_);
    if (comm_ == nullptr) return world_->failure();
    ncclResult_t result = ncclGroupStart();
    if (result == ncclSuccess) {
      result = function(comm_);
      const ncclResult_t end = ncclGroupEnd();
      if (result == ncclSuccess) result = end;
    }
    return result == ncclSuccess ? absl::OkStatus() : Error(what, result);
  }

 private:
  friend class NcclWorld;

  NcclLink(NcclWorld* world, ncclComm_t comm);
  // The lock is held, or no other thread knows the link yet.
  absl::Status Error(const char* what, ncclResult_t result) const;

  NcclWorld* const world_;
  const std::string who_;
  std::timed_mutex mutex_;  // guards comm_
  ncclComm_t comm_;         // null once aborted
};

// Unavailable: the rank and GPU of the calling thread, `what`, and NCCL's own words.
absl::Status NcclError(const char* what, ncclResult_t result);

}  // namespace burst
