#include "burst/attention/ring.h"

#include <utility>

#include "burst/base/status.h"

namespace burst {
namespace {

Shape ShapeFor(const Ring::Member& member, int64_t length) {
  Shape shape = member.tensor.shape();
  shape[member.length_axis] = length;
  return shape;
}

Ring::Tensors Own(const Ring::Block& block) {
  Ring::Tensors tensors;
  for (const Ring::Member& member : block) tensors.push_back(member.tensor);
  return tensors;
}

void AddTo(const Ring::Tensors& sum, const Ring::Tensors& terms) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i].Add(terms[i]);
}

}  // namespace

void Ring::Reserve(const Block& block, int64_t max_length, Buffer* buffer) {
  buffer->resize(block.size());
  for (size_t i = 0; i < block.size(); ++i) {
    int64_t numel = 1;
    for (int64_t size : ShapeFor(block[i], max_length)) numel *= size;
    Tensor& tensor = (*buffer)[i];
    const DType dtype = block[i].tensor.dtype();
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

absl::Status Ring::Exchange(Channel channel, const Tensors& out, const Tensors& in, int64_t* hops,
                            int64_t* bytes) {
  if (out.empty() && in.empty()) return absl::OkStatus();
  const int next = (comm_->rank() + 1) % comm_->world_size();
  const int previous = (comm_->rank() + comm_->world_size() - 1) % comm_->world_size();
  absl::InlinedVector<SendBuffer, 4> sends;
  absl::InlinedVector<ReceiveBuffer, 4> receives;
  for (const Tensor& tensor : out) {
    sends.push_back({tensor.raw_data(), tensor.size_bytes(), next, tensor.device()});
    *bytes += tensor.size_bytes();
  }
  for (const Tensor& tensor : in) {
    receives.push_back({tensor.raw_data(), tensor.size_bytes(), previous, tensor.device()});
  }
  *hops += out.empty() ? 0 : 1;
  return comm_->Post(channel, sends, receives);
}

absl::Status Ring::Run(const RingSchedule& schedule, const RingPass& pass, const Block& block,
                       const Block& gradients,
                       const std::function<const VisibleKeys&(int source)>& visible,
                       const Compute& compute, RingTraffic* traffic) {
  const int rank = schedule.rank();
  const int world_size = schedule.world_size();
  const bool has_gradients = !gradients.empty();
  const Tensors own_gradients = Own(gradients);
  if (world_size == 1) {
    compute(rank, visible(rank), Own(block), own_gradients);
    ++traffic->rounds_computed;
    return absl::OkStatus();
  }
  for (Buffer& buffer : visiting_) Reserve(block, schedule.max_length(), &buffer);
  for (Buffer* buffer : {&local_, &outgoing_, &arriving_}) {
    Reserve(gradients, schedule.max_length(), buffer);
  }

  Tensors visitor = Own(block);
  for (int t = 0; t < world_size; ++t) {
    const RingRound& round = pass.rounds[t];
    const bool last = t + 1 == world_size;

    // The next block comes while this one is at work.
    Tensors next_visitor;
    if (!last && pass.rounds[t + 1].receive) {
      const int64_t length = schedule.length(pass.rounds[t + 1].source);
      next_visitor = ViewFor(block, visiting_[t % 2], length);
    }
    BURST_RETURN_IF_ERROR(Exchange(Channel::kRead, round.send ? visitor : Tensors(), next_visitor,
                                   &traffic->block_hops, &traffic->block_bytes));

    const int64_t length = schedule.length(round.source);
    if (t == 0) {
      compute(rank, has_gradients ? schedule.diagonal_part(0) : visible(rank), visitor,
              own_gradients);
    } else if (round.compute) {
      const Tensors local = ViewFor(gradients, local_, length);
      for (const Tensor& gradient : local) gradient.Fill(0);
      compute(round.source, visible(round.source), visitor, local);
    }
    ++(t == 0 || round.compute ? traffic->rounds_computed : traffic->rounds_skipped);

    // The block's gradient from the ranks before this one has arrived meanwhile: add this rank's
    // part and pass it on. The home rank's turn comes after the last round.
    if (has_gradients && t > 0) {
      BURST_RETURN_IF_ERROR(comm_->Wait(Channel::kGradient));
      if (round.receive_gradient && round.compute) {
        AddTo(ViewFor(gradients, local_, length), ViewFor(gradients, arriving_, length));
      } else if (round.receive_gradient) {
        std::swap(local_, arriving_);
      }
      const bool receive = last ? pass.gradient_returns : pass.rounds[t + 1].receive_gradient;
      const int64_t next_length = schedule.length(last ? rank : pass.rounds[t + 1].source);
      BURST_RETURN_IF_ERROR(Exchange(
          Channel::kGradient, round.send_gradient ? ViewFor(gradients, local_, length) : Tensors(),
          receive ? ViewFor(gradients, arriving_, next_length) : Tensors(), &traffic->gradient_hops,
          &traffic->gradient_bytes));
      std::swap(local_, outgoing_);
    }

    BURST_RETURN_IF_ERROR(comm_->Wait(Channel::kRead));
    visitor = std::move(next_visitor);
  }

  if (has_gradients) {
    compute(rank, schedule.diagonal_part(1), Own(block), own_gradients);
    BURST_RETURN_IF_ERROR(comm_->Wait(Channel::kGradient));
    if (pass.gradient_returns)
      AddTo(own_gradients, ViewFor(gradients, arriving_, schedule.length()));
  }
  return absl::OkStatus();
}

}  // namespace burst
