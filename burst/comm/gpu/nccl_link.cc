#include "burst/comm/gpu/nccl_link.h"

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/device/cuda.h"

namespace burst {
namespace {

// A call of NCCL that holds a link longer is waiting for a rank that will not come.
constexpr std::chrono::seconds kPatience{2};

std::string WhoAmI() {
  const cuda::Context& context = cuda::CurrentContext();
  return absl::StrCat("rank ", context.rank, ", cuda:", context.device);
}

absl::Status MakeError(const std::string& who, const char* what, ncclResult_t result,
                       ncclComm_t comm) {
  const char* details = ncclGetLastError(comm);
  if (details == nullptr) details = "";
  return absl::UnavailableError(absl::StrCat(who, ": ", what, ": ", ncclGetErrorString(result),
                                             *details == '\0' ? "" : ": ", details));
}

}  // namespace

absl::Status NcclError(const char* what, ncclResult_t result) {
  return MakeError(WhoAmI(), what, result, nullptr);
}

absl::Status NcclLinks::AsyncError() const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (NcclLink* link : links_) {
    std::unique_lock<std::timed_mutex> link_lock(link->mutex_, std::try_to_lock);
    if (!link_lock.owns_lock() || link->comm_ == nullptr) continue;
    ncclResult_t error = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(link->comm_, &error);
    if (result != ncclSuccess) return link->Error("ncclCommGetAsyncError", result);
    if (error != ncclSuccess && error != ncclInProgress) return link->Error("NCCL", error);
  }
  return absl::OkStatus();
}

// Aborts all links in one group, because a link's abort may wait for the link's other ranks.
void NcclLinks::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::unique_lock<std::timed_mutex>> locks;
  if (ncclGroupStart() != ncclSuccess) return;
  for (NcclLink* link : links_) {
    std::unique_lock<std::timed_mutex> link_lock(link->mutex_, kPatience);
    if (!link_lock.owns_lock() || link->comm_ == nullptr) continue;
    (void)ncclCommAbort(std::exchange(link->comm_, nullptr));
    locks.push_back(std::move(link_lock));
  }
  (void)ncclGroupEnd();
}

absl::StatusOr<std::vector<std::unique_ptr<NcclLink>>> NcclLink::Create(
    NcclLinks* registry, int world_size, absl::Span<const NcclLinkPlan> plans, int rank) {
  std::vector<ncclComm_t> comms(plans.size());
  ncclResult_t result = ncclGroupStart();
  for (size_t i = 0; i < plans.size() && result == ncclSuccess; ++i) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (plans[i].channels > 0) config.minCTAs = config.maxCTAs = plans[i].channels;
    result = ncclCommInitRankConfig(&comms[i], world_size, plans[i].id, rank, &config);
  }
  const ncclResult_t end = ncclGroupEnd();
  if (result == ncclSuccess) result = end;
  if (result != ncclSuccess) return NcclError("ncclCommInitRankConfig", result);
  std::vector<std::unique_ptr<NcclLink>> links;
  for (ncclComm_t comm : comms) links.emplace_back(new NcclLink(registry, comm));
  return links;
}

NcclLink::NcclLink(NcclLinks* links, ncclComm_t comm) : links_(links), who_(WhoAmI()), comm_(comm) {
  std::lock_guard<std::mutex> lock(links_->mutex_);
  links_->links_.insert(this);
}

NcclLink::~NcclLink() {
  {
    std::lock_guard<std::mutex> lock(links_->mutex_);
    links_->links_.erase(this);
  }
  if (comm_ == nullptr) return;
  (void)(links_->failure_->failed() ? ncclCommAbort(comm_) : ncclCommDestroy(comm_));
}

absl::Status NcclLink::Error(const char* what, ncclResult_t result) const {
  return MakeError(who_, what, result, comm_);
}

}  // namespace burst
