// Implements the masks and schedules of burst.h.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"
#include "burst/c/objects.h"
#include "burst/kernels/scores.h"
#include "burst/mask/mask.h"
#include "burst/sequence/balance.h"
#include "burst/sequence/token_shard.h"

namespace burst {
namespace c {
namespace {

// Copies lists that follow one another into vectors.
template <typename T>
std::vector<std::vector<T>> Rows(int64_t rows, const int64_t* counts, const T* next) {
  std::vector<std::vector<T>> lists;
  for (int64_t row = 0; row < rows; ++row) {
    lists.emplace_back(next, next + counts[row]);
    next += counts[row];
  }
  return lists;
}

Spans SpansOf(int64_t rows, const int64_t* counts, const int32_t* bounds) {
  Spans spans(rows);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < counts[row]; ++i, bounds += 2) {
      spans[row].push_back({bounds[0], bounds[1]});
    }
  }
  return spans;
}

static_assert(static_cast<int>(SliceKind::kFull) == BURST_SLICE_FULL &&
              static_cast<int>(SliceKind::kCausal) == BURST_SLICE_CAUSAL &&
              static_cast<int>(SliceKind::kInverseCausal) == BURST_SLICE_INVERSE_CAUSAL &&
              static_cast<int>(SliceKind::kBand) == BURST_SLICE_BAND);

absl::StatusOr<MaskSlices> SlicesOf(int64_t rows, const int64_t* counts, const burst_slice* next) {
  MaskSlices slices(rows);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < counts[row]; ++i, ++next) {
      if (next->kind < BURST_SLICE_FULL || next->kind > BURST_SLICE_BAND) {
        return absl::InvalidArgumentError(
            absl::StrCat("slices: the kind must be one of burst_slice_kind; got ", next->kind,
                         " for slice ", i, " of row ", row));
      }
      slices[row].push_back({next->q_begin, next->q_end, next->k_begin, next->k_end,
                             static_cast<SliceKind>(next->kind)});
    }
  }
  return slices;
}

// Reads a mask. A null pointer means the full mask.
absl::StatusOr<Mask> MaskOf(const burst_mask* callers) {
  if (callers == nullptr) return Mask::Full();
  burst_mask given = {};
  BURST_RETURN_IF_ERROR(CopyStruct("burst_mask", *callers, &given));
  if (given.slice_counts == nullptr) {
    return Mask::SlidingWindow(given.window, given.causal != 0)
        .WithDocuments(Rows(given.document_rows, given.document_counts, given.document_starts))
        .WithSpans(SpansOf(given.span_rows, given.span_counts, given.span_bounds));
  }
  const std::pair<const char*, int64_t> others[] = {{"causal", given.causal},
                                                    {"window", given.window},
                                                    {"documents", given.document_rows},
                                                    {"spans", given.span_rows}};
  for (const auto& [name, value] : others) {
    if (value == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": must be off with slices, which are the whole mask"));
  }
  BURST_ASSIGN_OR_RETURN(MaskSlices slices,
                         SlicesOf(given.slice_rows, given.slice_counts, given.slices));
  return Mask::Slices(std::move(slices));
}

absl::StatusOr<Sequences> SequencesOf(const burst_sequences& callers, int ranks) {
  burst_sequences given = {};
  BURST_RETURN_IF_ERROR(CopyStruct("burst_sequences", callers, &given));
  Sequences sequences(given.seqlen);
  if (given.lengths != nullptr) sequences = Rows(ranks, given.lengths, given.positions);
  if (given.is_cross == 0) return sequences;
  sequences.keys.emplace();
  sequences.keys->seqlen = given.key_seqlen;
  if (given.key_layout != nullptr) {
    BURST_ASSIGN_OR_RETURN(sequences.keys->layout,
                           ForSetting("key_layout", ParseLayout(given.key_layout)));
  }
  return sequences;
}

// Gives slices to a caller, who may ask for their number first.
void Give(const std::vector<burst::MaskSlice>& made, int64_t* count, burst_slice* slices) {
  *count = static_cast<int64_t>(made.size());
  if (slices == nullptr) return;
  for (size_t i = 0; i < made.size(); ++i) {
    const burst::MaskSlice& slice = made[i];
    slices[i] = {slice.q_begin, slice.q_end, slice.k_begin, slice.k_end,
                 static_cast<int32_t>(slice.kind)};
  }
}

}  // namespace
}  // namespace c
}  // namespace burst

using burst::c::Guard;

extern "C" {

burst_code burst_slices_tree(int32_t prompt, int64_t answers, const int32_t* lengths,
                             int64_t* count, burst_slice* slices) {
  return Guard([&] {
    burst::c::Give(burst::TreeSlices(prompt, {lengths, lengths + answers}), count, slices);
    return absl::OkStatus();
  });
}

burst_code burst_slices_window_with_global_tokens(int32_t seqlen, int32_t window,
                                                  int64_t global_tokens, const int32_t* positions,
                                                  int32_t causal, int64_t* count,
                                                  burst_slice* slices) {
  return Guard([&] {
    std::vector<int32_t> global(positions, positions + global_tokens);
    std::sort(global.begin(), global.end());
    global.erase(std::unique(global.begin(), global.end()), global.end());
    burst::c::Give(burst::WindowWithGlobalTokens(seqlen, window, global, causal != 0), count,
                   slices);
    return absl::OkStatus();
  });
}

burst_code burst_slices_blocks(int32_t seqlen, int32_t size, int64_t query_blocks,
                               const int64_t* counts, const int32_t* key_blocks, int32_t causal,
                               int64_t* count, burst_slice* slices) {
  return Guard([&] {
    burst::c::Give(burst::BlockSlices(
                       seqlen, size, burst::c::Rows(query_blocks, counts, key_blocks), causal != 0),
                   count, slices);
    return absl::OkStatus();
  });
}

burst_code burst_alibi_slopes(int64_t heads, float* slopes) {
  return Guard([&]() -> absl::Status {
    if (heads < 1) {
      return absl::InvalidArgumentError(absl::StrCat("heads: must be at least 1; got ", heads));
    }
    const std::vector<float> made = burst::AlibiSlopes(heads);
    std::copy(made.begin(), made.end(), slopes);
    return absl::OkStatus();
  });
}

burst_code burst_schedule_create(const burst_attention* attention, const burst_sequences* sequences,
                                 const burst_mask* mask, burst_schedule** schedule) {
  return Guard([&]() -> absl::Status {
    const burst::c::Attention& of = *attention->value;
    BURST_RETURN_IF_ERROR(burst::c::CheckNotFinished(of.comm.get()));
    const int ranks = of.comm == nullptr ? 1 : of.comm->size;
    BURST_ASSIGN_OR_RETURN(const burst::Sequences tokens, burst::c::SequencesOf(*sequences, ranks));
    BURST_ASSIGN_OR_RETURN(const burst::Mask given, burst::c::MaskOf(mask));
    BURST_ASSIGN_OR_RETURN(burst::AttentionSchedule made, of.attention->Schedule(tokens, given));
    auto value = std::make_shared<burst::c::Schedule>();
    value->context = of.context;
    value->schedule = std::make_shared<burst::AttentionSchedule>(std::move(made));
    *schedule = new burst_schedule{std::move(value)};
    return absl::OkStatus();
  });
}

void burst_schedule_destroy(burst_schedule* schedule) {
  (void)Guard([&] {
    delete schedule;
    return absl::OkStatus();
  });
}

burst_code burst_positions(const char* layout, int64_t seqlen, int32_t rank, int32_t size,
                           int64_t* length, int32_t* positions) {
  return Guard([&]() -> absl::Status {
    BURST_ASSIGN_OR_RETURN(
        const burst::Layout spread,
        burst::ForSetting("layout", burst::ParseLayout(burst::c::Or(layout, "zigzag"))));
    if (seqlen < 0 || seqlen > INT32_MAX || size < 1 || rank < 0 || rank >= size) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank: must be one of the ranks, and seqlen must be in [0, 2^31); got rank ",
                       rank, " of ", size, ", seqlen ", seqlen));
    }
    const std::vector<int32_t> local = burst::LocalPositions(spread, seqlen, rank, size);
    *length = static_cast<int64_t>(local.size());
    if (positions != nullptr) std::copy(local.begin(), local.end(), positions);
    return absl::OkStatus();
  });
}

burst_code burst_balanced_positions(const burst_mask* mask, int64_t seqlen, int32_t rank,
                                    int32_t size, int32_t group_size, int64_t* length,
                                    int32_t* positions) {
  return Guard([&]() -> absl::Status {
    if (seqlen < 0 || seqlen >= INT32_MAX || size < 1 || rank < 0 || rank >= size ||
        group_size < 1 || size % group_size != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank: must be one of the ranks, which group_size divides, and seqlen must "
                       "be in [0, 2^31 - 1); "
                       "got rank ",
                       rank, " of ", size, " in groups of ", group_size, ", seqlen ", seqlen));
    }
    BURST_ASSIGN_OR_RETURN(const burst::Mask given, burst::c::MaskOf(mask));
    BURST_RETURN_IF_ERROR(given.CheckForSequence(seqlen));
    const std::vector<int32_t> local =
        burst::BalancedPositions(given, seqlen, size / group_size, group_size)[rank];
    *length = static_cast<int64_t>(local.size());
    if (positions != nullptr) std::copy(local.begin(), local.end(), positions);
    return absl::OkStatus();
  });
}

}  // extern "C"
