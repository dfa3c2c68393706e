#include "train/report/run_folder.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"

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

std::string CheckpointPath(const std::string& folder) {
  return (fs::path(folder) / "checkpoint.safetensors").string();
}

absl::StatusOr<RunFolder> RunFolder::Open(const ResolvedConfig& config, int64_t resumed_step) {
  std::string path = config.out;
  if (path.empty()) {
    BURST_ASSIGN_OR_RETURN(path, MakeNumberedFolder(config.model_name));
  } else {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) return CannotMake(path, error);
    if (!config.resume && fs::exists(CheckpointPath(path), error)) {
      return absl::FailedPreconditionError(
          absl::StrCat("--out: ", path,
                       " holds the checkpoint of a run; give --resume to continue "
                       "it, or another folder"));
    }
  }
  BURST_RETURN_IF_ERROR(
      WriteFileAtomically((fs::path(path) / "config.json").string(), config.ToJson()));
  BURST_ASSIGN_OR_RETURN(
      MetricsLog metrics,
      MetricsLog::Open((fs::path(path) / "metrics.jsonl").string(), resumed_step));
  return RunFolder(std::move(path), std::move(metrics));
}

absl::Status RunFolder::Plot(const std::string& title) const {
  return WriteFileAtomically((fs::path(path_) / "loss.svg").string(),
                             LossPlotSvg(title, metrics_.rows()));
}

}  // namespace burst
