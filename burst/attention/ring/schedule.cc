#include "burst/attention/ring/schedule.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"

namespace burst {
namespace {

using Positions = std::vector<int32_t>;

constexpr int64_t kInfinity = std::numeric_limits<int32_t>::max();

// Calls visit(i, begin, end) for every query i: it sees the keys begin <= j < end of k_positions.
// Stops when visit returns false. Linear, because both bounds only move forward.
template <typename Visit>
void ForEachQuery(const AttentionMask& mask, const Positions* document_starts,
                  const Positions& q_positions, const Positions& k_positions, Visit visit) {
  const int64_t k_len = static_cast<int64_t>(k_positions.size());
  int64_t begin = 0, end = 0;
  size_t next_document = 0;
  int64_t document_begin = 0, document_end = kInfinity;
  for (size_t i = 0; i < q_positions.size(); ++i) {
    const int64_t q = q_positions[i];
    if (document_starts != nullptr) {
      while (next_document < document_starts->size() && (*document_starts)[next_document] <= q) {
        document_begin = (*document_starts)[next_document++];
      }
      document_end =
          next_document < document_starts->size() ? (*document_starts)[next_document] : kInfinity;
    }
    int64_t lower = document_begin, upper = document_end;  // visible positions: lower <= p < upper
    if (mask.causal) upper = std::min(upper, q + 1);
    if (mask.window > 0) {
      lower = std::max(lower, q - mask.window + 1);
      upper = std::min(upper, q + mask.window);
    }
    while (begin < k_len && k_positions[begin] < lower) ++begin;
    while (end < k_len && k_positions[end] < upper) ++end;
    if (!visit(i, begin, end)) return;
  }
}

const Positions* Row(const DocumentStarts& documents, int64_t row) {
  return documents.empty() ? nullptr : &documents[row];
}

int64_t NumRows(const DocumentStarts& documents) {
  return documents.empty() ? 1 : static_cast<int64_t>(documents.size());
}

bool SeesAny(const AttentionMask& mask, const DocumentStarts& documents,
             const Positions& q_positions, const Positions& k_positions) {
  bool any = false;
  for (int64_t row = 0; row < NumRows(documents) && !any; ++row) {
    ForEachQuery(mask, Row(documents, row), q_positions, k_positions,
                 [&](int64_t, int64_t begin, int64_t end) {
                   any = begin < end;
                   return !any;
                 });
  }
  return any;
}

// Where the positions `held` are among `all`; both increase. Every layout needs but a few runs.
std::vector<TokenRun> FindRuns(const Positions& held, const Positions& all) {
  std::vector<TokenRun> runs;
  int64_t at = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(held.size()); ++i, ++at) {
    while (all[at] != held[i]) ++at;
    if (!runs.empty()) {
      TokenRun& run = runs.back();
      const int64_t step = at - (run.begin + (run.count - 1) * run.step);
      if (run.count == 1) run.step = step;
      if (step == run.step) {
        ++run.count;
        continue;
      }
    }
    runs.push_back({i, at, 1, 1});
  }
  return runs;
}

absl::Status Validate(int64_t seqlen, const AttentionMask& mask, const DocumentStarts& documents) {
  if (seqlen < 0 || seqlen >= kInfinity) {
    return absl::InvalidArgumentError(
        absl::StrCat("seqlen ", seqlen, " is not in [0, ", kInfinity, ")"));
  }
  if (mask.window < 0) {
    return absl::InvalidArgumentError(absl::StrCat("window ", mask.window, " is negative"));
  }
  for (const Positions& starts : documents) {
    for (size_t i = 0; i < starts.size(); ++i) {
      if (starts[i] < 0 || starts[i] >= seqlen || (i > 0 && starts[i] <= starts[i - 1])) {
        return absl::InvalidArgumentError(
            absl::StrCat("document start ", starts[i], " (number ", i,
                         ") is out of order or beyond the sequence of ", seqlen, " tokens"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

KeyRanges VisibleKeys::ranges(DeviceType device) const {
  if (all) return {};
  const int64_t batch_stride = rows == 1 ? 0 : q_len;
  if (device == DeviceType::kCpu) return {begin.data(), end.data(), batch_stride};
  if (on_gpu.null()) {
    std::vector<int32_t> both = begin;
    both.insert(both.end(), end.begin(), end.end());
    on_gpu = Tensor::FromVector(both, {2, rows, q_len}, device);
  }
  const auto* data = static_cast<const int32_t*>(on_gpu.raw_data());
  return {data, data + rows * q_len, batch_stride};
}

VisibleKeys ComputeVisibleKeys(const AttentionMask& mask, const DocumentStarts& documents,
                               const Positions& q_positions, const Positions& k_positions) {
  VisibleKeys visible;
  visible.rows = NumRows(documents);
  visible.q_len = static_cast<int64_t>(q_positions.size());
  visible.begin.resize(visible.rows * visible.q_len);
  visible.end.resize(visible.rows * visible.q_len);
  for (int64_t row = 0; row < visible.rows; ++row) {
    ForEachQuery(mask, Row(documents, row), q_positions, k_positions,
                 [&](int64_t i, int64_t begin, int64_t end) {
                   visible.begin[row * visible.q_len + i] = static_cast<int32_t>(begin);
                   visible.end[row * visible.q_len + i] = static_cast<int32_t>(end);
                   visible.pairs += std::max<int64_t>(0, end - begin);
                   return true;
                 });
  }
  visible.all =
      visible.pairs == visible.rows * visible.q_len * static_cast<int64_t>(k_positions.size());
  return visible;
}

absl::StatusOr<RingSchedule> RingSchedule::Create(int rank, int world_size, Layout layout,
                                                  int64_t seqlen, const AttentionMask& mask,
                                                  const DocumentStarts& documents,
                                                  const RankGroup& group, int ranks_per_node) {
  BURST_CHECK(world_size > 0 && rank >= 0 && rank < world_size);
  BURST_CHECK(group.size > 0 && group.member >= 0 && group.member < group.size);
  BURST_CHECK(ranks_per_node >= 0 && (ranks_per_node == 0 || world_size % ranks_per_node == 0))
      << world_size << " ranks in nodes of " << ranks_per_node;
  const absl::Status valid = Validate(seqlen, mask, documents);
  if (!valid.ok()) return valid;

  RingSchedule schedule;
  schedule.rank_ = rank;
  schedule.ranks_per_node_ = ranks_per_node == 0 ? world_size : ranks_per_node;
  schedule.seqlen_ = seqlen;
  schedule.document_rows_ = static_cast<int64_t>(documents.size());
  std::vector<Positions>& positions = schedule.positions_;
  schedule.group_ = group;
  for (int r = 0; r < world_size; ++r) {
    Positions& block = positions.emplace_back();
    for (int member = 0; member < group.size; ++member) {
      Positions held =
          LocalPositions(layout, seqlen, r * group.size + member, world_size * group.size);
      block.insert(block.end(), held.begin(), held.end());
      if (r == rank) schedule.held_.push_back(std::move(held));
    }
    std::sort(block.begin(), block.end());
  }
  for (const Positions& held : schedule.held_) {
    schedule.runs_.push_back(FindRuns(held, positions[rank]));
  }
  for (int r = 0; r < world_size; ++r) {
    schedule.keys_of_.push_back(ComputeVisibleKeys(mask, documents, positions[rank], positions[r]));
    schedule.seen_by_.push_back(ComputeVisibleKeys(mask, documents, positions[r], positions[rank]));
  }

  // sees[q * world_size + k]: some query of rank q sees a key of rank k.
  std::vector<bool> sees(world_size * world_size);
  for (int q = 0; q < world_size; ++q) {
    for (int k = 0; k < world_size; ++k) {
      sees[q * world_size + k] = SeesAny(mask, documents, positions[q], positions[k]);
    }
  }
  std::vector<int64_t> lengths;
  for (const Positions& block : positions) lengths.push_back(static_cast<int64_t>(block.size()));
  schedule.kv_route_ = MakeRingRoute(
      rank, schedule.ranks_per_node_, lengths,
      [&](int block, int host) { return static_cast<bool>(sees[host * world_size + block]); });
  schedule.query_route_ = MakeRingRoute(
      rank, schedule.ranks_per_node_, lengths,
      [&](int block, int host) { return static_cast<bool>(sees[block * world_size + host]); });
  return schedule;
}

int64_t RingSchedule::max_length() const {
  int64_t longest = 0;
  for (const Positions& positions : positions_) {
    longest = std::max(longest, static_cast<int64_t>(positions.size()));
  }
  return longest;
}

}  // namespace burst
