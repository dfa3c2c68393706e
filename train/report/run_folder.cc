#include "train/report/run_folder.h"

#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

absl::Status CannotMake(const std::string& path, const std::error_code& error) {
  return absl::InternalError(
      absl::StrCat("--out: cannot make the folder ", path, ": ", error.message()));
}

absl::StatusOr<std::string> MakeNumberedFolder(const std::string& model_name) {
  const fs::path runs = ResolvePath("runs");
  std::error_code error;
  fs::create_directories(runs, error);
  if (error) return CannotMake(runs.string(), error);
  for (int number = 1;; ++number) {
    const fs::path path = runs / absl::StrCat(model_name, "-", number);
    // Making the folder is the claim to it: of two runs that start at once, one moves on.
    if (fs::create_directory(path, error)) return path.string();
    if (error) return CannotMake(path.string(), error);
  }
}

}  // namespace

std::string DataCacheFolder(const ResolvedConfig& config) {
  if (!config.data_cache.empty()) return config.data_cache;
  fs::path out = config.out.empty() ? fs::path(ResolvePath("runs")) / "run" : fs::path(config.out);
  if (!out.has_filename()) out = out.parent_path();  // FOLDER/
  return (out.parent_path() / ".data-cache").string();
}

absl::StatusOr<RunLock> LockRunFolder(const std::string& folder, bool wait) {
  constexpr double kWaitSeconds = 60, kTellSeconds = 10;
  double next = 0;
  const auto waiting = [&](const std::string& holder, double seconds) -> absl::Status {
    const std::string in_use = absl::StrCat(folder, " is in use by ", holder);
    if (!wait) return absl::FailedPreconditionError(in_use);
    if (seconds >= kWaitSeconds) {
      return absl::FailedPreconditionError(
          absl::StrCat(in_use, ", which did not end in ", kWaitSeconds, " seconds"));
    }
    if (seconds < next) return absl::OkStatus();
    next += kTellSeconds;
    std::printf("%s; waiting up to %.0f seconds for it to end\n", in_use.c_str(), kWaitSeconds);
    std::fflush(stdout);
    return absl::OkStatus();
  };
  absl::StatusOr<FileLock> lock = FileLock::Acquire((fs::path(folder) / ".lock").string(), waiting);
  if (lock.ok()) return std::make_shared<const FileLock>(*std::move(lock));
  const absl::Status& status = lock.status();
  if (!absl::IsUnimplemented(status)) {
    return absl::Status(status.code(), absl::StrCat("--out: ", status.message()));
  }
  std::fprintf(stderr, "warning: %s; nothing keeps a second run out of this folder\n",
               std::string(status.message()).c_str());
  return RunLock();
}

absl::StatusOr<RunFolder> RunFolder::Make(const ResolvedConfig& config) {
  std::string path = config.out;
  if (path.empty()) {
    BURST_ASSIGN_OR_RETURN(path, MakeNumberedFolder(config.model_name));
  } else {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) return CannotMake(path, error);
  }
  // The folder's own name, too. A user may not read what it is in, and can then not flush that.
  SyncFolder(fs::path(path).parent_path().string()).IgnoreError();
  BURST_ASSIGN_OR_RETURN(RunLock lock, LockRunFolder(path, /*wait=*/false));
  if (HoldsCheckpoints(path)) {
    return absl::FailedPreconditionError(
        absl::StrCat("--out: ", path,
                     " holds the checkpoints of a run; give --resume to continue it, or another "
                     "folder"));
  }
  if (config.pretrained.has_value()) {
    BURST_RETURN_IF_ERROR(KeepCompanions(*config.pretrained, path));
  }
  return Open(config, std::move(path), /*resumed=*/nullptr, std::move(lock));
}

absl::StatusOr<RunFolder> RunFolder::Continue(const ResolvedConfig& config,
                                              const CheckpointInfo& resumed, RunLock lock) {
  return Open(config, config.out, &resumed, std::move(lock));
}

absl::StatusOr<RunFolder> RunFolder::Open(const ResolvedConfig& config, std::string path,
                                          const CheckpointInfo* resumed, RunLock lock) {
  const auto in_folder = [&](const char* name) { return (fs::path(path) / name).string(); };
  const std::string settings = in_folder("config.json"), rows = in_folder("metrics.jsonl"),
                    plot = in_folder("loss.svg");
  if (lock != nullptr) {  // then whoever began a file here and did not finish it is dead
    for (const std::string& file :
         {settings, rows, plot, CheckpointPath(path), BestCheckpointPath(path)}) {
      BURST_RETURN_IF_ERROR(RemoveTemporaries(file));
    }
    BURST_RETURN_IF_ERROR(RemoveUnusedSets(path));
  }
  BURST_RETURN_IF_ERROR(WriteFileAtomically(settings, config.ToJson()));
  BURST_ASSIGN_OR_RETURN(MetricsLog metrics,
                         MetricsLog::Open(rows, resumed == nullptr ? 0 : resumed->step));
  KeptCheckpoints checkpoints(path, config.keep, resumed);
  return RunFolder(std::move(path), std::move(lock), std::move(metrics), std::move(checkpoints));
}

absl::Status RunFolder::Save(const CheckpointInfo& info,
                             const std::function<absl::Status(const std::string& path)>& write) {
  BURST_RETURN_IF_ERROR(metrics_.Sync());
  return checkpoints_.Save(info.step, info.val_loss, write);
}

absl::Status RunFolder::Plot(const std::string& title, const std::vector<StepMetrics>& rows) const {
  return WriteFileAtomically((fs::path(path_) / "loss.svg").string(), LossPlotSvg(title, rows));
}

}  // namespace burst
