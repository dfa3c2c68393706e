// The saves of a run: of its state after a step, written while training goes on, one at a time.
//
// Rank 0 writes what it has all of. What ranks have parts of, every one writes its share of, as a
// set (train/checkpoint/checkpoint_set.h), whose index comes last; or, with --checkpoint_files=one,
// rank 0 gathers it while all wait. Every rank has a RunSaver and makes the same calls.
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
  // world: all ranks; tensor: those that have the layers of this rank between them, null for this
  // one alone. All must outlive the object.
  RunSaver(const TrainingSetup& setup, Communicator* world, Communicator* tensor,
           const ParameterList& parameters, const AdamW& optimizer);

  // Before the first save. report: rank 0's, which must outlive the object; null on others.
  // Collective. FailedPrecondition if a rank that writes does not see the run's folder.
  absl::Status Open(RunReport* report);

  // The copy of the state that is written: makes room for it, page-locked for a GPU's, which may
  // wait for all GPUs of the process; its size in the host's memory.
  void Reserve();
  int64_t host_bytes() const { return copy_ == nullptr ? 0 : copy_->bytes(); }

  // Begins to save the state, which is that after `step` steps, once the save before is written.
  // Collective.
  absl::Status Save(int64_t step, std::optional<double> val_loss);
  // Saves all of it at once, in a forked process: rank 0, of what it has all of.
  absl::Status SaveForked(int64_t step, std::optional<double> val_loss);
  // What the newest checkpoint has, or will have.
  int64_t saved_step() const { return saved_step_; }

  // Whether this rank is writing. From any thread.
  bool busy() const { return writing_.busy(); }
  // The state is about to change: waits while it is written from where it is.
  void BeforeUpdate();
  // Tells of what is written, if this rank's save needs nobody else.
  absl::Status EndWritten();
  // A set that this rank has begun. CompleteSet, called once no rank is busy, begins to write the
  // index. Collective.
  bool has_set() const { return set_.has_value(); }
  absl::Status CompleteSet();
  // Waits for the save that is being written, and returns its result; OK if there is none.
  // Collective.
  absl::Status Await();

 private:
  using WriteFile = std::function<absl::Status(const std::string& path)>;
  // A set that is being written, until all its files are.
  struct Set {
    std::string name;
    CheckpointInfo info;
    std::vector<StepMetrics> rows;  // rank 0's
  };

  CheckpointInfo Info(int64_t step, std::optional<double> val_loss) const;
  absl::Status SaveTogether(const CheckpointInfo& info);  // gathered by rank 0
  absl::Status SaveSet(const CheckpointInfo& info);       // this rank's part of it
  absl::Status AwaitWriting();                            // what this rank's thread writes
  absl::Status EndWriting();                              // the same, if that was written already
  absl::Status ShareRunPath();                            // rank 0's run folder, to all
  absl::StatusOr<std::string> ShareString(const std::string& text);  // rank 0's
  absl::Status NotShared(const std::string& path) const;
  // In the run's folder; and the plot. On any thread.
  absl::Status Keep(const CheckpointInfo& info, const std::vector<StepMetrics>& rows,
                    const WriteFile& write);

  const TrainingSetup& setup_;
  const ResolvedConfig& config_;
  Communicator* const world_;
  Communicator* const tensor_;
  const ParameterList& parameters_;
  const AdamW& optimizer_;
  RunReport* report_ = nullptr;      // rank 0's
  std::unique_ptr<StateCopy> copy_;  // of what this rank writes; null if rank 0 gathers it
  std::string run_path_;             // where sets lie
  int64_t saved_step_ = 0;
  std::optional<Set> set_;
  BackgroundTask writing_;  // last: it uses the others
};

}  // namespace burst
