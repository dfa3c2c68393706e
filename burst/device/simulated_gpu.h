// A simulated GPU. Code on a thread that is bound to one does everything as on a real GPU: it
// allocates, launches kernels, exchanges messages. But memory is only counted, a kernel computes
// nothing, and a clock says when each would end. So //train:plan finds the memory and the time of a
// training step without a GPU, and without a second description of the step.
//
// In every build, with CUDA or without.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "burst/device/memory.h"

namespace burst {

// The speeds and sizes of a GPU. Rates are measured on large kernels, not the peaks of a data
// sheet.
struct GpuModel {
  std::string name;      // "H200"
  double memory = 0;     // bytes that a program can allocate
  double bandwidth = 0;  // bytes/s, read and written together
  double fp8 = 0;        // FLOP/s of matrix products, by the dtype of their operands
  double bf16 = 0;
  double tf32 = 0;
  double fp32 = 0;
  double attention_forward = 0;  // FLOP/s in bf16, of the pairs of query and key that are visible
  double attention_backward = 0;
  double links = 0;      // bytes/s to other GPUs of its node, and as many from them
  double network = 0;    // bytes/s to other nodes, likewise
  double host_link = 0;  // bytes/s to the host's page-locked memory, or from it
  double host_memory = std::numeric_limits<double>::infinity();  // bytes of it, for this GPU
  double kernel_seconds = 0;                                     // of the shortest kernel
  double message_seconds = 0;                                    // of the shortest message
};

// The clock of a simulated GPU, in seconds from 0.
class SimulatedClock {
 public:
  virtual ~SimulatedClock() = default;
  virtual double Now() = 0;
  virtual void Advance(double seconds) = 0;
  virtual void WaitUntil(double time) = 0;
};

// The simulated GPU of one rank. Its clock starts at 0 and advances with the work of the rank's
// thread. Memory may be freed from any thread; everything else belongs to the rank's thread.
class SimulatedGpu : public MemorySource {
 public:
  // `clock`: a clock that other GPUs move, too; it must outlive the GPU. Null: one of its own.
  explicit SimulatedGpu(const GpuModel& model, SimulatedClock* clock = nullptr);
  ~SimulatedGpu() override;
  SimulatedGpu(const SimulatedGpu&) = delete;
  SimulatedGpu& operator=(const SimulatedGpu&) = delete;

  // Returns the calling thread's simulated GPU, or null.
  static SimulatedGpu* Current();

  const GpuModel& model() const { return model_; }

  // --- Time, in seconds.
  double now() const { return clock_->Now(); }
  // Simulates a kernel that moves `bytes` of memory and computes for `seconds`.
  void RunKernel(double bytes, double seconds);
  void WaitUntil(double time);
  // Returns the time of kernels by the place of the rank that launched them ("forward, attention";
  // burst/base/progress.h).
  std::map<std::string, double> KernelSeconds() const;

  // --- Memory. The host can write and read allocations of at most kBackedBytes (masks, tokens);
  // their content is undefined at first. Larger allocations have addresses only.
  static constexpr size_t kBackedBytes = size_t{64} << 20;
  static bool IsBacked(const void* data);
  // Keeps what kernels need to know of an array that nobody writes, by its address, until the next
  // note or until it is freed.
  void SetNote(const void* data, int64_t note);
  std::optional<int64_t> Note(const void* data) const;
  void* Allocate(size_t bytes) override;
  void Free(void* data) override;
  MemoryStats memory() const;
  int64_t largest_allocation() const;  // since the last ResetPeak
  void ResetPeak();
  // Returns the bytes that were allocated at the peak, by the place that allocated them.
  std::map<std::string, int64_t> AtPeak() const;

 private:
  using Place = std::pair<const char*, const char*>;  // phase and op
  struct Block {
    int64_t bytes;
    Place place;
  };

  const GpuModel model_;
  std::unique_ptr<SimulatedClock> own_clock_;
  SimulatedClock* const clock_;
  std::map<Place, double> kernel_seconds_;
  mutable std::mutex mutex_;
  uintptr_t next_address_;  // for allocations without memory
  std::unordered_map<void*, Block> blocks_;
  std::unordered_map<size_t, std::vector<void*>> free_pages_;  // backed, by bytes
  std::unordered_map<const void*, int64_t> notes_;
  std::map<Place, int64_t> by_place_, at_peak_;
  int64_t largest_allocation_ = 0;
  bool is_peak_ = false;  // nothing was freed since the peak; at_peak_ is older
  MemoryStats stats_;
};

// Binds the calling thread to a simulated GPU for as long as the object lives. Everything that the
// thread made on it must be destroyed before.
class ScopedSimulatedGpu {
 public:
  explicit ScopedSimulatedGpu(SimulatedGpu* gpu);
  ~ScopedSimulatedGpu();
  ScopedSimulatedGpu(const ScopedSimulatedGpu&) = delete;
  ScopedSimulatedGpu& operator=(const ScopedSimulatedGpu&) = delete;

 private:
  SimulatedGpu* const outer_;
  ScopedMemorySource memory_;
};

}  // namespace burst
