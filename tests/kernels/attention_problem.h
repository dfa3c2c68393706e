// Masks, inputs, and memory full of NaN, on which the attention kernels are tested.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "burst/base/philox.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/order.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// ---- Masks: the ranges that the kernels take, and their definition.

enum class MaskKind { kFull, kCausal, kWindow, kDocuments, kGap, kApart, kRandom, kBlocks };

inline std::ostream& operator<<(std::ostream& out, MaskKind kind) {
  constexpr const char* kNames[] = {"Full", "Causal", "Window", "Documents",
                                    "Gap",  "Apart",  "Random", "Blocks"};
  return out << kNames[static_cast<int>(kind)];
}

// The masks of one interval, and all masks.
inline const auto kIntervalMasks =
    testing::Values(MaskKind::kFull, MaskKind::kCausal, MaskKind::kWindow, MaskKind::kDocuments,
                    MaskKind::kGap, MaskKind::kApart, MaskKind::kRandom);
inline const auto kAllMasks =
    testing::Values(MaskKind::kFull, MaskKind::kCausal, MaskKind::kWindow, MaskKind::kDocuments,
                    MaskKind::kGap, MaskKind::kApart, MaskKind::kRandom, MaskKind::kBlocks);

// Returns the name of a test with that parameter, such as "Full".
inline std::string NameOf(const testing::TestParamInfo<MaskKind>& info) {
  std::ostringstream name;
  name << info.param;
  return name.str();
}

struct TestMask {
  std::vector<int32_t> begin, end;  // [batch or 1, q_len]; empty: full
  int64_t batch_stride = 0;
  std::function<bool(int64_t b, int64_t i, int64_t j)> visible;
  mutable Tensor on_device[2];  // begin and end, copied there by the first call of ranges()
  // Lists of blocks in place of ranges: key_begin, key_list, query_begin, query_list and place_list
  // of KeyBlocks.
  std::vector<int32_t> lists[5];
  int64_t list_strides[2] = {0, 0};
  mutable Tensor lists_on_device[5];

  // Returns the ranges, which are valid as long as this object.
  KeyRanges ranges() const {
    if (begin.empty()) return {};
    if (on_device[0].null()) {
      const int64_t size = static_cast<int64_t>(begin.size());
      on_device[0] = Tensor::FromVector(begin, {size}, kTestDevice);
      on_device[1] = Tensor::FromVector(end, {size}, kTestDevice);
    }
    return {static_cast<const int32_t*>(on_device[0].raw_data()),
            static_cast<const int32_t*>(on_device[1].raw_data()), batch_stride};
  }
  // Returns the blocks of the mask, for kernels that take lists.
  KeyBlocks blocks() const {
    if (lists[0].empty()) return {};
    const int32_t* data[5];
    for (int n = 0; n < 5; ++n) {
      if (lists_on_device[n].null()) {
        const int64_t size = static_cast<int64_t>(lists[n].size());
        lists_on_device[n] = Tensor::FromVector(lists[n], {size}, kTestDevice);
      }
      data[n] = static_cast<const int32_t*>(lists_on_device[n].raw_data());
    }
    return {data[0], data[1], data[2], data[3], data[4], list_strides[0], list_strides[1]};
  }

  // Sets which blocks of queries see which blocks of keys, of kListBlock tokens. rows is 1 or
  // batch.
  void SetBlocks(int64_t rows, int64_t q_len, int64_t k_len,
                 const std::function<bool(int64_t b, int64_t i, int64_t j)>& shown) {
    const auto blocks = [](int64_t n) { return (n + kListBlock - 1) / kListBlock; };
    auto& [key_begin, key_list, query_begin, query_list, place_list] = lists;
    if (rows > 1) list_strides[0] = blocks(q_len) + 1, list_strides[1] = blocks(k_len) + 1;
    const auto end = [](const std::vector<int32_t>& list) {
      return static_cast<int32_t>(list.size());
    };
    for (int64_t b = 0; b < rows; ++b) {
      key_begin.push_back(end(key_list));
      for (int64_t i = 0; i < blocks(q_len); ++i) {
        for (int64_t j = 0; j < blocks(k_len); ++j) {
          if (shown(b, i, j)) key_list.push_back(static_cast<int32_t>(j));
        }
        key_begin.push_back(end(key_list));
      }
      query_begin.push_back(end(query_list));
      for (int64_t j = 0; j < blocks(k_len); ++j) {
        for (int64_t i = 0; i < blocks(q_len); ++i) {
          if (!shown(b, i, j)) continue;
          query_list.push_back(static_cast<int32_t>(i));
          int32_t place = 0;
          for (int64_t before = 0; before < j; ++before) place += shown(b, i, before);
          place_list.push_back(place);
        }
        query_begin.push_back(end(query_list));
      }
    }
    visible = [=](int64_t b, int64_t i, int64_t j) {
      return shown(rows == 1 ? 0 : b, i / kListBlock, j / kListBlock);
    };
  }
};

inline uint32_t RandomBelow(int64_t n, uint64_t stream, uint64_t index) {
  return Philox(/*key=*/7, stream, index)[0] % static_cast<uint32_t>(n);
}

// Makes a mask. Causal masks align the last query with the last key.
inline TestMask MakeMask(MaskKind kind, int64_t batch, int64_t q_len, int64_t k_len) {
  constexpr int64_t kWindow = 40;
  const int64_t shift = k_len - q_len;
  TestMask mask;
  const auto add = [&](int64_t begin, int64_t end) {
    mask.begin.push_back(static_cast<int32_t>(std::clamp<int64_t>(begin, 0, k_len)));
    mask.end.push_back(static_cast<int32_t>(std::clamp<int64_t>(end, 0, k_len)));
  };
  switch (kind) {
    case MaskKind::kFull:
      mask.visible = [](int64_t, int64_t, int64_t) { return true; };
      break;
    case MaskKind::kCausal:
      for (int64_t i = 0; i < q_len; ++i) add(0, i + shift + 1);
      mask.visible = [=](int64_t, int64_t i, int64_t j) { return j <= i + shift; };
      break;
    case MaskKind::kWindow:
      for (int64_t i = 0; i < q_len; ++i) add(i + shift - kWindow + 1, i + shift + 1);
      mask.visible = [=](int64_t, int64_t i, int64_t j) {
        return j <= i + shift && i + shift - j < kWindow;
      };
      break;
    case MaskKind::kDocuments: {
      // The mask is causal within documents of about 50 tokens, which differ between batch rows.
      const int64_t tokens = std::max(q_len, k_len);
      std::vector<int> document(batch * tokens);  // [batch, tokens]
      for (int64_t b = 0; b < batch; ++b) {
        int* row = document.data() + b * tokens;
        for (int64_t i = 1; i < tokens; ++i) {
          row[i] = row[i - 1] + (RandomBelow(50, 10 + b, i) == 0);
        }
        for (int64_t i = 0; i < q_len; ++i) {
          const int own = row[std::max<int64_t>(0, i + shift)];
          add(std::lower_bound(row, row + tokens, own) - row, i + shift + 1);
        }
      }
      mask.batch_stride = q_len;
      mask.visible = [=](int64_t b, int64_t i, int64_t j) {
        const int* row = document.data() + b * tokens;
        return j <= i + shift && row[j] == row[i + shift];
      };
      break;
    }
    case MaskKind::kGap:  // queries do not see the keys in the middle
      for (int64_t i = 0; i < q_len; ++i) i < q_len / 2 ? add(0, 3) : add(k_len - 3, k_len);
      mask.visible = [=](int64_t, int64_t i, int64_t j) {
        return i < q_len / 2 ? j < 3 : j >= k_len - 3;
      };
      break;
    case MaskKind::kApart:  // two documents, between which queries see nothing
      for (int64_t i = 0; i < q_len; ++i) {
        const bool before = 3 * i < q_len, after = 3 * i >= 2 * q_len;
        add(before ? 0 : k_len / 2, after ? k_len : k_len / 2);
      }
      mask.visible = [=](int64_t, int64_t i, int64_t j) {
        return (3 * i < q_len && j < k_len / 2) || (3 * i >= 2 * q_len && j >= k_len / 2);
      };
      break;
    case MaskKind::kRandom:  // a query with begin >= end sees nothing
      mask.batch_stride = q_len;
      for (int64_t i = 0; i < batch * q_len; ++i) {
        add(RandomBelow(k_len + 1, 20, i), RandomBelow(k_len + 1, 21, i));
      }
      for (int64_t b = 0; b < batch; ++b) {
        std::sort(mask.begin.begin() + b * q_len, mask.begin.begin() + (b + 1) * q_len);
        std::sort(mask.end.begin() + b * q_len, mask.end.begin() + (b + 1) * q_len);
      }
      mask.visible = [begin = mask.begin, end = mask.end, q_len](int64_t b, int64_t i, int64_t j) {
        return begin[b * q_len + i] <= j && j < end[b * q_len + i];
      };
      break;
    case MaskKind::kBlocks:  // a third of the blocks, which differ between batch rows
      mask.SetBlocks(batch, q_len, k_len, [](int64_t b, int64_t i, int64_t j) {
        return RandomBelow(3, 30 + b, 1000 * i + j) == 0;
      });
      break;
  }
  return mask;
}

// ---- Problems, and the kernels run on them.

struct Heads {
  int64_t heads, kv_heads;
};
struct Lengths {
  int64_t q_len, k_len;
};

struct Problem {
  Problem(int64_t batch, int64_t q_len, int64_t k_len, int64_t heads, int64_t kv_heads,
          const HeadWidths& widths, MaskKind kind, DType dtype, double magnitude = 1)
      : q(Random({batch, q_len, heads, widths.head_dim}, 0, dtype, magnitude)),
        k(Random({batch, k_len, kv_heads, widths.head_dim}, 1, dtype, magnitude)),
        v(Random({batch, k_len, kv_heads, widths.value_dim}, 2, dtype)),
        dout(Random({batch, q_len, heads, widths.value_dim}, 3, dtype)),
        dlse(Random({batch, heads, q_len}, 4, SumDType(dtype))),
        mask(MakeMask(kind, batch, q_len, k_len)),
        softmax_scale(1.25 / std::sqrt(static_cast<double>(widths.head_dim))) {}

  static Tensor Random(const Shape& shape, uint64_t stream, DType dtype, double scale = 1) {
    return RandomNormal(shape, DType::kFloat32, 1, stream, scale).To(dtype).To(kTestDevice);
  }

  FlashAttentionShape shape() const {
    return {q.dim(0), q.dim(1),      k.dim(1),  q.dim(2),      k.dim(2),     q.dim(3),
            v.dim(3), softmax_scale, q.dtype(), mask.ranges(), mask.blocks()};
  }

  AttentionResults Reference(DType rounded_to = DType::kFloat64,
                             const NaiveScores& scores = {}) const {
    return NaiveAttention(q, k, v, dout, dlse, softmax_scale, mask.visible, rounded_to, scores);
  }

  Tensor q, k, v, dout, dlse;
  TestMask mask;
  double softmax_scale;
};

// Returns a tensor full of NaN, which the kernels must assign.
inline Tensor Poisoned(const Tensor& like) {
  const Tensor tensor = Tensor::EmptyLike(like);
  tensor.Fill(kNaN);
  return tensor;
}

// ---- The calls of a problem's attention, and the tensors that they fill. Gradients of 16 bits are
// assigned, others are added to zeros.

inline AttentionResults UnfilledResults(const Problem& problem) {
  const auto gradient = Is16Bit(problem.q.dtype()) ? Poisoned : Tensor::ZerosLike;
  return {Poisoned(problem.dout), Poisoned(problem.dlse), gradient(problem.q), gradient(problem.k),
          gradient(problem.v)};
}

inline FlashForwardParams ForwardParams(const Problem& problem, const AttentionResults& result) {
  FlashForwardParams params;
  params.shape = problem.shape();
  params.q = Operand(problem.q);
  params.k = Operand(problem.k);
  params.v = Operand(problem.v);
  params.out = Operand(result.out);
  params.lse = result.lse.raw_data();
  params.out_dtype = result.out.dtype();
  return params;
}

inline Tensor DeltaOf(const Problem& problem, const Tensor& out, const AttentionKernels& kernels) {
  const Tensor delta = Poisoned(problem.dlse);
  kernels.Delta({problem.shape(), Operand(out), Operand(problem.dout), problem.dlse.raw_data(),
                 delta.raw_data()});
  return delta;
}

// Returns a call that adds to float32 or float64 gradients of `result`, and assigns others.
inline FlashBackwardParams BackwardParams(const Problem& problem, const AttentionResults& result,
                                          const Tensor& delta) {
  FlashBackwardParams params;
  params.shape = problem.shape();
  params.q = Operand(problem.q);
  params.k = Operand(problem.k);
  params.v = Operand(problem.v);
  params.dout = Operand(problem.dout);
  params.lse = result.lse.raw_data();
  params.delta = delta.raw_data();
  const auto target = [](const Tensor& gradient) {
    return Is16Bit(gradient.dtype()) ? Assigns(Operand(gradient)) : AddsTo(Operand(gradient));
  };
  params.dq = target(result.dq);
  params.dk = target(result.dk);
  params.dv = target(result.dv);
  return params;
}

inline AttentionResults RunAttention(const Problem& problem,
                                     const AttentionKernels& kernels = KernelsOf(kTestDevice)) {
  const AttentionResults result = UnfilledResults(problem);
  kernels.Forward(ForwardParams(problem, result));
  kernels.Backward(BackwardParams(problem, result, DeltaOf(problem, result.out, kernels)));
  return result;
}

// Returns the tolerance of max |error| / max |reference|, for sums in float32 or float64 and scores
// of ordinary size.
inline double Tolerance(DType dtype) { return dtype == DType::kFloat64 ? 1e-13 : 1e-5; }

// The keys [begin, end) of a problem, as a step of a ring sees them: a part of K, V and their
// gradients, and the mask's ranges counted from key `begin`.
class KeyBlock {
 public:
  KeyBlock(const Problem& problem, int64_t begin, int64_t end)
      : begin_(begin), length_(end - begin), shape_(problem.shape()) {
    mask_.begin = problem.mask.begin;
    mask_.end = problem.mask.end;
    mask_.batch_stride = problem.mask.batch_stride;
    for (std::vector<int32_t>* bound : {&mask_.begin, &mask_.end}) {
      for (int32_t& j : *bound) {
        j = static_cast<int32_t>(std::clamp<int64_t>(j - begin, 0, length_));
      }
    }
    shape_.k_len = length_;
    shape_.visible = mask_.ranges();
  }

  // Returns the shape, which is valid as long as this object.
  const FlashAttentionShape& shape() const { return shape_; }
  // The block's part of a tensor [batch, k_len, kv_heads, columns].
  AttentionOperand Of(const Tensor& keys) const { return Operand(keys.Slice(1, begin_, length_)); }

 private:
  const int64_t begin_, length_;
  FlashAttentionShape shape_;
  TestMask mask_;
};

// Blocks [begin, end) of kBlockedKeys keys, out of order. One has a single key, and one is empty.
inline constexpr int64_t kBlockedKeys = 310;
inline constexpr std::array<std::array<int64_t, 2>, 5> kKeyBlocks = {
    {{200, kBlockedKeys}, {7, 8}, {0, 7}, {8, 8}, {8, 200}}};

// Runs the backward of a problem with kBlockedKeys keys, a call for each block. The calls add to
// dq, dk and dv of `result`, which begin with zeros.
inline void BackwardOverKeys(const Problem& problem, const AttentionResults& result,
                             const Tensor& delta,
                             const std::function<void(const FlashBackwardParams&)>& backward) {
  for (const auto& [begin, end] : kKeyBlocks) {
    const KeyBlock block(problem, begin, end);
    FlashBackwardParams params = BackwardParams(problem, result, delta);
    params.shape = block.shape();
    params.k = block.Of(problem.k);
    params.v = block.Of(problem.v);
    params.dk = AddsTo(block.Of(result.dk));
    params.dv = AddsTo(block.Of(result.dv));
    backward(params);
  }
}

// A backward in several calls, as in a ring. Each call has a part of the mask for some KV heads and
// their query heads. The heads begin and end in different calls. Between the parts and beyond them
// there are queries that see nothing.
class BackwardInParts {
 public:
  // Gives the problem its mask.
  explicit BackwardInParts(Problem* problem) : problem_(*problem) {
    const auto q_len = static_cast<int32_t>(problem->q.dim(1));
    const auto k_len = static_cast<int32_t>(problem->k.dim(1));
    const int32_t none = q_len / 5, last = q_len - q_len / 6;  // queries
    problem->mask = TestMask();
    for (int32_t i = 0; i < q_len; ++i) {
      const int32_t end = i < last ? std::clamp(i - none, 0, k_len) : k_len;
      const int32_t begin = i < last ? 0 : k_len;
      const int32_t middle = std::max(begin, end - k_len / 4);
      const std::array<TestMask*, 3> masks = {&problem->mask, &parts_[0], &parts_[1]};
      const std::array<int32_t, 3> begins = {begin, begin, middle}, ends = {end, middle, end};
      for (int n = 0; n < 3; ++n) {
        masks[n]->begin.push_back(begins[n]);
        masks[n]->end.push_back(ends[n]);
      }
    }
    problem->mask.visible = [begin = problem->mask.begin, end = problem->mask.end](
                                int64_t, int64_t i, int64_t j) {
      return begin[i] <= j && j < end[i];
    };
  }

  // Runs the calls. The last call for a KV head assigns dk_out and dv_out, which may be
  // null. The sums are poisoned before.
  void Run(const AttentionResults& sums, const Tensor& lse, const Tensor& delta,
           const Tensor& dk_out, const Tensor& dv_out, bool deterministic,
           const std::function<void(const FlashBackwardParams&)>& backward) const {
    const int64_t kv_heads = problem_.k.dim(2), group = problem_.q.dim(2) / kv_heads;
    const int64_t half = kv_heads / 2;
    struct Call {
      int part;
      HeadRange heads, first, last;  // KV heads; `first` and `last` count from the first of `heads`
    };
    for (const Call& call :
         {Call{0, {0, half}, {0, half}, {}}, Call{1, {0, kv_heads}, {half, kv_heads}, {0, half}},
          Call{0, {half, kv_heads}, {}, {0, kv_heads - half}}}) {
      const int64_t first = call.heads.begin, count = call.heads.end - first;
      const auto queries = [&](const Tensor& t) {
        return t.Slice(2, first * group, count * group);
      };
      const auto keys = [&](const Tensor& t) { return t.Slice(2, first, count); };
      const auto rows = [&](const Tensor& t) {
        return t.Slice(1, first * group, count * group).Contiguous();
      };
      const Tensor their_lse = rows(lse), their_delta = rows(delta);
      FlashBackwardParams params;
      params.shape = problem_.shape();
      params.shape.num_heads = count * group;
      params.shape.num_kv_heads = count;
      params.shape.visible = parts_[call.part].ranges();
      params.q = Operand(queries(problem_.q));
      params.k = Operand(keys(problem_.k));
      params.v = Operand(keys(problem_.v));
      params.dout = Operand(queries(problem_.dout));
      params.lse = their_lse.raw_data();
      params.delta = their_delta.raw_data();
      params.dq =
          AddsTo(Operand(queries(sums.dq)), {call.first.begin * group, call.first.end * group});
      params.dk = AddsTo(Operand(keys(sums.dk)), call.first);
      params.dv = AddsTo(Operand(keys(sums.dv)), call.first);
      SetOrder(deterministic, &params);
      if (!dk_out.null()) {
        params.dk.last = params.dv.last = call.last;
        params.dk.result = Operand(keys(dk_out));
        params.dv.result = Operand(keys(dv_out));
      }
      backward(params);
    }
  }

 private:
  const Problem& problem_;
  TestMask parts_[2];
};

}  // namespace burst
