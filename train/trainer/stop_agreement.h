// Lets all ranks agree to stop when a signal has asked one of them to.
#pragma once

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "train/trainer/run_saver.h"

namespace burst {

class StopAgreement {
 public:
  // Both must outlive the object.
  StopAgreement(Communicator* comm, RunSaver* saver) : comm_(comm), saver_(saver) {}

  // All ranks call it between the same two pieces of work. Then all stop there, or none. A rank
  // does not wait for its GPU's part of that work before all have enqueued it. Completes a set of
  // checkpoint files that all ranks have written. Collective.
  absl::Status Agree();

  // Returns whether some rank was asked to stop.
  bool stops() const { return stops_; }

 private:
  Communicator* const comm_;
  RunSaver* const saver_;
  bool stops_ = false;
};

}  // namespace burst
