// AdamW (Loshchilov and Hutter, arXiv 1711.05101) over a flat buffer of parameters, on a CPU or,
// queued on the calling thread's stream and never waited for, on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/tensor/tensor.h"
#include "model/parameters.h"
#include "train/optimizer/muon.h"
#include "train/optimizer/muon_matrices.h"

namespace burst {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

// A range of the flat buffer that weight decay applies to.
struct DecayRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The prefix of averaged weights in a checkpoint.
inline constexpr char kAveragePrefix[] = "ema.";

// How an update reaches a state in the host's memory. All numbers count elements.
struct StreamedState {
  int64_t piece = 0;     // on the device at a time, a multiple of 64; 0: the state is on the device
  int64_t resident = 0;  // stay on the device from one update to the next
};

class StateStream;  // train/optimizer/state_stream.h

class AdamW {
 public:
  // For a buffer of `numel` elements of float32 or float64; `decay` is increasing and disjoint.
  // State starts at 0. `muon` updates its matrices instead of AdamW; null: AdamW updates
  // everything. The matrices are disjoint, each rank's piece lies in one part, and weight decay
  // applies to them. Their momentum is in first_moment(), and they have no second moment.
  //
  // With a streamed.piece the moments are in the host's memory, page-locked, and so are the masters
  // of parts that have `compute` (both Tensor::ZerosOnHost). An update streams them through the
  // device, and makes the same bits. Read them only after WriteBack, when the device has done all
  // queued work (SynchronizeDevice). Write them only before the first update.
  AdamW(const AdamWOptions& options, int64_t numel, DType dtype, std::vector<DecayRange> decay,
        DeviceType device = DeviceType::kCpu, const StreamedState& streamed = {},
        std::unique_ptr<Muon> muon = nullptr);
  ~AdamW();

  // Keeps an average of the weights p from here on: after an update it becomes
  // decay average + (1 - decay) p, and p after the first one. Not with streamed state.
  void KeepAverage(double decay);

  // The arrays that are updated, in consecutive parts of the state.
  struct Part {
    Tensor masters;  // [n]
    Tensor compute;  // [n] bfloat16, or null
    Tensor grads;    // [n]
  };
  // One update, number updates() + 1, of the parts' masters from their gradients times min(1, clip
  // / norm) (clip 0: times 1); `compute`, unless null, becomes the masters, rounded. Every element
  // is updated in the same way, whatever the parts. loss_and_norm: [2] float64, on the same device:
  // unless both are finite, nothing changes, and no update is counted. Collective in the ranks of
  // Muon, whose errors it returns.
  absl::Status Step(absl::Span<const Part> parts, const Tensor& loss_and_norm, double clip,
                    double lr);
  absl::Status Step(const Tensor& masters, const Tensor& compute, const Tensor& grads,
                    const Tensor& loss_and_norm, double clip, double lr);

  // Queues copies to the host's memory of what stays on the device. Without streamed.resident it
  // does nothing.
  void WriteBack() const;
  int64_t resident_bytes() const;  // memory of the device for StreamedState::resident

  // The state: what a checkpoint holds.
  const Tensor& first_moment() const { return m_; }  // [numel]
  // [numel], less the elements of Muon's matrices
  const Tensor& second_moment() const { return v_; }
  const Tensor& average() const { return average_; }  // [numel], or null
  // A tensor of the state, with the prefix of the parameters' names in a checkpoint.
  struct StateTensor {
    const char* prefix;
    Tensor flat;           // [numel], less the elements of left_out's matrices
    const Muon* left_out;  // null: `flat` has all elements

    bool Has(const Parameter& parameter) const {
      return left_out == nullptr || !UpdatedByMuon(parameter);
    }
    // Returns the elements [at, at + length) of the state, which `flat` has.
    Tensor Slice(int64_t at, int64_t length) const;
  };
  std::vector<StateTensor> state() const;
  int64_t updates() const;  // waits for the device
  void set_updates(int64_t updates) { updates_.Fill(static_cast<double>(updates)); }

 private:
  void CheckParts(absl::Span<const Part> parts) const;
  std::vector<cuda::AdamWPart> WithState(absl::Span<const Part> parts) const;

  const AdamWOptions options_;
  const std::vector<DecayRange> decay_;
  const std::unique_ptr<Muon> muon_;  // null: AdamW updates everything
  double average_decay_ = 0;
  Tensor average_;  // null: none is kept
  const DeviceType device_;
  Tensor m_, v_;
  Tensor updates_;       // [1] float64, exact to 2^53: the host does not know which steps made one
  Tensor decay_bounds_;  // of a GPU: begin, end, begin, end... likewise
  const int64_t piece_;  // StreamedState::piece
  std::unique_ptr<StateStream> stream_;  // null: everything is on the device
};

// Sets norm, [1] float64 on the tensor's device, to its Euclidean norm. It is summed in double,
// with the same bits for any number of threads and in every run. On a GPU it is queued and not
// waited for.
void L2Norm(const Tensor& tensor, const Tensor& norm);

}  // namespace burst
