// A communicator that can skip all messages. Exposed communication is the time by which a run with
// messages is longer than the same run without them.
#pragma once

#include <cstdint>
#include <memory>

#include "burst/comm/communicator.h"

namespace burst {

// Forwards every call to another communicator. While quiet, messages and reductions are skipped:
// Post and the collectives return at once, receive buffers keep their contents, and results are
// wrong. Barrier always works. All ranks must be quiet at the same time, with no message in flight.
class QuietCommunicator : public Communicator {
 public:
  explicit QuietCommunicator(Communicator* inner);  // which must outlive this

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }

  absl::Status Wait(Channel channel) override;
  bool messages_are_kernels(int64_t bytes) const override {
    return inner_->messages_are_kernels(bytes);
  }
  void Abort(const absl::Status& reason) override { inner_->Abort(reason); }
  // The groups are quiet when this one is, and their traffic is counted here.
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;
  absl::Status AllReduceSum(const Tensor& tensor) override;
  absl::Status PostAllReduceSum(const Tensor& tensor) override;
  absl::Status PostAllGatherParts(const Tensor& own, absl::Span<const int64_t> counts,
                                  const Tensor& all) override;
  absl::Status PostReduceScatterSum(const Tensor& all, absl::Span<const int64_t> counts,
                                    const Tensor& own) override;
  absl::Status Barrier() override { return inner_->Barrier(); }

  void set_quiet(bool quiet) { shared_->quiet = quiet; }
  // Bytes that this rank sent in this group and all split from it, as the underlying communicators
  // count them, without barriers and quiet phases.
  int64_t bytes_sent() const { return shared_->bytes_sent; }

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override;

 private:
  struct Shared {
    bool quiet = false;
    int64_t bytes_sent = 0;
  };
  QuietCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Shared> shared);

  template <typename Call>
  absl::Status Counted(Call call);

  std::unique_ptr<Communicator> owned_;  // set in a group
  Communicator* const inner_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace burst
