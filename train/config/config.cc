#include "train/config/config.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "burst/base/status.h"
#include "burst/base/version.h"
#include "burst/cli/files.h"
#include "train/checkpoint/kept_checkpoints.h"

namespace burst {

std::vector<std::string> IgnoredFields(const TrainConfig& config) {
  return absl::StrSplit(config.ignore_fields, ',', absl::SkipEmpty());
}

absl::StatusOr<TrainConfig> TrainConfigFromArguments(int argc, char** argv) {
  // What the file of options and the command line give, which override the run.
  TrainConfig asked;
  OptionTable given = TrainOptions(&asked);
  BURST_RETURN_IF_ERROR(given.ParseArguments(argc, argv));  // finds the file
  const std::string named = asked.config, file = ResolvePath(named);
  const auto read_given = [&](OptionTable* table) -> absl::Status {
    if (!file.empty()) {
      const absl::Status status = table->ParseFile(file);
      if (!status.ok()) return InvalidOption("config", status.message());
      const std::string nested = (*table)["config"].get();
      if (!nested.empty() && nested != named) {
        return InvalidOption("config", file, ": must not name another file of options; got ",
                             nested, "; leave config out of it");
      }
    }
    return table->ParseArguments(argc, argv);
  };
  BURST_RETURN_IF_ERROR(read_given(&given));

  TrainConfig config;
  OptionTable options = TrainOptions(&config);
  const std::string out = ResolvePath(asked.out);
  const bool has_run = !out.empty() && HoldsCheckpoints(out);
  config.resume =
      asked.resume_mode == Resume::kYes || (asked.resume_mode == Resume::kAuto && has_run);
  if (config.resume && !out.empty()) {
    const absl::Status status = options.ParseFile(out + "/config.json", /*saved=*/true);
    if (!status.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("--resume: ", out, " holds no run to continue: ", status.message()));
    }
  }
  BURST_RETURN_IF_ERROR(read_given(&options));
  // A mesh that contradicts the run's --ranks says how many ranks there are.
  if (!given.Named("ranks") && !config.MeshMayHave(config.ranks)) config.ranks = -1;
  return config;
}

std::string TrainHelp() {
  TrainConfig defaults;
  return TrainOptions(&defaults).Help(
      "Trains a Transformer whose attention runs over a ring of ranks (BurstAttention).\n"
      "\n"
      "  bazel run //train                                   a small model on a book, three "
      "minutes\n"
      "  bazel run //train -- --data=my.txt --ranks=4        your text, four ranks\n"
      "  bazel run //train -- --resume --out=runs/NAME       continue a run\n"
      "  bazel run //train -- --resume=auto --out=runs/NAME  start it, or continue it\n"
      "  bazel run //train:generate -- --checkpoint=runs/NAME --prompt='In the beginning'\n"
      "\n"
      "Options, with their defaults. Relative paths start where the command is given. Ctrl-C\n"
      "(or SIGTERM, SIGUSR1) finishes the step, writes a checkpoint and exits with 130.\n");
}

void ResolvedConfig::ResolveCheckpointFiles() {
  const bool parted = zero > 0 || pp > 1 || mesh.tensor > 1;
  checkpoint_files = given_.checkpoint_files != CheckpointFiles::kAuto ? given_.checkpoint_files
                     : parted                                          ? CheckpointFiles::kRanks
                                                                       : CheckpointFiles::kOne;
}

std::string ResolvedConfig::Sentences() const {
  TrainConfig given;
  const OptionTable table = TrainOptions(&given);
  given = given_;  // set after the table has seen the defaults
  return table.Sentences();
}

std::vector<std::string> ResolvedConfig::ChangesFrom(const PlainOptions& before) const {
  TrainConfig was, is;
  static_cast<PlainOptions&>(was) = before;
  static_cast<PlainOptions&>(is) = *this;
  return OptionTable::Changes(TrainOptions(&was), TrainOptions(&is));
}

std::string ResolvedConfig::ToJson() const {
  TrainConfig given = given_;
  return TrainOptions(&given).ToJson();
}

std::vector<AgreedItem> ResolvedConfig::AgreedOptions(bool one_host) const {
  TrainConfig given = given_;
  std::vector<AgreedItem> items = burst::AgreedOptions(TrainOptions(&given), one_host);
  // These are the values that this host chose for options that leave a choice.
  items.push_back({"--device", Name(device)});
  items.push_back({"--precision", tf32 ? "tf32" : Name(dtype)});
  items.push_back({"--dp, --pp, --sp and --tp", absl::StrCat(mesh.data, ", ", mesh.stages, ", ",
                                                             mesh.sequence, " and ", mesh.tensor)});
  items.push_back({"--checkpoint_files", NameOf(checkpoint_files, kCheckpointFiles)});
  return items;
}

absl::Status ResolvedConfig::CheckResume(absl::string_view config_json) const {
  TrainConfig before, after = given_;
  OptionTable options = TrainOptions(&before);
  BURST_RETURN_IF_ERROR(options.ParseJson(config_json, /*saved=*/true));
  return OptionTable::CheckResume(options, TrainOptions(&after));
}

std::vector<AgreedItem> AgreedOptions(const OptionTable& options, bool one_host) {
  std::vector<AgreedItem> items = {{"the version of Burst", kVersion}};
  for (const Option& option : options.options()) {
    const bool compared = option.scope == Scope::kJob || (option.scope == Scope::kHost && one_host);
    if (compared) items.push_back({absl::StrCat("--", option.name), option.get()});
  }
  return items;
}

bool LaunchIsOnOneHost() {
  const auto launch = DetectProcessLaunch(std::getenv);
  return launch.ok() && launch->has_value() && !(*launch)->several_hosts;
}

}  // namespace burst
