#include "benchmarks/scaling/quiet_communicator.h"

#include <numeric>
#include <utility>

#include "burst/base/status.h"

namespace burst {
namespace {

int64_t BytesSent(const Communicator& comm) {
  const auto& bytes = comm.stats().bytes_sent;
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

}  // namespace

QuietCommunicator::QuietCommunicator(Communicator* inner)
    : inner_(inner), shared_(std::make_shared<Shared>()) {}

QuietCommunicator::QuietCommunicator(std::unique_ptr<Communicator> inner,
                                     std::shared_ptr<Shared> shared)
    : owned_(std::move(inner)), inner_(owned_.get()), shared_(std::move(shared)) {}

template <typename Call>
absl::Status QuietCommunicator::Counted(Call call) {
  if (shared_->quiet) return absl::OkStatus();
  const int64_t before = BytesSent(*inner_);
  const absl::Status status = call();
  shared_->bytes_sent += BytesSent(*inner_) - before;
  return status;
}

absl::Status QuietCommunicator::DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                                       absl::Span<const ReceiveBuffer> receives) {
  return Counted([&] { return inner_->Post(channel, sends, receives); });
}

absl::Status QuietCommunicator::Wait(Channel channel) {
  return shared_->quiet ? absl::OkStatus() : inner_->Wait(channel);
}

absl::Status QuietCommunicator::AllReduceSum(const Tensor& tensor) {
  return Counted([&] { return inner_->AllReduceSum(tensor); });
}

absl::Status QuietCommunicator::PostAllReduceSum(const Tensor& tensor) {
  return Counted([&] { return inner_->PostAllReduceSum(tensor); });
}

absl::Status QuietCommunicator::PostAllGatherParts(const Tensor& own,
                                                   absl::Span<const int64_t> counts,
                                                   const Tensor& all) {
  return Counted([&] { return inner_->PostAllGatherParts(own, counts, all); });
}

absl::Status QuietCommunicator::PostReduceScatterSum(const Tensor& all,
                                                     absl::Span<const int64_t> counts,
                                                     const Tensor& own) {
  return Counted([&] { return inner_->PostReduceScatterSum(all, counts, own); });
}

absl::StatusOr<std::unique_ptr<Communicator>> QuietCommunicator::Split(int color, int key) {
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> group, inner_->Split(color, key));
  if (group == nullptr) return group;
  return std::unique_ptr<Communicator>(new QuietCommunicator(std::move(group), shared_));
}

}  // namespace burst
