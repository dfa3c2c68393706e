#include "train/huggingface/pretrained.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/huggingface/config.h"
#include "train/huggingface/directory.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr char kConfig[] = "config.json";
// What others call a model's tokenizer and its settings.
constexpr const char* kCompanions[] = {"tokenizer.json",     "tokenizer_config.json",
                                       "tokenizer.model",    "special_tokens_map.json",
                                       "added_tokens.json",  "vocab.json",
                                       "merges.txt",         "chat_template.jinja",
                                       "chat_template.json", "generation_config.json"};

bool Exists(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

}  // namespace

absl::StatusOr<Pretrained> FindPretrained(const std::string& folder) {
  Pretrained pretrained;
  if (HoldsCheckpoints(folder)) {
    pretrained.kind = Pretrained::Kind::kCheckpoint;
    pretrained.path = CheckpointPath(folder);
    BURST_ASSIGN_OR_RETURN(const CheckpointInfo info, ReadCheckpointInfo(pretrained.path));
    pretrained.model = info.model;
    pretrained.window = info.window;
    return pretrained;
  }
  pretrained.path = folder;
  BURST_ASSIGN_OR_RETURN(const std::string json, ReadFile((fs::path(folder) / kConfig).string()));
  const absl::StatusOr<HuggingFaceConfig> config = ParseHuggingFaceConfig(json);
  if (!config.ok()) {
    return absl::Status(config.status().code(),
                        absl::StrCat(folder, ": ", config.status().message()));
  }
  pretrained.model = config->model;
  pretrained.window = config->window;
  return pretrained;
}

absl::Status LoadPretrained(const Pretrained& pretrained, ParameterList* parameters) {
  if (pretrained.kind == Pretrained::Kind::kCheckpoint) {
    return LoadCheckpoint(pretrained.path, parameters, /*optimizer=*/nullptr);
  }
  BURST_ASSIGN_OR_RETURN(const HuggingFaceDirectory directory,
                         HuggingFaceDirectory::Open(pretrained.path));
  return directory.Load(parameters);
}

std::string CompanionsOf(const std::string& checkpoint) {
  return (fs::path(checkpoint).parent_path() / "huggingface").string();
}

absl::Status CopyCompanions(const std::string& from, const std::string& to, bool with_config) {
  std::error_code error;
  fs::create_directories(to, error);
  if (error) {
    return absl::InternalError(absl::StrCat("cannot make the folder ", to, ": ", error.message()));
  }
  const auto copy = [&](const char* name) -> absl::Status {
    if (!Exists(fs::path(from) / name)) return absl::OkStatus();
    BURST_ASSIGN_OR_RETURN(const std::string content, ReadFile((fs::path(from) / name).string()));
    return WriteFileAtomically((fs::path(to) / name).string(), content);
  };
  for (const char* name : kCompanions) BURST_RETURN_IF_ERROR(copy(name));
  return with_config ? copy(kConfig) : absl::OkStatus();
}

absl::Status KeepCompanions(const Pretrained& pretrained, const std::string& folder) {
  const std::string from = pretrained.kind == Pretrained::Kind::kCheckpoint
                               ? CompanionsOf(pretrained.path)
                               : pretrained.path;
  if (!Exists(from)) return absl::OkStatus();
  return CopyCompanions(from, (fs::path(folder) / "huggingface").string(), /*with_config=*/true);
}

}  // namespace burst
