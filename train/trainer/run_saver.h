// Saves a run's state after a step, one save at a time, and writes it while training goes on.
//
// If rank 0 has the whole state, it writes it. If ranks have parts, every rank writes its share as
// a set (train/checkpoint/checkpoint_set.h), whose index comes last. With --checkpoint_files=one,
// rank 0 gathers the parts while all wait. Every rank has a RunSaver and makes the same calls. With
// --checkpoint_files=none nobody calls Save.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "model/parameters.h"
#include "train/checkpoint/background_task.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/state_copy.h"
#include "train/optimizer/adamw.h"
#include "train/report/metrics.h"
#include "train/report/run_report.h"
#include "train/run/setup.h"

namespace burst {

class RunSaver {
 public:
  // `world` has all ranks. `tensor` has the ranks that share this rank's layers; null if it is
  // alone. All must outlive the object.
  RunSaver(const TrainingSetup& setup, Communicator* world, Communicator* tensor,
           const ParameterList& parameters, const AdamW& optimizer);

  // Prepares the first save. `report` is rank 0's, which must outlive the object, and null on other
  // ranks. Collective. FailedPrecondition means that a rank that writes does not see the run's
  // folder.
  absl::Status Open(RunReport* report);

  // Reserve takes memory for the copy of the state, page-locked for a GPU's state; it may wait for
  // all GPUs of the process. The size is in bytes of the host's memory.
  void Reserve();
  int64_t host_bytes() const { return copy_ == nullptr ? 0 : copy_->bytes(); }

  // Begins to save the state after `step` steps, once the previous save is written. Collective.
  absl::Status Save(int64_t step, std::optional<double> val_loss);
  // Saves at once, in a forked process of rank 0, which must have the whole state.
  absl::Status SaveForked(int64_t step, std::optional<double> val_loss);
  // Returns the step of the newest checkpoint, which may still be written.
  int64_t saved_step() const { return saved_step_; }

  // Returns whether this rank is writing. Any thread may call it.
  bool busy() const { return writing_.busy(); }
  // Call it before the state changes. It waits while the state itself is being written.
  void BeforeUpdate();
  // Reports a written save that needs no other rank.
  absl::Status EndWritten();
  // Returns whether this rank has begun a set. CompleteSet, which is called once no rank is busy,
  // begins to write the index. Collective.
  bool has_set() const { return set_.has_value(); }
  absl::Status CompleteSet();
  // Waits for the current save and returns its result; OK if there is no save. Collective.
  absl::Status Await();

 private:
  using WriteFile = std::function<absl::Status(const std::string& path)>;
  // A set that is being written, until all its files are.
  struct Set {
    std::string name;
    CheckpointInfo info;
    std::vector<StepMetrics> rows;  // only on rank 0
  };

  CheckpointInfo Info(int64_t step, std::optional<double> val_loss) const;
  absl::Status SaveTogether(const CheckpointInfo& info);  // rank 0 gathers the state
  absl::Status SaveSet(const CheckpointInfo& info);       // saves this rank's part of a set
  absl::Status AwaitWriting();                            // waits for this rank's thread
  absl::Status EndWriting();                              // ends a written save without waiting
  absl::Status ShareRunPath();                            // sends rank 0's run folder to all
  absl::StatusOr<std::string> ShareString(const std::string& text);  // sends rank 0's text to all
  absl::Status NotShared(const std::string& path) const;
  // Keeps a checkpoint in the run's folder and draws the plot, on any thread.
  absl::Status Keep(const CheckpointInfo& info, const std::vector<StepMetrics>& rows,
                    const WriteFile& write);

  const TrainingSetup& setup_;
  const ResolvedConfig& config_;
  Communicator* const world_;
  Communicator* const tensor_;
  const ParameterList& parameters_;
  const AdamW& optimizer_;
  RunReport* report_ = nullptr;      // only on rank 0
  std::unique_ptr<StateCopy> copy_;  // this rank's part; null if rank 0 gathers the state
  std::string run_path_;             // the folder of the sets
  int64_t saved_step_ = 0;
  std::optional<Set> set_;
  BackgroundTask writing_;  // last: it uses the others
};

// Lets all ranks agree to stop when a signal has asked one of them to.
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
