#include "burst/attention/ring/ring.h"

#include <utility>

#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

Shape ShapeFor(const Ring::BlockTensor& member, int64_t length) {
  Shape shape = member.tensor.shape();
  shape[member.length_axis] = length;
  return shape;
}

Ring::Tensors Own(const Ring::Block& block) {
  Ring::Tensors tensors;
  for (const Ring::BlockTensor& member : block) tensors.push_back(member.tensor);
  return tensors;
}

void AddTo(const Ring::Tensors& sum, const Ring::Tensors& terms) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i].Add(terms[i]);
}

}  // namespace

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

// The gradients of a pass, on their way: at most one out and one in on each link, and one that has
// arrived ahead of its block's round.
class Ring::Gradients {
 public:
  Gradients(Ring* ring, const RingSchedule& schedule, const Block& own, DType dtype,
            RingTraffic* traffic)
      : ring_(*ring),
        schedule_(schedule),
        own_(own),
        dtype_(dtype),
        narrow_(!own.empty() && dtype != own[0].tensor.dtype()),
        sums_(narrow_ ? ring->spare_sums_ : ring->spare_),
        traffic_(*traffic) {
    Spare(&ring_.home_);
  }
  ~Gradients() {
    for (Link link : kLinks) {
      Spare(&out_[link]);
      Spare(&in_[link]);
    }
    Spare(&ahead_);
    SpareSum();
  }

  // Begins the round of `source`: a gradient of its block that has arrived becomes the sum.
  void Begin(int source) {
    if (ahead_.empty()) return;
    BURST_CHECK(ahead_source_ == source && sum_.empty());
    BeginSum(source, &ahead_);
  }

  // What this rank's part is added to: what has arrived from others, or zero.
  Tensors Sum(int source) {
    if (!sum_.empty()) return View(sum_, source);
    TakeSum();
    const Tensors sum = View(sum_, source);
    for (const Tensor& gradient : sum) gradient.Fill(0);
    return sum;
  }

  // Completes the transfers on a link at the end of the round of `source`.
  absl::Status Arrive(Link link, int source) {
    BURST_RETURN_IF_ERROR(Complete(link));
    Buffer in = std::exchange(in_[link], {});
    if (in.empty()) return absl::OkStatus();
    const int arrived = arriving_[link];
    if (arrived == schedule_.shard().rank()) {
      AddTo(Own(own_), View(in, arrived));
    } else if (arrived != source) {
      BURST_CHECK(ahead_.empty());
      ahead_source_ = arrived;
      std::swap(ahead_, in);
    } else if (sum_.empty()) {
      BeginSum(source, &in);
    } else {
      AddTo(View(sum_, source), View(in, source));
    }
    Spare(&in);
    return absl::OkStatus();
  }

  // Completes all transfers after the last round. *last: what came home with them.
  absl::Status Finish(Tensors* last) {
    for (Link link : kLinks) {
      BURST_RETURN_IF_ERROR(Complete(link));
      if (in_[link].empty()) continue;
      BURST_CHECK(arriving_[link] == schedule_.shard().rank() && last->empty());
      Spare(&ring_.home_);
      std::swap(ring_.home_, in_[link]);
      *last = View(ring_.home_, schedule_.shard().rank());
    }
    return absl::OkStatus();
  }

  // Sends the sum on after the round of `source`, and expects the next.
  absl::Status Send(const RingRound& round) {
    for (Link link : kLinks) {
      const RingTransfer& transfer = round.gradient[link];
      Tensors out, in;
      if (transfer.to >= 0) {
        BURST_CHECK(!sum_.empty() && out_[link].empty());
        if (narrow_) {
          out_[link] = Take();
          Convert(View(sum_, round.source), View(out_[link], round.source));
          SpareSum();
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
  static Buffer TakeFrom(std::vector<Buffer>* spare) {
    if (spare->empty()) return {};
    Buffer buffer = std::move(spare->back());
    spare->pop_back();
    return buffer;
  }
  static void SpareTo(std::vector<Buffer>* spare, Buffer* buffer) {
    if (!buffer->empty()) spare->push_back(std::exchange(*buffer, {}));
  }
  static void Convert(const Tensors& from, const Tensors& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i].ConvertFrom(from[i]);
  }

  Tensors View(const Buffer& buffer, int source) const {
    return ViewFor(own_, buffer, schedule_.shard().length(source));
  }
  Buffer Take() {
    Buffer buffer = TakeFrom(&ring_.spare_);
    Reserve(own_, schedule_.shard().max_length(), &buffer, dtype_);
    return buffer;
  }
  void Spare(Buffer* buffer) { SpareTo(&ring_.spare_, buffer); }
  void TakeSum() {
    sum_ = TakeFrom(&sums_);
    Reserve(own_, schedule_.shard().max_length(), &sum_);
  }
  void SpareSum() { SpareTo(&sums_, &sum_); }
  // What has arrived becomes the sum, in place unless it travelled in another dtype.
  void BeginSum(int source, Buffer* arrived) {
    if (!narrow_) return std::swap(sum_, *arrived);
    TakeSum();
    Convert(View(*arrived, source), View(sum_, source));
    Spare(arrived);
  }
  absl::Status Complete(Link link) {
    BURST_RETURN_IF_ERROR(ring_.Wait(link, Channel::kGradient));
    Spare(&out_[link]);
    return absl::OkStatus();
  }

  Ring& ring_;
  const RingSchedule& schedule_;
  const Block& own_;
  const DType dtype_;  // of gradients on their way
  const bool narrow_;  // sums have another dtype
  std::vector<Buffer>& sums_;
  RingTraffic& traffic_;
  PerLink<Buffer> out_, in_;
  PerLink<int> arriving_;
  Buffer sum_;    // the gradient of the block at work, of this rank and those before it
  Buffer ahead_;  // the same for the next round, whose block is that of rank ahead_source_
  int ahead_source_ = -1;
};

absl::Status Ring::Run(const RingSchedule& schedule, const RingRoute& pass, const Block& block,
                       const Block& gradients, DType gradient_dtype,
                       const std::function<const VisibleKeys&(int source)>& visible,
                       const Compute& compute, RingTraffic* traffic, Tensors* last) {
  const int rank = schedule.shard().rank();
  const int world_size = schedule.shard().world_size(), ranks_per_node = schedule.ranks_per_node();
  const bool has_gradients = !gradients.empty();
  if (has_gradients) last->clear();
  BURST_CHECK(world_size == ranks_per_node || between_nodes_ != nullptr);
  if (world_size == 1) {
    compute(rank, Part::kWhole, visible(rank), Own(block), Own(gradients));
    ++traffic->rounds_computed;
    return absl::OkStatus();
  }
  const auto place_for = [&](Buffer* buffer, int source) {
    Reserve(block, schedule.shard().max_length(), buffer);
    return ViewFor(block, *buffer, schedule.shard().length(source));
  };
  Gradients travelling(this, schedule, gradients, gradient_dtype, traffic);
  Tensors before, at_work = Own(block), next_node;
  for (int t = 0; t < world_size; ++t) {
    const RingRound& round = pass.rounds[t];
    const bool first_in_node = t % ranks_per_node == 0;
    const bool last_in_node = (t + 1) % ranks_per_node == 0;

    // Blocks of later rounds come while this one is at work.
    Tensors next;
    const RingTransfer& within = round.block[Link::kIntra];
    const RingTransfer& across = round.block[Link::kInter];
    if (within.from >= 0) next = place_for(&within_[t % 3], within.arriving);
    if (across.from >= 0) {
      next_node = place_for(&across_[t / ranks_per_node % 2], across.arriving);
    }
    BURST_RETURN_IF_ERROR(Post(Link::kIntra, Channel::kRead, within,
                               first_in_node ? at_work : before, next,
                               &traffic->blocks[Link::kIntra]));
    BURST_RETURN_IF_ERROR(Post(Link::kInter, Channel::kRead, across, at_work, next_node,
                               &traffic->blocks[Link::kInter]));

    if (has_gradients) travelling.Begin(round.source);
    if (t == 0) {
      compute(rank, has_gradients ? Part::kFirst : Part::kWhole, visible(rank), at_work,
              Own(gradients));
    } else if (round.compute) {
      compute(round.source, Part::kWhole, visible(round.source), at_work,
              has_gradients ? travelling.Sum(round.source) : Tensors());
    }
    ++(t == 0 || round.compute ? traffic->rounds_computed : traffic->rounds_skipped);

    if (has_gradients) {
      BURST_RETURN_IF_ERROR(travelling.Arrive(Link::kIntra, round.source));
      if (last_in_node) {
        BURST_RETURN_IF_ERROR(travelling.Arrive(Link::kInter, round.source));
      }
      BURST_RETURN_IF_ERROR(travelling.Send(round));
    }

    BURST_RETURN_IF_ERROR(Wait(Link::kIntra, Channel::kRead));
    if (last_in_node) {
      BURST_RETURN_IF_ERROR(Wait(Link::kInter, Channel::kRead));
      next = std::move(next_node);
      next_node.clear();
    }
    before = std::move(at_work);
    at_work = std::move(next);
  }

  if (has_gradients) {
    compute(rank, Part::kSecond, visible(rank), Own(block), Own(gradients));
    BURST_RETURN_IF_ERROR(travelling.Finish(last));
  }
  return absl::OkStatus();
}

}  // namespace burst
