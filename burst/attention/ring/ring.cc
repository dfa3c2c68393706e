#include "burst/attention/ring/ring.h"

#include <algorithm>
#include <new>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

Shape ShapeFor(const Ring::BlockTensor& own, int64_t length) {
  Shape shape = own.tensor.shape();
  shape[own.length_axis] = length;
  return shape;
}

Ring::Tensors Own(const Ring::Block& block) {
  Ring::Tensors tensors;
  for (const Ring::BlockTensor& own : block) tensors.push_back(own.tensor);
  return tensors;
}

int64_t Longest(const RingRoute& route) {
  return *std::max_element(route.lengths.begin(), route.lengths.end());
}

void AddTo(const Ring::Tensors& sum, const Ring::Tensors& terms) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i].Add(terms[i]);
}

const absl::Status& NoMemory() {
  static const auto* status = new absl::Status(absl::ResourceExhaustedError("out of memory"));
  return *status;
}

}  // namespace

void AbortFor(const std::exception& error, Communicator* comm) {
  if (comm == nullptr) return;
  try {
    comm->Abort(absl::InternalError(error.what()));
  } catch (const std::bad_alloc&) {
    comm->Abort(NoMemory());
  }
}

Ring::Ring(Communicator* comm, Communicator* between_nodes)
    : comm_(comm), between_nodes_(between_nodes) {
  (void)NoMemory();  // makes the status while memory is left
}

void Ring::Reserve(const Block& block, int64_t max_length, Buffer* buffer,
                   std::optional<DType> of) {
  buffer->resize(block.size());
  for (size_t i = 0; i < block.size(); ++i) {
    int64_t numel = 1;
    for (int64_t size : ShapeFor(block[i], max_length)) numel *= size;
    Tensor& tensor = (*buffer)[i];
    const DType dtype = of.value_or(block[i].tensor.dtype());
    const DeviceType device = block[i].tensor.device();
    if (tensor.null() || tensor.numel() < numel || tensor.dtype() != dtype ||
        tensor.device() != device) {
      tensor = Tensor::Empty({numel}, dtype, device);
    }
  }
}

Ring::Tensors Ring::ViewFor(const Block& block, const Buffer& buffer, int64_t length) {
  Tensors views;
  for (size_t i = 0; i < block.size(); ++i) {
    const Shape shape = ShapeFor(block[i], length);
    int64_t numel = 1;
    for (int64_t size : shape) numel *= size;
    views.push_back(buffer[i].Slice(0, 0, numel).View(shape));
  }
  return views;
}

absl::Status Ring::Post(Link link, Channel channel, const RingTransfer& transfer,
                        const Tensors& out, const Tensors& in, RingTraffic::Sent* sent) {
  absl::InlinedVector<SendBuffer, 4> sends;
  absl::InlinedVector<ReceiveBuffer, 4> receives;
  if (transfer.to >= 0) {
    ++sent->transfers;
    for (const Tensor& tensor : out) {
      sends.push_back({tensor.raw_data(), tensor.size_bytes(), transfer.to, tensor.device()});
      sent->bytes += tensor.size_bytes();
    }
  }
  if (transfer.from >= 0) {
    for (const Tensor& tensor : in) {
      receives.push_back({tensor.raw_data(), tensor.size_bytes(), transfer.from, tensor.device()});
    }
  }
  if (sends.empty() && receives.empty()) return absl::OkStatus();
  return comm(link)->Post(channel, sends, receives);
}

absl::Status Ring::Wait(Link link, Channel channel) {
  return comm(link) == nullptr ? absl::OkStatus() : comm(link)->Wait(channel);
}

// The gradients that a rank sends and receives during a Run. Each link carries at most one out and
// one in. One more may have arrived a round before its block is computed.
class Ring::GradientTransfers {
 public:
  GradientTransfers(Ring* ring, const RingRoute& route, const Block& own, DType in_transit,
                    RingTraffic* traffic)
      : ring_(*ring),
        route_(route),
        own_(own),
        in_transit_(in_transit),
        converts_(!own.empty() && in_transit != own[0].tensor.dtype()),
        free_sums_(converts_ ? ring->free_sums_ : ring->free_),
        traffic_(*traffic) {
    Free(&ring_.last_);
  }
  ~GradientTransfers() {
    for (Link link : kLinks) {
      Free(&out_[link]);
      Free(&in_[link]);
    }
    Free(&early_);
    FreeSum();
  }

  // Begins the round of `source`. A gradient of its block that has arrived becomes the sum.
  void Begin(int source) {
    if (early_.empty()) return;
    BURST_CHECK(early_source_ == source && sum_.empty());
    BeginSum(source, &early_);
  }

  // Returns the sum to which this rank's part is added. It holds the parts of other ranks so far,
  // if any.
  Sums Sum(int source) {
    const bool first = sum_.empty();
    if (first) TakeSum();
    return {View(sum_, source), first};
  }

  // Completes the transfers on a link at the end of the round of `source`.
  absl::Status Arrive(Link link, int source) {
    BURST_RETURN_IF_ERROR(Complete(link));
    Buffer in = std::exchange(in_[link], {});
    if (in.empty()) return absl::OkStatus();
    const int arrived = arriving_[link];
    if (arrived == route_.rank) {
      AddTo(Own(own_), View(in, arrived));
    } else if (arrived != source) {
      BURST_CHECK(early_.empty());
      early_source_ = arrived;
      std::swap(early_, in);
    } else if (sum_.empty()) {
      BeginSum(source, &in);
    } else {
      AddTo(View(sum_, source), View(in, source));
    }
    Free(&in);
    return absl::OkStatus();
  }

  // Completes all transfers after the last round. *last receives this rank's own gradients.
  absl::Status Finish(Tensors* last) {
    for (Link link : kLinks) {
      BURST_RETURN_IF_ERROR(Complete(link));
      if (in_[link].empty()) continue;
      BURST_CHECK(arriving_[link] == route_.rank && last->empty());
      Free(&ring_.last_);
      std::swap(ring_.last_, in_[link]);
      *last = View(ring_.last_, route_.rank);
    }
    return absl::OkStatus();
  }

  // Runs after a round. It starts to send the round's sum and to receive the next gradient.
  absl::Status Send(const RingRound& round) {
    for (Link link : kLinks) {
      const RingTransfer& transfer = round.gradient[link];
      Tensors out, in;
      if (transfer.to >= 0) {
        BURST_CHECK(!sum_.empty() && out_[link].empty());
        if (converts_) {
          out_[link] = Take();
          Convert(View(sum_, round.source), View(out_[link], round.source));
          FreeSum();
        } else {
          std::swap(out_[link], sum_);
        }
        out = View(out_[link], round.source);
      }
      if (transfer.from >= 0) {
        in_[link] = Take();
        arriving_[link] = transfer.arriving;
        in = View(in_[link], transfer.arriving);
      }
      BURST_RETURN_IF_ERROR(
          ring_.Post(link, Channel::kGradient, transfer, out, in, &traffic_.gradients[link]));
    }
    BURST_CHECK(sum_.empty());
    return absl::OkStatus();
  }

 private:
  static Buffer TakeFrom(std::vector<Buffer>* free) {
    if (free->empty()) return {};
    Buffer buffer = std::move(free->back());
    free->pop_back();
    return buffer;
  }
  // Frees a buffer, also in a destructor. Without memory for the list, the buffer is given back.
  static void FreeTo(std::vector<Buffer>* free, Buffer* buffer) {
    Buffer freed = std::exchange(*buffer, {});
    if (freed.empty()) return;
    try {
      free->push_back(std::move(freed));
    } catch (const std::bad_alloc&) {
    }
  }
  static void Convert(const Tensors& from, const Tensors& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i].ConvertFrom(from[i]);
  }

  Tensors View(const Buffer& buffer, int source) const {
    return ViewFor(own_, buffer, route_.lengths[source]);
  }
  Buffer Take() {
    Buffer buffer = TakeFrom(&ring_.free_);
    Reserve(own_, Longest(route_), &buffer, in_transit_);
    return buffer;
  }
  void Free(Buffer* buffer) { FreeTo(&ring_.free_, buffer); }
  void TakeSum() {
    sum_ = TakeFrom(&free_sums_);
    Reserve(own_, Longest(route_), &sum_);
  }
  void FreeSum() { FreeTo(&free_sums_, &sum_); }
  // The received block becomes the sum, in place unless it was sent in another dtype.
  void BeginSum(int source, Buffer* arrived) {
    if (!converts_) return std::swap(sum_, *arrived);
    TakeSum();
    Convert(View(*arrived, source), View(sum_, source));
    Free(arrived);
  }
  absl::Status Complete(Link link) {
    BURST_RETURN_IF_ERROR(ring_.Wait(link, Channel::kGradient));
    Free(&out_[link]);
    return absl::OkStatus();
  }

  Ring& ring_;
  const RingRoute& route_;
  const Block& own_;
  const DType in_transit_;
  const bool converts_;  // sums have another dtype than gradients in transit
  std::vector<Buffer>& free_sums_;
  RingTraffic& traffic_;
  PerLink<Buffer> out_, in_;
  PerLink<int> arriving_;
  Buffer sum_;    // the current block's sum: the parts of this rank and the ranks before it
  Buffer early_;  // the next round's block, from rank early_source_
  int early_source_ = -1;
};

absl::Status Ring::Run(const RingRoute& route, const Block& block, BlockGradients* gradients,
                       const Compute& compute, RingTraffic* traffic) {
  const auto world_size = static_cast<int>(route.lengths.size());
  if (gradients != nullptr) gradients->last.clear();
  BURST_CHECK(world_size == route.ranks_per_node || between_nodes_ != nullptr);
  if (world_size == 1) {
    compute(route.rank, Part::kWhole, Own(block),
            gradients == nullptr ? Sums() : Sums{Own(gradients->own)});
    ++traffic->rounds_computed;
    return absl::OkStatus();
  }
  std::optional<GradientTransfers> transfers;
  try {
    if (gradients != nullptr) {
      transfers.emplace(this, route, gradients->own, gradients->in_transit, traffic);
    }
    return RunRounds(route, block, gradients, transfers.has_value() ? &*transfers : nullptr,
                     compute, traffic);
  } catch (const std::exception& error) {
    AbortFor(error, comm_);
    AbortFor(error, between_nodes_);
    throw;
  }
}

absl::Status Ring::PostBlocks(const RingRoute& route, const Block& block, int t, Visiting* blocks,
                              RingTraffic* traffic) {
  const RingTransfer& within = route.rounds[t].block[Link::kIntra];
  const RingTransfer& across = route.rounds[t].block[Link::kInter];
  const bool first_in_node = t % route.ranks_per_node == 0;
  const auto make_room = [&](Buffer* buffer, int source) {
    Reserve(block, Longest(route), buffer);
    return ViewFor(block, *buffer, route.lengths[source]);
  };
  blocks->next.clear();
  if (within.from >= 0) blocks->next = make_room(&within_[t % 3], within.arriving);
  if (across.from >= 0) {
    blocks->next_node = make_room(&across_[t / route.ranks_per_node % 2], across.arriving);
  }
  BURST_RETURN_IF_ERROR(Post(Link::kIntra, Channel::kRead, within,
                             first_in_node ? blocks->current : blocks->previous, blocks->next,
                             &traffic->blocks[Link::kIntra]));
  return Post(Link::kInter, Channel::kRead, across, blocks->current, blocks->next_node,
              &traffic->blocks[Link::kInter]);
}

absl::Status Ring::RunRounds(const RingRoute& route, const Block& block, BlockGradients* gradients,
                             GradientTransfers* transfers, const Compute& compute,
                             RingTraffic* traffic) {
  const int rank = route.rank, ranks_per_node = route.ranks_per_node;
  const auto world_size = static_cast<int>(route.lengths.size());
  const bool has_gradients = gradients != nullptr;
  const Tensors own = Own(block);
  const Sums own_gradients = has_gradients ? Sums{Own(gradients->own)} : Sums();
  Visiting blocks;
  blocks.current = own;
  for (int t = 0; t < world_size; ++t) {
    const RingRound& round = route.rounds[t];
    const bool last_in_node = (t + 1) % ranks_per_node == 0;
    BURST_RETURN_IF_ERROR(PostBlocks(route, block, t, &blocks, traffic));
    if (has_gradients) transfers->Begin(round.source);
    if (t == 0) {
      compute(rank, has_gradients ? Part::kFirst : Part::kWhole, blocks.current, own_gradients);
    } else if (round.compute) {
      compute(round.source, Part::kWhole, blocks.current,
              has_gradients ? transfers->Sum(round.source) : Sums());
    }
    ++(t == 0 || round.compute ? traffic->rounds_computed : traffic->rounds_skipped);

    if (has_gradients) {
      BURST_RETURN_IF_ERROR(transfers->Arrive(Link::kIntra, round.source));
      if (last_in_node) {
        BURST_RETURN_IF_ERROR(transfers->Arrive(Link::kInter, round.source));
      }
      BURST_RETURN_IF_ERROR(transfers->Send(round));
    }

    BURST_RETURN_IF_ERROR(Wait(Link::kIntra, Channel::kRead));
    if (last_in_node) {
      BURST_RETURN_IF_ERROR(Wait(Link::kInter, Channel::kRead));
      blocks.next = std::move(blocks.next_node);
      blocks.next_node.clear();
    }
    blocks.previous = std::move(blocks.current);
    blocks.current = std::move(blocks.next);
  }

  if (has_gradients) {
    compute(rank, Part::kSecond, own, own_gradients);
    BURST_RETURN_IF_ERROR(transfers->Finish(&gradients->last));
  }
  return absl::OkStatus();
}

Tensor TakeRows(const Tensor& block, int axis, const std::vector<BlockRows>& rows) {
  Shape shape = block.shape();
  shape[axis] = 0;
  for (const BlockRows& range : rows) shape[axis] += range.count;
  const Tensor taken = Tensor::Empty(shape, block.dtype(), block.device());
  std::vector<TensorCopy> copies;
  int64_t at = 0;
  for (const BlockRows& range : rows) {
    copies.push_back(
        {block.Slice(axis, range.begin, range.count), taken.Slice(axis, at, range.count)});
    at += range.count;
  }
  CopyAll(copies);
  return taken;
}

Ring::Block BlockForSending(Ring::Block block, const std::vector<BlockRows>* rows) {
  absl::InlinedVector<TensorCopy, 4> copies;
  for (Ring::BlockTensor& own : block) {
    if (rows != nullptr) {
      own.tensor = TakeRows(own.tensor, own.length_axis, *rows);
    } else if (!own.tensor.is_contiguous()) {
      copies.push_back({own.tensor, Tensor::EmptyLike(own.tensor)});
      own.tensor = copies.back().to;
    }
  }
  CopyAll(copies);
  return block;
}

}  // namespace burst
