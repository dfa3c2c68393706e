#include "burst/device/simulated_gpu.h"

#include <sys/mman.h>

#include <algorithm>

#include "burst/base/check.h"
#include "burst/base/host_memory.h"
#include "burst/base/progress.h"

namespace burst {
namespace {

// No program has memory at these addresses, so a read or write there ends the program.
constexpr uintptr_t kNowhere = uintptr_t{1} << 62;
constexpr int64_t kGranule = 512;  // CUDA rounds allocations up to multiples of this

thread_local SimulatedGpu* current = nullptr;

using Place = std::pair<const char*, const char*>;  // phase and op

Place Here() {
  const RankProgress* const progress = current_progress;
  if (progress == nullptr) return {"start", nullptr};
  return {progress->place().phase, progress->place().op};
}

// Returns pages that take the host's memory only once they are written.
void* TakePages(size_t bytes) {
  void* const pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) {
    OutOfMemory(("out of memory: no addresses for " + std::to_string(bytes) + " bytes").c_str());
  }
  return pages;
}

std::string Describe(const Place& place) {
  const auto [phase, op] = place;
  return op == nullptr ? phase : std::string(phase) + ", " + op;
}

// The clock of a GPU that waits for no other.
class ClockAlone : public SimulatedClock {
 public:
  double Now() override { return now_; }
  void Advance(double seconds) override { now_ += seconds; }
  void WaitUntil(double time) override { now_ = std::max(now_, time); }

 private:
  double now_ = 0;
};

}  // namespace

SimulatedGpu::SimulatedGpu(const GpuModel& model, SimulatedClock* clock)
    : model_(model),
      own_clock_(clock == nullptr ? std::make_unique<ClockAlone>() : nullptr),
      clock_(clock == nullptr ? own_clock_.get() : clock),
      next_address_(kNowhere) {}

SimulatedGpu::~SimulatedGpu() {
  for (const auto& [data, block] : blocks_) {
    if (IsBacked(data)) munmap(data, block.bytes);
  }
  for (const auto& [bytes, pages] : free_pages_) {
    for (void* const data : pages) munmap(data, bytes);
  }
}

SimulatedGpu* SimulatedGpu::Current() { return current; }

void SimulatedGpu::RunKernel(double bytes, double seconds) {
  const double time = model_.kernel_seconds + std::max(bytes / model_.bandwidth, seconds);
  clock_->Advance(time);
  kernel_seconds_[Here()] += time;
}

void SimulatedGpu::WaitUntil(double time) { clock_->WaitUntil(time); }

bool SimulatedGpu::IsBacked(const void* data) {
  return reinterpret_cast<uintptr_t>(data) < kNowhere;
}

void* SimulatedGpu::Allocate(size_t bytes) {
  const size_t size = (bytes + kGranule - 1) / kGranule * kGranule;
  const Place place = Here();
  std::lock_guard<std::mutex> lock(mutex_);
  void* data = nullptr;
  if (size <= kBackedBytes) {
    std::vector<void*>& pages = free_pages_[size];
    if (pages.empty()) {
      data = TakePages(size);
    } else {
      data = pages.back();
      pages.pop_back();
    }
  } else {
    data = reinterpret_cast<void*>(next_address_);
    next_address_ += size;
  }
  blocks_[data] = {static_cast<int64_t>(size), place};
  by_place_[place] += static_cast<int64_t>(size);
  largest_allocation_ = std::max(largest_allocation_, static_cast<int64_t>(size));
  stats_.bytes_in_use += static_cast<int64_t>(size);
  stats_.bytes_reserved = std::max(stats_.bytes_reserved, stats_.bytes_in_use);
  if (stats_.bytes_in_use > stats_.peak_bytes) {
    stats_.peak_bytes = stats_.bytes_in_use;
    is_peak_ = true;
  }
  return data;
}

void SimulatedGpu::Free(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = blocks_.find(data);
  BURST_CHECK(block != blocks_.end()) << "freed twice, or another GPU's";
  if (is_peak_) at_peak_ = by_place_;
  is_peak_ = false;
  stats_.bytes_in_use -= block->second.bytes;
  by_place_[block->second.place] -= block->second.bytes;
  if (IsBacked(data)) free_pages_[block->second.bytes].push_back(data);
  blocks_.erase(block);
  notes_.erase(data);
}

void SimulatedGpu::SetNote(const void* data, int64_t note) {
  std::lock_guard<std::mutex> lock(mutex_);
  notes_[data] = note;
}

std::optional<int64_t> SimulatedGpu::Note(const void* data) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto note = notes_.find(data);
  if (note == notes_.end()) return std::nullopt;
  return note->second;
}

MemoryStats SimulatedGpu::memory() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

int64_t SimulatedGpu::largest_allocation() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return largest_allocation_;
}

void SimulatedGpu::ResetPeak() {
  std::lock_guard<std::mutex> lock(mutex_);
  largest_allocation_ = 0;
  stats_.peak_bytes = stats_.bytes_in_use;
  is_peak_ = true;
}

std::map<std::string, int64_t> SimulatedGpu::AtPeak() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, int64_t> result;
  for (const auto& [place, bytes] : is_peak_ ? by_place_ : at_peak_) {
    if (bytes > 0) result[Describe(place)] += bytes;
  }
  return result;
}

std::map<std::string, double> SimulatedGpu::KernelSeconds() const {
  std::map<std::string, double> result;
  for (const auto& [place, seconds] : kernel_seconds_) result[Describe(place)] += seconds;
  return result;
}

ScopedSimulatedGpu::ScopedSimulatedGpu(SimulatedGpu* gpu)
    : outer_(current), memory_(gpu, DeviceType::kCuda) {
  current = gpu;
}

ScopedSimulatedGpu::~ScopedSimulatedGpu() { current = outer_; }

}  // namespace burst
