#include "train/report/run_folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/json.h"
#include "burst/base/print_error.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/huggingface/pretrained.h"
#include "train/report/run_facts.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr char kSettings[] = "config.json", kMetrics[] = "metrics.jsonl", kPlot[] = "loss.svg",
               kCompanionFolder[] = "huggingface";

absl::Status CannotMake(const std::string& path, const std::error_code& error) {
  return absl::InternalError(
      absl::StrCat("--out: cannot make the folder ", path, ": ", error.message()));
}

// Returns the error of a save that finds the folder changed by others.
absl::Status NotOurs(const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("--out: ", status.message()));
}

// Returns whether a config.json is a run's: no other program's config.json has these options.
bool IsOfRun(const std::string& settings) {
  const absl::StatusOr<std::string> text = ReadFile(settings, kMaxSettingsBytes);
  const absl::StatusOr<nlohmann::json> json = text.ok() ? ParseJson(*text) : text.status();
  if (!json.ok() || !json->is_object()) return false;
  constexpr const char* kOptions[] = {"seqlen", "steps", "checkpoint_every", "eval_batches"};
  return std::all_of(std::begin(kOptions), std::end(kOptions),
                     [&](const char* option) { return json->contains(option); });
}

// Checks that a new run replaces only files of runs. A run's first file is its config.json.
absl::Status CheckNotOthers(const std::string& folder) {
  constexpr const char* kModels[] = {"model.safetensors", "model.safetensors.index.json",
                                     "pytorch_model.bin", "pytorch_model.bin.index.json"};
  const auto there = [&](const char* name) {
    std::error_code error;
    return fs::exists(fs::symlink_status(fs::path(folder) / name, error));
  };
  for (const char* name : kModels) {
    if (!there(name)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("--out: ", folder, " holds a model (", name, "); give another folder"));
  }
  if (IsOfRun((fs::path(folder) / kSettings).string())) return absl::OkStatus();
  for (const char* name : {kSettings, kMetrics, kPlot, kCompanionFolder}) {
    if (!there(name)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "--out: ", folder, " holds ", name, ", which is not of a run; give another folder"));
  }
  return absl::OkStatus();
}

// Removes what killed processes left in a run's folder. The caller holds the folder's lock, so a
// process with an unfinished file is dead.
absl::Status RemoveLeftovers(const std::string& folder) {
  BURST_RETURN_IF_ERROR(RemoveTemporaries(folder, [](absl::string_view name) {
    return name == kSettings || name == kMetrics || name == kPlot || name == kRunFacts ||
           IsCheckpointName(name);
  }));
  const std::string companions = (fs::path(folder) / kCompanionFolder).string();
  std::error_code error;
  if (fs::is_directory(companions, error)) {
    BURST_RETURN_IF_ERROR(RemoveTemporaries(companions, [](absl::string_view) { return true; }));
  }
  return RemoveUnusedSets(folder);
}

// Lists the content of a folder for a comparison: names, and for a checkpoint its file.
std::map<std::string, uintmax_t> NamesIn(const std::string& folder) {
  std::map<std::string, uintmax_t> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    struct stat info = {};
    const bool told = IsCheckpointName(name) && stat(entry->path().c_str(), &info) == 0;
    names[name] = told ? info.st_ino : 0;
  }
  return names;
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
               Printable(status.message()).c_str());
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
  // The folder's own name is flushed, too. If the user may not read the parent folder, this fails
  // and the error is ignored.
  SyncFolder(fs::path(path).parent_path().string()).IgnoreError();
  BURST_RETURN_IF_ERROR(CheckNotOthers(path));
  BURST_ASSIGN_OR_RETURN(RunLock lock, LockRunFolder(path, /*wait=*/false));
  if (HoldsCheckpoints(path)) {
    return absl::FailedPreconditionError(
        absl::StrCat("--out: ", path,
                     " holds the checkpoints of a run; give --resume to continue it, or another "
                     "folder"));
  }
  BURST_ASSIGN_OR_RETURN(RunFolder folder,
                         Open(config, std::move(path), /*resumed=*/nullptr, std::move(lock)));
  if (config.pretrained.has_value()) {
    BURST_RETURN_IF_ERROR(KeepCompanions(*config.pretrained, folder.path()));
  }
  return folder;
}

absl::StatusOr<RunFolder> RunFolder::Continue(const ResolvedConfig& config,
                                              const CheckpointInfo& resumed, RunLock lock) {
  return Open(config, config.out, &resumed, std::move(lock));
}

absl::StatusOr<bool> RunFolder::Repair(const ResolvedConfig& config, const CheckpointInfo& resumed,
                                       const RunLock& lock) {
  const std::string& path = config.out;
  const std::map<std::string, uintmax_t> before = NamesIn(path);
  if (lock != nullptr) BURST_RETURN_IF_ERROR(RemoveLeftovers(path));
  BURST_RETURN_IF_ERROR(KeptCheckpoints(path, config.keep, &resumed).Complete());
  BURST_ASSIGN_OR_RETURN(const MetricsLog metrics,
                         MetricsLog::Open((fs::path(path) / kMetrics).string(), resumed.step));
  const std::string plot = (fs::path(path) / kPlot).string();
  const std::string drawn = LossPlotSvg(config.model_name, metrics.rows());
  const bool plotted = ReadFile(plot).value_or("") == drawn;
  // The run is complete without the plot.
  if (!plotted) WriteFileAtomically(plot, drawn).IgnoreError();
  return NamesIn(path) != before || !plotted;
}

absl::StatusOr<RunFolder> RunFolder::Open(const ResolvedConfig& config, std::string path,
                                          const CheckpointInfo* resumed, RunLock lock) {
  const auto in_folder = [&](const char* name) { return (fs::path(path) / name).string(); };
  if (lock != nullptr) BURST_RETURN_IF_ERROR(RemoveLeftovers(path));
  BURST_RETURN_IF_ERROR(WriteFileAtomically(in_folder(kSettings), config.ToJson()));
  BURST_ASSIGN_OR_RETURN(
      MetricsLog metrics,
      MetricsLog::Open(in_folder(kMetrics), resumed == nullptr ? 0 : resumed->step));
  KeptCheckpoints checkpoints(path, config.keep, resumed);
  return RunFolder(std::move(path), std::move(lock), std::move(metrics), std::move(checkpoints));
}

absl::Status RunFolder::Save(const CheckpointInfo& info,
                             const std::function<absl::Status(const std::string& path)>& write) {
  if (lock_ != nullptr) BURST_RETURN_IF_ERROR(NotOurs(lock_->CheckStillThere()));
  BURST_RETURN_IF_ERROR(metrics_.Sync());
  BURST_RETURN_IF_ERROR(checkpoints_.Save(info.step, info.val_loss, write));
  return NotOurs(metrics_.CheckStillThere());
}

absl::Status RunFolder::Plot(const std::string& title, const std::vector<StepMetrics>& rows) const {
  return WriteFileAtomically((fs::path(path_) / kPlot).string(), LossPlotSvg(title, rows));
}

}  // namespace burst
