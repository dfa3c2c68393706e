#include "burst/sequence/head_exchange.h"

#include <algorithm>

#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

using Heads = HeadExchange::Heads;
using HeadTensor = HeadExchange::HeadTensor;
using Tensors = absl::InlinedVector<Tensor, 3>;

// Returns a tensor's shape with other numbers of tokens and heads.
Shape ShapeWith(const HeadTensor& like, int64_t tokens, int64_t heads) {
  Shape shape = like.tensor.shape();
  shape[like.token_axis] = tokens;
  shape[like.head_axis] = heads;
  return shape;
}

// Returns one rank's tokens among its group's tokens.
Tensor TokensAt(const Tensor& group, int axis, const TokenRun& run) {
  return group.Slice(axis, run.begin, run.count, run.step);
}

Tensor HeadsAt(const HeadTensor& all, const Heads& heads) {
  return all.tensor.Slice(all.head_axis, heads.first, heads.count);
}

int64_t NumElements(const Shape& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

}  // namespace

Heads HeadExchange::HeadsOf(int64_t num_heads, int group_rank, int size) {
  BURST_CHECK(num_heads % size == 0 || size % num_heads == 0) << num_heads << " for " << size;
  return {group_rank * num_heads / size, std::max<int64_t>(1, num_heads / size)};
}

HeadExchange::Messages::Messages(int rank, int size, DeviceType device,
                                 const std::vector<DType>& dtypes,
                                 const std::function<Shape(size_t tensor, int peer)>& shape)
    : parts_(dtypes.size(), std::vector<Tensor>(size)), messages_(size) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    int64_t total = 0;
    for (size_t i = 0; i < dtypes.size(); ++i) {
      for (int peer = 0; peer < size; ++peer) {
        if (dtypes[i] == dtype && peer != rank) total += NumElements(shape(i, peer));
      }
    }
    if (total == 0) continue;
    const Tensor all = Tensor::Empty({total}, dtype, device);
    int64_t at = 0;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const int64_t begin = at;
      for (size_t i = 0; i < dtypes.size(); ++i) {
        if (dtypes[i] != dtype) continue;
        const Shape part = shape(i, peer);
        const int64_t count = NumElements(part);
        parts_[i][peer] = all.Slice(0, at, count).View(part);
        at += count;
      }
      if (at > begin) messages_[peer].push_back(all.Slice(0, begin, at - begin));
    }
  }
}

absl::Status HeadExchange::Transfer(const Messages& sent, const Messages& received,
                                    ExchangeTraffic* traffic) {
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  // Each rank starts with its next neighbor, so that not all send to the same one first.
  for (int distance = 1; distance < group_->world_size(); ++distance) {
    const int to = (group_->rank() + distance) % group_->world_size();
    const int from = (group_->rank() + group_->world_size() - distance) % group_->world_size();
    for (const Tensor& message : sent.to(to)) {
      sends.push_back({message.raw_data(), message.size_bytes(), to, message.device()});
      ++traffic->messages;
      traffic->bytes += message.size_bytes();
    }
    for (const Tensor& message : received.to(from)) {
      receives.push_back({message.raw_data(), message.size_bytes(), from, message.device()});
    }
  }
  BURST_RETURN_IF_ERROR(group_->Post(Channel::kRead, sends, receives));
  return group_->Wait(Channel::kRead);
}

absl::Status HeadExchange::Gather(const TokenShard& shard, const HeadTensors& own,
                                  Tensors* gathered, ExchangeTraffic* traffic) {
  const int size = group_->world_size(), rank = group_->rank();
  const auto heads_of = [&](size_t i, int group_rank) {
    return HeadsOf(own[i].tensor.dim(own[i].head_axis), group_rank, size);
  };
  std::vector<DType> dtypes;
  for (const HeadTensor& each : own) dtypes.push_back(each.tensor.dtype());
  const DeviceType device = own[0].tensor.device();
  const int64_t length = shard.local_length();
  const Messages sent(rank, size, device, dtypes, [&](size_t i, int peer) {
    return ShapeWith(own[i], length, heads_of(i, peer).count);
  });
  const Messages received(rank, size, device, dtypes, [&](size_t i, int peer) {
    return ShapeWith(own[i], shard.local_length(peer), heads_of(i, rank).count);
  });
  std::vector<TensorCopy> copies;
  for (size_t i = 0; i < own.size(); ++i) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank || length == 0) continue;
      copies.push_back({HeadsAt(own[i], heads_of(i, peer)), sent.part(i, peer)});
    }
  }
  CopyAll(copies);
  BURST_RETURN_IF_ERROR(Transfer(sent, received, traffic));

  copies.clear();
  gathered->clear();
  for (size_t i = 0; i < own.size(); ++i) {
    const Heads heads = heads_of(i, rank);
    const int axis = own[i].token_axis;
    const Tensor all =
        Tensor::Empty(ShapeWith(own[i], shard.group_length(), heads.count), dtypes[i], device);
    for (int peer = 0; peer < size; ++peer) {
      for (const TokenRun& run : shard.runs(peer)) {
        const Tensor part = peer == rank ? HeadsAt(own[i], heads) : received.part(i, peer);
        copies.push_back({part.Slice(axis, run.first, run.count), TokensAt(all, axis, run)});
      }
    }
    gathered->push_back(all);
  }
  CopyAll(copies);
  return absl::OkStatus();
}

absl::Status HeadExchange::Scatter(const TokenShard& shard, const Tensors& gathered,
                                   const HeadTensors& own, ExchangeTraffic* traffic) {
  const int size = group_->world_size(), rank = group_->rank();
  std::vector<DType> dtypes;
  for (const Tensor& tensor : gathered) dtypes.push_back(tensor.dtype());
  const DeviceType device = gathered[0].device();
  const auto shape_on = [&](size_t i, int group_rank) {
    return ShapeWith(own[i], shard.local_length(group_rank), gathered[i].dim(own[i].head_axis));
  };
  const Messages sent(rank, size, device, dtypes, shape_on);
  const Messages received(rank, size, device, dtypes,
                          [&](size_t i, int) { return shape_on(i, rank); });
  std::vector<TensorCopy> copies;
  // Copies one rank's tokens out of the group's tokens to `part`.
  const auto take = [&](size_t i, int group_rank, const Tensor& part) {
    const int axis = own[i].token_axis;
    for (const TokenRun& run : shard.runs(group_rank)) {
      copies.push_back({TokensAt(gathered[i], axis, run), part.Slice(axis, run.first, run.count)});
    }
  };
  for (size_t i = 0; i < own.size(); ++i) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) take(i, peer, sent.part(i, peer));
    }
  }
  CopyAll(copies);
  BURST_RETURN_IF_ERROR(Transfer(sent, received, traffic));

  copies.clear();
  if (shard.local_length() == 0) return absl::OkStatus();
  for (size_t i = 0; i < own.size(); ++i) {
    const int64_t num_heads = own[i].tensor.dim(own[i].head_axis);
    if (num_heads < size) {
      const Tensor mine = Tensor::Empty(shape_on(i, rank), dtypes[i], device);
      take(i, rank, mine);
      CopyAll(copies);
      copies.clear();
      const auto part = [&](int peer) { return peer == rank ? mine : received.part(i, peer); };
      const int same = static_cast<int>(size / num_heads);  // ranks that share a head
      for (int peer = 0; peer < size; peer += same) {
        const Tensor sum = part(peer).To(SumDType(dtypes[i]));
        for (int other = 1; other < same; ++other) sum.Add(part(peer + other));
        HeadsAt(own[i], HeadsOf(num_heads, peer, size)).CopyFrom(sum.To(dtypes[i]));
      }
      continue;
    }
    for (int peer = 0; peer < size; ++peer) {
      const Tensor target = HeadsAt(own[i], HeadsOf(num_heads, peer, size));
      if (peer == rank) {
        take(i, rank, target);
      } else {
        copies.push_back({received.part(i, peer), target});
      }
    }
  }
  CopyAll(copies);
  return absl::OkStatus();
}

}  // namespace burst
