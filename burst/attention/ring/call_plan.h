// A plan of calls: what a rank gives to the kernels in each step of a forward or a backward.
//
// It says which part of the mask a call computes, for which heads, and which call is the first or
// the last to add to a sum. It holds indices, and one copy of them for the kernels. A schedule
// makes each plan once and keeps it (RingSchedule::calls), so that a call of attention only walks
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "burst/attention/kernel_mask.h"
#include "burst/attention/ring/route.h"
#include "burst/kernels/flash_attention.h"

namespace burst {

// What is computed, and which blocks travel around the ring. The other blocks stay.
enum class RingPass {
  kForward,        // K, V travel
  kBurstBackward,  // Q, dO, lse, delta travel; dQ follows
  kRingBackward,   // K, V travel; dK, dV follow
};

// What a plan depends on in addition to its schedule.
struct CallPlanKey {
  RingPass pass = RingPass::kForward;
  bool takes_blocks = false;  // the kernels take KeyBlocks (AttentionKernels::TakesBlocks)
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;

  bool operator<(const CallPlanKey& other) const {
    return std::tie(pass, takes_blocks, num_heads, num_kv_heads) <
           std::tie(other.pass, other.takes_blocks, other.num_heads, other.num_kv_heads);
  }
};

// A part of a KernelMask, which one call computes.
struct MaskPart {
  enum class Form { kIntervals, kBlocks, kBlocksAsIntervals };
  Form form = Form::kIntervals;
  size_t index = 0;  // in parts, or in blocks.parts()

  // Null for kBlocks.
  const KernelKeys* IntervalsOf(const KernelMask& mask) const;
  // Sets the mask of a call on `device` to this part of `mask`.
  void SetMask(const KernelMask& mask, DeviceType device, FlashAttentionShape* shape) const;
};

// Tracks, for each head, which call is the first and which is the last to add to a sum: the first
// call assigns it. A backward computes a rank's own block in two calls, some heads each, with the
// other blocks in between. So the first and the last call differ per head.
class HeadCalls {
 public:
  explicit HeadCalls(int64_t num_heads) : calls_(num_heads) {}

  // Announces `calls` calls for these heads. All calls are announced before the first one.
  void Announce(const HeadRange& heads, int64_t calls);
  // Whether there is a call for every head. If a head has no call, no kernel would write its
  // gradient.
  bool ForAllHeads() const;
  // The gradient holds something already: no call is the first.
  void OnlyAdd();

  // Returns the heads for which the next call is the first, and those for which it is the last,
  // counted from heads.begin.
  struct Ends {
    HeadRange first, last;
  };
  Ends Next(const HeadRange& heads);

 private:
  struct Calls {
    bool begun = false;
    int64_t left = 0;
  };
  std::vector<Calls> calls_;  // the calls of each head
};

struct PlannedCall {
  MaskPart part;
  // Ranges of heads for which the call is the first and the last to add to a sum, counted from the
  // first head of the step. `queries`: to O or dQ; `keys`: to dK and dV.
  HeadCalls::Ends queries, keys;
  BlockRows rows = {0, 0};  // in a forward: the queries from the first to the last that see a key
};

// The calls for a block that is here. A backward divides the rank's own block into two steps by
// heads.
struct PlannedStep {
  int source = 0;           // the owner of the block that travels
  HeadRange queries, keys;  // whole groups of query heads, with the KV heads they share
  std::vector<PlannedCall> calls;
};

struct CallPlan {
  std::vector<PlannedStep> steps;  // in the order in which Ring::Run computes
  // The result needs no sum: one call makes it.
  bool one_call = false;
  // In a backward: the last call for some heads converts the sums into dK and dV.
  bool last_converts = false;
  // The sums of dQ, or of dK and dV, begin as zeros, since no call is the first for some heads.
  bool clears_queries = false, clears_keys = false;
  // In a forward of several calls: the call that finishes each group of rows (RowCalls::last).
  std::vector<int32_t> last_calls;  // [batch rows or 1, groups]
  int64_t batch_stride = 0;
  KernelArray<int32_t> last_calls_on_device;

  // Returns what the kernel of the given call, counted over all steps, must know of O's rows.
  RowCalls RowsOf(int32_t number, const PlannedCall& call, DeviceType device) const;
};

// masks: by the owner of the block that travels. sends_all: this rank sends its whole block.
CallPlan MakeCallPlan(const CallPlanKey& key, const RingRoute& route,
                      const std::vector<KernelMask>& masks, bool sends_all);

}  // namespace burst
