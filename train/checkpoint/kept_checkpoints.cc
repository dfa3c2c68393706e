#include "train/checkpoint/kept_checkpoints.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/checkpoint/checkpoint_set.h"
#include "train/checkpoint/safetensors.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr char kNewest[] = "checkpoint.safetensors", kBest[] = "best.safetensors";

// Returns the identity of the file that a path leads to, or an empty text if none can be seen. A
// file that replaces it has another identity.
std::string IdentityOf(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return "";
  return absl::StrCat(info.st_dev, " ", info.st_ino, " ", info.st_size, " ", info.st_mtim.tv_sec,
                      " ", info.st_mtim.tv_nsec);
}

std::string OlderName(int64_t step) { return absl::StrCat("checkpoint-", step, ".safetensors"); }

// Returns the step in the name of an older checkpoint, or nullopt for any other name.
std::optional<int64_t> StepOfOlder(absl::string_view name) {
  absl::string_view digits = name;
  int64_t step = 0;
  const bool is_older = absl::ConsumePrefix(&digits, "checkpoint-") &&
                        absl::ConsumeSuffix(&digits, ".safetensors") &&
                        absl::SimpleAtoi(digits, &step) && name == OlderName(step);
  return is_older ? std::optional<int64_t>(step) : std::nullopt;
}

// Returns the steps of the older checkpoints, the newest first.
std::vector<int64_t> OlderSteps(const std::string& folder) {
  std::vector<int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::optional<int64_t> step = StepOfOlder(entry->path().filename().string());
    if (step.has_value()) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end(), std::greater<>());
  return steps;
}

}  // namespace

std::string CheckpointPath(const std::string& folder) {
  return (fs::path(folder) / kNewest).string();
}

std::string OlderCheckpointPath(const std::string& folder, int64_t step) {
  return (fs::path(folder) / OlderName(step)).string();
}

std::string BestCheckpointPath(const std::string& folder) {
  return (fs::path(folder) / kBest).string();
}

bool IsCheckpointName(absl::string_view name) {
  return name == kNewest || name == kBest || StepOfOlder(name).has_value();
}

bool HoldsCheckpoints(const std::string& folder) {
  std::error_code error;
  return fs::exists(CheckpointPath(folder), error) ||
         fs::exists(BestCheckpointPath(folder), error) || !OlderSteps(folder).empty();
}

absl::Status WithAnotherCheckpoint(const absl::Status& error, const std::string& path,
                                   const std::string& how) {
  const std::string folder = fs::path(path).parent_path().string();
  std::vector<std::string> others = {CheckpointPath(folder)};
  for (const int64_t step : OlderSteps(folder)) others.push_back(OlderCheckpointPath(folder, step));
  others.push_back(BestCheckpointPath(folder));
  for (const std::string& other : others) {
    if (other == path) continue;
    const absl::StatusOr<CheckpointInfo> info = VerifyCheckpoint(other);
    if (!info.ok()) continue;
    const std::string advice = absl::StrReplaceAll(
        how, {{"$NAME", fs::path(other).filename().string()}, {"$STEP", absl::StrCat(info->step)}});
    return absl::Status(error.code(), absl::StrCat(error.message(), "; ", advice));
  }
  return error;
}

absl::StatusOr<std::string> MakeSet(const std::string& folder, int64_t step) {
  for (int64_t number = 1;; ++number) {
    const std::string name = SetName(step, number), path = (fs::path(folder) / name).string();
    std::error_code error;
    if (fs::create_directory(path, error)) {
      BURST_RETURN_IF_ERROR(SyncFolder(folder));
      return name;
    }
    if (error && error != std::errc::file_exists) {
      const bool full = error == std::errc::no_space_on_device;
      return absl::Status(full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kInternal,
                          absl::StrCat("cannot make ", path, ": ", error.message()));
    }
  }
}

absl::Status RemoveUnusedSets(const std::string& folder) {
  std::vector<std::string> sets;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    absl::string_view rest = name;
    if (!absl::ConsumePrefix(&rest, "checkpoint-") || !absl::ConsumeSuffix(&rest, ".set")) continue;
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(rest, '-');
    int64_t step = 0, number = 1;
    if (absl::SimpleAtoi(parts.first, &step) &&
        (parts.second.empty() || absl::SimpleAtoi(parts.second, &number)) &&
        name == SetName(step, number)) {
      sets.push_back(name);
    }
  }
  if (sets.empty()) return absl::OkStatus();
  std::vector<std::string> checkpoints = {CheckpointPath(folder), BestCheckpointPath(folder)};
  for (const int64_t step : OlderSteps(folder)) {
    checkpoints.push_back(OlderCheckpointPath(folder, step));
  }
  std::vector<std::string> used;
  for (const std::string& path : checkpoints) {
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
    if (absl::IsNotFound(file.status())) continue;
    if (!file.ok()) return absl::OkStatus();
    const std::optional<std::string> set = SetOfIndex(*file);
    if (set.has_value()) used.push_back(*set);
  }
  for (const std::string& set : sets) {
    if (std::find(used.begin(), used.end(), set) != used.end()) continue;
    const fs::path path = fs::path(folder) / set;
    fs::remove_all(path, error);
    if (error) {
      return absl::InternalError(
          absl::StrCat("cannot remove ", path.string(), ": ", error.message()));
    }
  }
  return absl::OkStatus();
}

KeptCheckpoints::KeptCheckpoints(std::string folder, int64_t keep, const CheckpointInfo* resumed)
    : folder_(std::move(folder)), keep_(keep) {
  if (resumed == nullptr) return;
  newest_step_ = resumed->step;
  newest_loss_ = resumed->val_loss;
  newest_identity_ = IdentityOf(CheckpointPath(folder_));
  const absl::StatusOr<CheckpointInfo> best = ReadCheckpointInfo(BestCheckpointPath(folder_));
  if (best.ok() && best->val_loss.has_value()) best_loss_ = *best->val_loss;
}

absl::Status KeptCheckpoints::Save(
    int64_t step, std::optional<double> val_loss,
    const std::function<absl::Status(const std::string& path)>& write) {
  SeeNewest();
  if (newest_step_ > 0) {
    BURST_RETURN_IF_ERROR(LinkIfBest());  // a killed process may not have linked it
    if (newest_step_ != step && keep_ > 1) {
      BURST_RETURN_IF_ERROR(LinkNewest(OlderCheckpointPath(folder_, newest_step_)));
    }
  }
  BURST_RETURN_IF_ERROR(write(CheckpointPath(folder_)));
  newest_step_ = step;
  newest_loss_ = val_loss;
  newest_identity_ = IdentityOf(CheckpointPath(folder_));
  return Complete();
}

absl::Status KeptCheckpoints::Complete() {
  BURST_RETURN_IF_ERROR(LinkIfBest());
  // The best checkpoint's name is on the disk before the set that it named is removed.
  BURST_RETURN_IF_ERROR(SyncFolder(folder_));
  BURST_RETURN_IF_ERROR(RemoveOld(newest_step_));
  BURST_RETURN_IF_ERROR(RemoveUnusedSets(folder_));
  return SyncFolder(folder_);
}

// Another process may have saved: one that this process forked, or one whose run it continues.
void KeptCheckpoints::SeeNewest() {
  const std::string identity = IdentityOf(CheckpointPath(folder_));
  if (identity == newest_identity_) return;
  const absl::StatusOr<CheckpointInfo> newest = ReadCheckpointInfo(CheckpointPath(folder_));
  if (!newest.ok()) return;
  newest_step_ = newest->step;
  newest_loss_ = newest->val_loss;
  newest_identity_ = identity;
}

absl::Status KeptCheckpoints::LinkIfBest() {
  if (!newest_loss_.has_value() || !(*newest_loss_ < best_loss_)) return absl::OkStatus();
  best_loss_ = *newest_loss_;
  return LinkNewest(BestCheckpointPath(folder_));
}

absl::Status KeptCheckpoints::LinkNewest(const std::string& path) {
  const absl::Status status = LinkAtomically(CheckpointPath(folder_), path);
  if (!absl::IsUnimplemented(status)) return status;
  has_links_ = false;
  return absl::OkStatus();
}

absl::Status KeptCheckpoints::RemoveOld(int64_t step) const {
  int64_t kept = 1;  // the newest
  for (const int64_t older : OlderSteps(folder_)) {
    if (older < step && kept++ < keep_) continue;
    const std::string path = OlderCheckpointPath(folder_, older);
    if (unlink(path.c_str()) != 0 && errno != ENOENT) {
      return absl::InternalError(absl::StrCat("cannot remove ", path, ": ", strerror(errno)));
    }
  }
  return absl::OkStatus();
}

}  // namespace burst
