#include "burst/device/profiler.h"

#ifdef BURST_WITH_CUDA
#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>

#include <mutex>
#include <string>
#include <vector>

#include "burst/base/progress.h"
#endif

namespace burst {

#ifdef BURST_WITH_CUDA
namespace {

// The ranks of the process share its profiler.
std::mutex mutex;
int ranges = 0;

class NvtxRanges : public ProfiledRange, public ProgressListener {
 public:
  explicit NvtxRanges(RankProgress* rank) : rank_(rank) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (ranges++ == 0) cudaProfilerStart();
    }
    if (rank_ == nullptr) return;
    rank_->set_listener(this);
    Reached(rank_->place());
  }

  ~NvtxRanges() override {
    if (rank_ != nullptr) rank_->set_listener(nullptr);
    Leave(0);
    std::lock_guard<std::mutex> lock(mutex);
    if (--ranges == 0) cudaProfilerStop();
  }

  // Leaves the open ranges that do not hold the place, and enters those that do.
  void Reached(const ProgressPlace& place) override {
    std::vector<std::string> path;
    if (place.step >= 0) path.push_back("step " + std::to_string(place.step));
    path.push_back(place.phase);
    if (place.layer >= 0) path.push_back("layer " + std::to_string(place.layer));
    if (place.op != nullptr) path.push_back(place.op);
    size_t same = 0;
    while (same < open_.size() && same < path.size() && open_[same] == path[same]) ++same;
    // If the op runs again, it gets another range.
    if (same == path.size() && same == open_.size() && same > 0) --same;
    Leave(same);
    for (size_t i = same; i < path.size(); ++i) nvtxRangePushA(path[i].c_str());
    open_ = std::move(path);
  }

 private:
  void Leave(size_t depth) {
    for (; open_.size() > depth; open_.pop_back()) nvtxRangePop();
  }

  RankProgress* const rank_;
  std::vector<std::string> open_;
};

}  // namespace
#endif

std::unique_ptr<ProfiledRange> Profile(DeviceType device) {
  if (device == DeviceType::kCpu) return nullptr;
#ifdef BURST_WITH_CUDA
  return std::make_unique<NvtxRanges>(current_progress);
#else
  return nullptr;  // there is no such device
#endif
}

}  // namespace burst
