#include "train/pipeline/pipeline.h"

#include <map>
#include <utility>

#include "burst/autograd/tape.h"
#include "burst/base/check.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "train/pipeline/schedule.h"

namespace burst {

// A communicator of two ranks: rank 0 is in the earlier stage, rank 1 in the next one. A send ends
// when its receiver has the message. So the link keeps the memory of each channel's last message.
class Pipeline::Link {
 public:
  explicit Link(std::unique_ptr<Communicator> comm) : comm_(std::move(comm)) {}

  // Sends, and returns at once, unless the receiver does not have the previous message yet.
  absl::Status Send(Channel channel, const Tensor& tensor) {
    BURST_RETURN_IF_ERROR(WaitForSend(channel));
    Tensor& sent = channel == Channel::kRead ? forward_ : backward_;
    sent = tensor.Contiguous();
    const SendBuffer send = {sent.raw_data(), sent.size_bytes(), Peer(), sent.device()};
    return comm_->Post(channel, {&send, 1}, {});
  }
  absl::Status WaitForSend(Channel channel) {
    Tensor& sent = channel == Channel::kRead ? forward_ : backward_;
    if (sent.null()) return absl::OkStatus();
    const ScopedWait wait("waits for the next stage to take a message");
    BURST_RETURN_IF_ERROR(comm_->Wait(channel));
    sent = Tensor();
    return absl::OkStatus();
  }
  absl::Status Receive(Channel channel, const Tensor& tensor) {
    const ReceiveBuffer receive = {tensor.raw_data(), tensor.size_bytes(), Peer(), tensor.device()};
    BURST_RETURN_IF_ERROR(comm_->Post(channel, {}, {&receive, 1}));
    const ScopedWait wait("waits for a message of another stage");
    return comm_->Wait(channel);
  }

 private:
  int Peer() const { return 1 - comm_->rank(); }

  const std::unique_ptr<Communicator> comm_;
  Tensor forward_, backward_;  // the messages on their way, or null
};

struct Pipeline::Pass {
  explicit Pass(bool recording) : tape(recording) {}

  Tape tape;
  Variable input, output;
};

Pipeline::Pipeline(const Mesh& mesh, int chunks, int rank)
    : stage_(mesh.stage(rank)), num_stages_(mesh.stages), chunks_(chunks) {}

Pipeline::~Pipeline() = default;

absl::StatusOr<std::unique_ptr<Pipeline>> Pipeline::Create(const Mesh& mesh, int chunks, bool tied,
                                                           Communicator* world) {
  BURST_CHECK(mesh.stages > 1 && world->world_size() == mesh.world_size());
  const int rank = world->rank(), lane = mesh.rank_in_stage(rank);
  std::unique_ptr<Pipeline> pipeline(new Pipeline(mesh, chunks, rank));
  const int stage = pipeline->stage_, last = mesh.stages - 1;
  BURST_ASSIGN_OR_RETURN(pipeline->stages_, world->Split(lane, stage));
  if (tied) {
    BURST_ASSIGN_OR_RETURN(pipeline->tied_,
                           world->Split(stage == 0 || stage == last ? lane : -1, stage));
  }
  // With several chunks, a link also leads from the last stage back to the first one.
  for (int from = 0; from < mesh.stages - (chunks == 1 ? 1 : 0); ++from) {
    const int to = (from + 1) % mesh.stages;
    const bool sends = stage == from, receives = stage == to;
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
                           world->Split(sends || receives ? lane : -1, receives ? 1 : 0));
    if (sends) pipeline->to_next_ = std::make_unique<Link>(std::move(comm));
    if (receives) pipeline->from_previous_ = std::make_unique<Link>(std::move(comm));
  }
  return pipeline;
}

absl::Status Pipeline::Forward(const Transformer& model, SequenceParallelAttention& attention,
                               int chunk, const MicroBatch& micro_batch, const LossTerms& terms,
                               Pass* pass, DeviceSpans* times) {
  const ScopedPhase phase("forward");
  if (stage_ > 0 || chunk > 0) {
    const Tensor received =
        Tensor::Empty(model.StreamShape(micro_batch.batch), model.dtype(), model.device());
    BURST_RETURN_IF_ERROR(from_previous_->Receive(Channel::kRead, received));
    pass->input = Variable(received, /*requires_grad=*/pass->tape.recording());
  }
  times->Begin();
  pass->output = model.ForwardChunk(pass->tape, attention, micro_batch.batch, chunk, pass->input,
                                    terms, micro_batch.dropout);
  BURST_RETURN_IF_ERROR(pass->tape.status());
  times->End();
  if (stage_ + 1 == num_stages_ && chunk + 1 == chunks_) return absl::OkStatus();
  return to_next_->Send(Channel::kRead, pass->output.value());
}

absl::Status Pipeline::Backward(const Transformer& model, int chunk, Pass* pass,
                                DeviceSpans* times) {
  const ScopedPhase phase("backward");
  if (stage_ + 1 == num_stages_ && chunk + 1 == chunks_) {
    times->Begin();
    BURST_RETURN_IF_ERROR(pass->tape.Backward(pass->output));
  } else {
    Tensor gradient = Tensor::Empty(pass->output.shape(), model.dtype(), model.device());
    BURST_RETURN_IF_ERROR(to_next_->Receive(Channel::kGradient, gradient));
    times->Begin();
    BURST_RETURN_IF_ERROR(
        pass->tape.BackwardAndForget(std::exchange(pass->output, {}), std::move(gradient)));
  }
  times->End();
  if (stage_ == 0 && chunk == 0) return absl::OkStatus();
  return from_previous_->Send(Channel::kGradient, pass->input.TakeGrad());
}

absl::Status Pipeline::WaitForSends() {
  if (to_next_ != nullptr) BURST_RETURN_IF_ERROR(to_next_->WaitForSend(Channel::kRead));
  if (from_previous_ == nullptr) return absl::OkStatus();
  return from_previous_->WaitForSend(Channel::kGradient);
}

absl::Status Pipeline::ForwardBackward(const Transformer& model,
                                       SequenceParallelAttention& attention, int micro_batches,
                                       const MicroBatchOf& micro_batch, const LossTerms& terms,
                                       const Tensor& loss, DeviceSpans* times) {
  loss.Fill(0);
  times->Clear();
  std::map<std::pair<int, int>, std::unique_ptr<Pass>> passes;  // by micro-batch and chunk
  for (const PipelineAction& action :
       PipelineActions({num_stages_, chunks_, micro_batches}, stage_)) {
    std::unique_ptr<Pass>& pass = passes[{action.micro_batch, action.chunk}];
    if (!action.forward) {
      BURST_RETURN_IF_ERROR(Backward(model, action.chunk, pass.get(), times));
      passes.erase({action.micro_batch, action.chunk});
      continue;
    }
    BURST_ASSIGN_OR_RETURN(const MicroBatch own, micro_batch(action.micro_batch));
    pass = std::make_unique<Pass>(/*recording=*/true);
    BURST_RETURN_IF_ERROR(Forward(model, attention, action.chunk, own, terms, pass.get(), times));
    if (stage_ + 1 == num_stages_ && action.chunk + 1 == chunks_) {
      loss.Add(pass->output.value().View({1}).To(DType::kFloat64));
    }
  }
  return WaitForSends();
}

absl::StatusOr<Tensor> Pipeline::Loss(const Transformer& model,
                                      SequenceParallelAttention& attention,
                                      const SequenceBatch& batch) {
  Tensor loss;
  DeviceSpans times(model.device());
  for (int chunk = 0; chunk < chunks_; ++chunk) {
    Pass pass(/*recording=*/false);
    BURST_RETURN_IF_ERROR(
        Forward(model, attention, chunk, {batch, DropoutKey()}, /*terms=*/1, &pass, &times));
    if (stage_ + 1 == num_stages_ && chunk + 1 == chunks_) loss = pass.output.value();
  }
  BURST_RETURN_IF_ERROR(WaitForSends());
  return loss;
}

}  // namespace burst
