#include "burst/attention/head_exchange.h"

#include <algorithm>

#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace {

using Heads = HeadExchange::Heads;
using Member = HeadExchange::Member;

// A tensor like that of `like`, with other numbers of tokens and heads.
Tensor EmptyPiece(const Member& like, int64_t tokens, int64_t heads, DType dtype) {
  Shape shape = like.tensor.shape();
  shape[like.token_axis] = tokens;
  shape[like.head_axis] = heads;
  return Tensor::Empty(shape, dtype, like.tensor.device());
}

// A member's tokens among its group's.
Tensor TokensAt(const Tensor& group, int axis, const TokenRun& run) {
  return group.Slice(axis, run.begin, run.count, run.step);
}

}  // namespace

Heads HeadExchange::HeadsOf(int64_t num_heads, int member, int size) {
  BURST_CHECK(num_heads % size == 0 || size % num_heads == 0) << num_heads << " for " << size;
  return {member * num_heads / size, std::max<int64_t>(1, num_heads / size)};
}

absl::Status HeadExchange::Transfer(const std::vector<Pieces>& sent,
                                    const std::vector<Pieces>& received, ExchangeTraffic* traffic) {
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  // Everybody starts with its next neighbour, so that not all send to the same one first.
  for (int distance = 1; distance < group_->world_size(); ++distance) {
    const int to = (group_->rank() + distance) % group_->world_size();
    const int from = (group_->rank() + group_->world_size() - distance) % group_->world_size();
    for (const Pieces& pieces : sent) {
      const Tensor& piece = pieces[to];
      if (piece.numel() == 0) continue;
      sends.push_back({piece.raw_data(), piece.size_bytes(), to, piece.device()});
      ++traffic->messages;
      traffic->bytes += piece.size_bytes();
    }
    for (const Pieces& pieces : received) {
      const Tensor& piece = pieces[from];
      if (piece.numel() == 0) continue;
      receives.push_back({piece.raw_data(), piece.size_bytes(), from, piece.device()});
    }
  }
  BURST_RETURN_IF_ERROR(group_->Post(Channel::kRead, sends, receives));
  return group_->Wait(Channel::kRead);
}

absl::Status HeadExchange::Gather(const RingSchedule& schedule, const Members& own,
                                  absl::InlinedVector<Tensor, 3>* gathered,
                                  ExchangeTraffic* traffic) {
  const int size = group_->world_size(), rank = group_->rank();
  std::vector<Pieces> sent, received;
  for (const Member& member : own) {
    const int64_t num_heads = member.tensor.dim(member.head_axis);
    const int64_t count = HeadsOf(num_heads, rank, size).count;
    Pieces& out = sent.emplace_back();
    Pieces& in = received.emplace_back();
    for (int peer = 0; peer < size; ++peer) {
      const Heads heads = HeadsOf(num_heads, peer, size);
      const Tensor piece = member.tensor.Slice(member.head_axis, heads.first, heads.count);
      out.push_back(peer == rank ? piece : piece.Contiguous());
      const int64_t tokens = static_cast<int64_t>(schedule.held(peer).size());
      in.push_back(peer == rank ? piece : EmptyPiece(member, tokens, count, piece.dtype()));
    }
  }
  BURST_RETURN_IF_ERROR(Transfer(sent, received, traffic));

  gathered->clear();
  for (size_t i = 0; i < own.size(); ++i) {
    const int axis = own[i].token_axis;
    const int64_t count = HeadsOf(own[i].tensor.dim(own[i].head_axis), rank, size).count;
    const Tensor all = EmptyPiece(own[i], schedule.length(), count, own[i].tensor.dtype());
    for (int peer = 0; peer < size; ++peer) {
      for (const TokenRun& run : schedule.runs(peer)) {
        TokensAt(all, axis, run).CopyFrom(received[i][peer].Slice(axis, run.first, run.count));
      }
    }
    gathered->push_back(all);
  }
  return absl::OkStatus();
}

absl::Status HeadExchange::Scatter(const RingSchedule& schedule,
                                   const absl::InlinedVector<Tensor, 3>& gathered,
                                   const Members& own, ExchangeTraffic* traffic) {
  const int size = group_->world_size(), rank = group_->rank();
  std::vector<Pieces> sent, received;
  for (size_t i = 0; i < own.size(); ++i) {
    const Member& member = own[i];
    const DType dtype = gathered[i].dtype();
    const int axis = member.token_axis;
    const int64_t count = gathered[i].dim(member.head_axis);
    Pieces& out = sent.emplace_back();
    Pieces& in = received.emplace_back();
    for (int peer = 0; peer < size; ++peer) {
      const int64_t tokens = static_cast<int64_t>(schedule.held(peer).size());
      const Tensor piece = EmptyPiece(member, tokens, count, dtype);
      for (const TokenRun& run : schedule.runs(peer)) {
        piece.Slice(axis, run.first, run.count).CopyFrom(TokensAt(gathered[i], axis, run));
      }
      out.push_back(piece);
      const int64_t own_tokens = member.tensor.dim(axis);
      in.push_back(peer == rank ? piece : EmptyPiece(member, own_tokens, count, dtype));
    }
  }
  BURST_RETURN_IF_ERROR(Transfer(sent, received, traffic));

  for (size_t i = 0; i < own.size(); ++i) {
    const Member& member = own[i];
    const int64_t num_heads = member.tensor.dim(member.head_axis);
    for (int peer = 0; peer < size;) {
      const Heads heads = HeadsOf(num_heads, peer, size);
      const Tensor part = member.tensor.Slice(member.head_axis, heads.first, heads.count);
      const int copies = num_heads < size ? static_cast<int>(size / num_heads) : 1;
      if (copies == 1) {
        part.CopyFrom(received[i][peer]);
      } else {
        const Tensor sum = received[i][peer].To(SumDType(part.dtype()));
        for (int copy = 1; copy < copies; ++copy) sum.Add(received[i][peer + copy]);
        part.CopyFrom(sum.To(part.dtype()));
      }
      peer += copies;
    }
  }
  return absl::OkStatus();
}

}  // namespace burst
