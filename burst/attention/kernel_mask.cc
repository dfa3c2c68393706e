#include "burst/attention/kernel_mask.h"

#include <mutex>

#include "burst/base/check.h"
#include "burst/kernels/gpu/sm90/mask_hints.h"
#include "burst/kernels/simulated_attention.h"

namespace burst {

KeyRanges KernelKeys::OnHost() const {
  KeyRanges ranges;
  ranges.begin = begin.data();
  ranges.end = end.data();
  ranges.batch_stride = rows == 1 ? 0 : q_len;
  ranges.documents = documents_;
  return ranges;
}

void KernelKeys::CountForSimulation() {
  if (all) return;
  tiles_ = VisibleTiles(OnHost(), rows, q_len);
  most_queries_ = sm90::MostQueries(OnHost(), rows, q_len);
  begin = std::vector<int32_t>();
  end = std::vector<int32_t>();
}

KeyRanges KernelKeys::ranges(DeviceType device) const {
  if (all) return {};
  const KeyRanges on_host = OnHost();
  if (device == DeviceType::kCpu) return on_host;
  if (on_gpu_.null() && tiles_ >= 0) {
    on_gpu_ = Tensor::Empty({2, rows, q_len}, DType::kInt32, device);
    SimulatedGpu::Current()->SetNote(on_gpu_.raw_data(), tiles_);
  } else if (on_gpu_.null()) {
    std::vector<int32_t> both = begin;
    both.insert(both.end(), end.begin(), end.end());
    on_gpu_ = Tensor::FromVector(both, {2, rows, q_len}, device);
    most_queries_ = sm90::MostQueries(on_host, rows, q_len);
  }
  KeyRanges on_gpu = on_host;
  on_gpu.begin = static_cast<const int32_t*>(on_gpu_.raw_data());
  on_gpu.end = on_gpu.begin + rows * q_len;
  on_gpu.most_queries = most_queries_;
  return on_gpu;
}

KeyBlocks KernelBlocks::lists(DeviceType device) const {
  BURST_CHECK_EQ(block, kListBlock);
  const int64_t key_stride = rows == 1 ? 0 : query_blocks() + 1;
  const int64_t query_stride = rows == 1 ? 0 : key_blocks() + 1;
  const KeyBlocks on_host = {key_begin.data(),  key_list.data(),   query_begin.data(),
                             query_list.data(), place_list.data(), key_stride,
                             query_stride};
  if (device == DeviceType::kCpu) return on_host;
  const auto starts = static_cast<int64_t>(key_begin.size() + query_begin.size());
  const auto count = static_cast<int64_t>(key_list.size());
  if (on_gpu_.null()) {
    std::vector<int32_t> all;
    all.reserve(starts + 3 * count);
    for (const auto* part : {&key_begin, &query_begin, &key_list}) {
      all.insert(all.end(), part->begin(), part->end());
    }
    const std::vector<int32_t> order = sm90::WalkOrder(on_host, rows, query_blocks(), key_blocks());
    for (const auto* list : {&query_list, &place_list}) {
      for (const int32_t at : order) all.push_back((*list)[at]);
    }
    on_gpu_ = Tensor::FromVector(all, {starts + 3 * count}, device);
  }
  const auto* const data = static_cast<const int32_t*>(on_gpu_.raw_data());
  return {data,
          data + starts,
          data + key_begin.size(),
          data + starts + count,
          data + starts + 2 * count,
          key_stride,
          query_stride};
}

const std::vector<KernelKeys>& KernelBlocks::parts() const {
  if (as_parts_.empty()) {
    for (VisibleKeys& part : AsIntervals()) {
      as_parts_.emplace_back(std::move(part), /*documents=*/true);  // slices may separate them
    }
  }
  return as_parts_;
}

KernelMask::KernelMask(const Mask& mask, const std::vector<int32_t>& queries,
                       const std::vector<int32_t>& keys) {
  // Ranks of a plan take turns, so that only one of them holds a mask.
  static std::mutex turn;
  std::unique_lock<std::mutex> lock(turn, std::defer_lock);
  const bool simulated = SimulatedGpu::Current() != nullptr;
  if (simulated) lock.lock();
  BlockMask between = mask.Between(queries, keys, kListBlock);
  for (VisibleKeys& part : between.parts) {
    parts.emplace_back(std::move(part), mask.MaySeparateDocuments());
    if (simulated) parts.back().CountForSimulation();
  }
  blocks = KernelBlocks(std::move(between.blocks));
}

int64_t KernelMask::pairs() const {
  int64_t sum = blocks.pairs;
  for (const KernelKeys& part : parts) sum += part.pairs;
  return sum;
}

}  // namespace burst
