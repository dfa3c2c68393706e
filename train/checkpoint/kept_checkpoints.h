// The checkpoints that a run folder keeps:
//
//   checkpoint.safetensors          the newest
//   checkpoint-<step>.safetensors   those before it, --keep - 1 of them
//   best.safetensors                of those saved right after an evaluation, the one with the
//                                   lowest validation loss
//
// At every moment, also if the process is killed or the machine loses its power in the next:
//
// - each file of these names is complete: it was flushed to the disk before it got its name;
// - from the first save on there is a checkpoint.safetensors, of the last step that was saved;
// - a checkpoint loses its last name only after a newer one is complete and has its name.
//
// Any of them may be the index of a set (checkpoint_set.h), whose folder, checkpoint-<step>.set, is
// removed with the last of the names that lead to it.
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

// Whether there is any of them.
bool HoldsCheckpoints(const std::string& folder);

// Why `path`, a checkpoint that cannot be loaded, cannot, and which other one of its folder can:
// the newest of those that VerifyCheckpoint accepts, which it reads whole. `how`: what to do with
// it, "$NAME" and "$STEP" being its name and step.
absl::Status WithAnotherCheckpoint(const absl::Status& error, const std::string& path,
                                   const std::string& how);

// Whether a file of this name is one of them.
bool IsCheckpointName(absl::string_view name);

// Makes the folder of a new set; returns its name.
absl::StatusOr<std::string> MakeSet(const std::string& folder, int64_t step);
// Removes sets that no checkpoint of the folder names: those that a process left which was killed
// while it saved, or whose checkpoints are gone. Nothing, while a checkpoint there is damaged: it
// may be the one that names a set. None may be being written.
absl::Status RemoveUnusedSets(const std::string& folder);

class KeptCheckpoints {
 public:
  // `resumed`: checkpoint.safetensors, from which the run continues; null: there is none yet.
  KeptCheckpoints(std::string folder, int64_t keep, const CheckpointInfo* resumed);

  // write(path) writes the checkpoint of `step` to `path`, atomically. Steps beyond `step`, which a
  // run has that is continued from an older checkpoint, are forgotten: they are being made again.
  // A process that this one forked may have saved since, through a copy of this object.
  absl::Status Save(int64_t step, std::optional<double> val_loss,
                    const std::function<absl::Status(const std::string& path)>& write);

  // Does what a save did not come to that was killed after it had written the newest.
  absl::Status Complete();

  int64_t newest_step() const { return newest_step_; }  // 0: there is none
  // False once the file system turned out to have no hard links: the newest is all that is kept.
  bool has_links() const { return has_links_; }

 private:
  absl::Status LinkNewest(const std::string& path);
  absl::Status LinkIfBest();
  absl::Status RemoveOld(int64_t step) const;
  void SeeNewest();

  std::string folder_;
  int64_t keep_;
  int64_t newest_step_ = 0;
  std::optional<double> newest_loss_;  // in validation, as the next one
  std::string newest_identity_;        // of the file that these are of
  double best_loss_ = std::numeric_limits<double>::infinity();
  bool has_links_ = true;
};

}  // namespace burst
