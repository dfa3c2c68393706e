#include "train/trainer/stop_agreement.h"

#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/cli/process.h"
#include "burst/tensor/tensor.h"

namespace burst {

absl::Status StopAgreement::Agree() {
  const ScopedPhase phase("agreement whether to stop");
  const Tensor sums = Tensor::FromVector<double>(
      {InterruptSignal() != 0 ? 1.0 : 0.0, saver_->busy() ? 1.0 : 0.0}, {2});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sums));
  stops_ = stops_ || sums.data<double>()[0] > 0;
  // Either all ranks know of a set, or none.
  if (saver_->has_set() && sums.data<double>()[1] == 0) return saver_->CompleteSet();
  return absl::OkStatus();
}

}  // namespace burst
