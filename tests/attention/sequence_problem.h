// Functions that the tests of attention over ranks share: global inputs, results put together from
// the ranks' parts, and masks. Each rank takes its part of the inputs. Naive attention in double
// precision computes the undivided sequence.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "burst/attention/attention_call.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/device.h"
#include "burst/sequence/token_shard.h"
#include "tests/mask/mask_definition.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {

inline constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped,
                                      Layout::kBalanced};

// Returns the rows `positions` of a global [batch, seqlen, ...] tensor. PutRows does the reverse.
inline Tensor TakeRows(const Tensor& global, const std::vector<int32_t>& positions) {
  Shape shape = global.shape();
  shape[1] = static_cast<int64_t>(positions.size());
  const Tensor local = Tensor::Empty(shape, global.dtype());
  for (size_t i = 0; i < positions.size(); ++i) {
    local.Slice(1, i, 1).CopyFrom(global.Slice(1, positions[i], 1));
  }
  return local.To(kTestDevice);
}

inline void PutRows(const Tensor& on_device, const std::vector<int32_t>& positions,
                    const Tensor& global) {
  const Tensor local = on_device.To(DeviceType::kCpu);
  for (size_t i = 0; i < positions.size(); ++i) {
    global.Slice(1, positions[i], 1).CopyFrom(local.Slice(1, i, 1));
  }
}

// TakeRows for tensors of shape [batch, heads, seqlen].
inline Tensor TakeColumns(const Tensor& global, const std::vector<int32_t>& positions) {
  Shape shape = global.shape();
  shape[2] = static_cast<int64_t>(positions.size());
  const Tensor local = Tensor::Empty(shape, global.dtype());
  for (size_t i = 0; i < positions.size(); ++i) {
    local.Slice(2, i, 1).CopyFrom(global.Slice(2, positions[i], 1));
  }
  return local.To(kTestDevice);
}

inline void PutColumns(const Tensor& on_device, const std::vector<int32_t>& positions,
                       const Tensor& global) {
  const Tensor local = on_device.To(DeviceType::kCpu);
  for (size_t i = 0; i < positions.size(); ++i) {
    global.Slice(2, positions[i], 1).CopyFrom(local.Slice(2, i, 1));
  }
}

// Runs ranks as threads. On GPUs they share all GPUs of the machine.
inline absl::Status RunTestRanks(int world_size,
                                 const std::function<absl::Status(Communicator&)>& body) {
  return RunRanks(world_size, [&](Communicator& comm) -> absl::Status {
    if (kTestDevice == DeviceType::kCpu) return body(comm);
    const ScopedCudaDevice device(comm.rank() % CudaDeviceCount(), comm.rank());
    return body(comm);
  });
}

// Inputs on the host. Ranks take their part to the device and bring back their results.
struct Inputs {
  Tensor q, k, v, dout, dlse;
};

inline Inputs RandomInputs(int64_t batch, int64_t seqlen, int64_t heads, int64_t kv_heads,
                           const HeadWidths& widths, DType dtype, uint64_t seed) {
  const auto random = [&](const Shape& shape, uint64_t stream, double scale) {
    return RandomNormal(shape, dtype, seed, stream, scale);
  };
  return {random({batch, seqlen, heads, widths.head_dim}, 0, 1.5),
          random({batch, seqlen, kv_heads, widths.head_dim}, 1, 1.5),
          random({batch, seqlen, kv_heads, widths.value_dim}, 2, 1),
          random({batch, seqlen, heads, widths.value_dim}, 3, 1),
          random({batch, heads, seqlen}, 4, 1)};
}

// Returns results of NaN, in which the ranks put their parts.
inline AttentionResults EmptyResults(const Inputs& inputs) {
  const AttentionResults results = {Tensor::EmptyLike(inputs.dout), Tensor::EmptyLike(inputs.dlse),
                                    Tensor::EmptyLike(inputs.q), Tensor::EmptyLike(inputs.k),
                                    Tensor::EmptyLike(inputs.v)};
  for (const Tensor& tensor : {results.out, results.lse, results.dq, results.dk, results.dv}) {
    tensor.Fill(std::nan(""));
  }
  return results;
}

// Computes forward and backward of one rank, which writes its part of the results in their dtype.
inline absl::Status AttendOnRank(SequenceParallelAttention& attention,
                                 const AttentionSchedule& schedule, const Inputs& inputs,
                                 const AttentionResults& results) {
  const std::vector<int32_t>& positions = schedule.shard().local_positions();
  const auto put = [&](const Tensor& own, const Tensor& all) {
    PutRows(own.To(all.dtype()), positions, all);
  };
  const AttentionCall call = {&schedule, TakeRows(inputs.q, positions),
                              TakeRows(inputs.k, positions), TakeRows(inputs.v, positions)};
  AttentionResult result;
  BURST_RETURN_IF_ERROR(attention.Forward(call, &result));
  AttentionGradients gradients = {
      TakeRows(inputs.dout, positions),
      TakeColumns(inputs.dlse, positions).To(SumDType(inputs.q.dtype()))};
  BURST_RETURN_IF_ERROR(attention.Backward(call, result, &gradients));
  put(result.out, results.out);
  PutColumns(result.lse, positions, results.lse);
  put(gradients.dq, results.dq);
  put(gradients.dk, results.dk);
  put(gradients.dv, results.dv);
  return absl::OkStatus();
}

inline AttentionResults Reference(const Inputs& inputs, const IntervalMask& mask,
                                  double softmax_scale) {
  return NaiveAttention(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, softmax_scale,
                        [&](int64_t b, int64_t i, int64_t j) { return Visible(mask, b, i, j); });
}

// Returns documents of mixed lengths, some of one token, some over rank boundaries.
inline DocumentStarts MixedDocuments(int64_t seqlen) {
  std::vector<int32_t> starts;
  for (int64_t start = 0, i = 0; start < seqlen; ++i) {
    starts.push_back(static_cast<int32_t>(start));
    start += 1 + Philox(11, 0, i)[0] % (1 + seqlen / 4);
  }
  return {starts};
}

struct NamedMask {
  const char* name;
  bool causal;
  int64_t window;
  bool packed;

  IntervalMask Of(int64_t seqlen) const {
    return {causal, window, packed ? MixedDocuments(seqlen) : DocumentStarts()};
  }
};

inline constexpr NamedMask kMasks[] = {{"full", false, 0, false},
                                       {"causal", true, 0, false},
                                       {"window", true, 100, false},
                                       {"packed", true, 0, true}};

}  // namespace burst
