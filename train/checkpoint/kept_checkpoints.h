// The checkpoints that a run folder keeps:
//
//   checkpoint.safetensors          the newest checkpoint
//   checkpoint-<step>.safetensors   the --keep - 1 checkpoints before it
//   best.safetensors                the checkpoint with the lowest validation loss, among those
//                                   that were saved right after an evaluation
//
// At every moment, also if the process is killed or the machine loses its power:
//
// - each file of these names is complete: it was flushed to the disk before it got its name;
// - from the first save on, checkpoint.safetensors has the last step that was saved;
// - a checkpoint loses its last name only after a newer one is complete and has its name.
//
// Any of them may be the index of a set (checkpoint_set.h). Its folder, checkpoint-<step>.set, is
// removed with the last name that leads to it.
//
// A save gives checkpoint.safetensors the second name checkpoint-<step>.safetensors, writes the new
// one under a temporary name and renames it to checkpoint.safetensors. If it is the best, it is
// also named best.safetensors. Then checkpoints that are too old are removed. So a folder holds up
// to --keep + 1 checkpoints, and one more during a save. Names are hard links: no content is
// copied.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/checkpoint/checkpoint.h"

namespace burst {

std::string CheckpointPath(const std::string& folder);  // the newest
std::string OlderCheckpointPath(const std::string& folder, int64_t step);
std::string BestCheckpointPath(const std::string& folder);

// Returns whether the folder holds any of them.
bool HoldsCheckpoints(const std::string& folder);

// Returns the error of a checkpoint that cannot be loaded, and names another one in its folder: the
// newest that VerifyCheckpoint accepts, which reads it whole. `how` says what to do with that one;
// "$NAME" and "$STEP" become its name and step.
absl::Status WithAnotherCheckpoint(const absl::Status& error, const std::string& path,
                                   const std::string& how);

// Returns whether a file of this name is a checkpoint of a run folder.
bool IsCheckpointName(absl::string_view name);

// Makes the folder of a new set, and returns its name.
absl::StatusOr<std::string> MakeSet(const std::string& folder, int64_t step);
// Removes sets that no checkpoint of the folder names: a process was killed while it saved, or the
// checkpoints are gone. Removes nothing while a checkpoint is damaged, because it may name a set.
// No process may write a set meanwhile.
absl::Status RemoveUnusedSets(const std::string& folder);

class KeptCheckpoints {
 public:
  // `resumed` is checkpoint.safetensors, from which the run continues; null if there is none yet.
  KeptCheckpoints(std::string folder, int64_t keep, const CheckpointInfo* resumed);

  // Saves a checkpoint: write(path) writes `step` to `path`, atomically. Later steps are forgotten:
  // a run that continues from an older checkpoint makes them again. A forked process may have saved
  // meanwhile through a copy of this object.
  absl::Status Save(int64_t step, std::optional<double> val_loss,
                    const std::function<absl::Status(const std::string& path)>& write);

  // Completes a save that was killed after it had written the newest checkpoint.
  absl::Status Complete();

  int64_t newest_step() const { return newest_step_; }  // 0: there is none
  // Returns false once the file system has refused a hard link. Only the newest is then kept.
  bool has_links() const { return has_links_; }

 private:
  absl::Status LinkNewest(const std::string& path);
  absl::Status LinkIfBest();
  absl::Status RemoveOld(int64_t step) const;
  void SeeNewest();

  std::string folder_;
  int64_t keep_;
  int64_t newest_step_ = 0;
  std::optional<double> newest_loss_;  // the newest checkpoint's validation loss
  std::string newest_identity_;        // the newest checkpoint's identity
  double best_loss_ = std::numeric_limits<double>::infinity();
  bool has_links_ = true;
};

}  // namespace burst
