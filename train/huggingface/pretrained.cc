#include "train/huggingface/pretrained.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "burst/base/print_error.h"
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
constexpr const char* kCompanions[] = {"tokenizer.json",     "tokenizer_config.json",
                                       "tokenizer.model",    "special_tokens_map.json",
                                       "added_tokens.json",  "vocab.json",
                                       "merges.txt",         "chat_template.jinja",
                                       "chat_template.json", "generation_config.json"};

absl::Status MakeFolder(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cannot make the folder ", path, ": ", error.message()));
}

bool Exists(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// Returns whether a file, whose path holds no link, belongs to the model's directory. If the
// directory is a snapshot of a Hugging Face cache (models--NAME/snapshots/COMMIT), the cache's
// blobs belong to it. Without this check, links in someone else's directory could lead to the
// user's own files.
bool BelongsTo(const fs::path& file, const fs::path& directory) {
  const auto lies_in = [&](const fs::path& folder) {
    return std::mismatch(folder.begin(), folder.end(), file.begin(), file.end()).first ==
           folder.end();
  };
  std::error_code error;
  const fs::path own = fs::canonical(directory, error);
  if (error) return false;
  if (lies_in(own)) return true;
  for (fs::path folder = own; folder.has_relative_path(); folder = folder.parent_path()) {
    if (folder.filename() == "snapshots" && lies_in(folder.parent_path() / "blobs")) return true;
  }
  return false;
}

// Returns whether a file of this name holds weights of any program.
bool HoldsWeights(absl::string_view name) {
  if (absl::EndsWith(name, ".bin")) {
    return absl::StartsWith(name, "pytorch_model") || absl::StartsWith(name, "adapter_model");
  }
  for (const char* end : {".safetensors", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".gguf"}) {
    if (absl::EndsWith(name, end)) return true;
  }
  return false;
}

std::vector<std::string> FindUnread(const std::string& folder) {
  std::vector<std::string> unread;
  const absl::StatusOr<std::set<std::string>> read = WeightFiles(folder);
  if (!read.ok()) return unread;  // the later reading reports the error
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (HoldsWeights(name) && read->count(name) == 0) unread.push_back(name);
  }
  std::sort(unread.begin(), unread.end());
  return unread;
}

}  // namespace

std::string UnreadWeights(const Pretrained& pretrained) {
  constexpr size_t kShown = 3;
  const std::vector<std::string>& all = pretrained.unread;
  if (all.empty()) return "";
  std::vector<std::string> shown(all.begin(), all.begin() + std::min(kShown, all.size()));
  for (std::string& name : shown) name = absl::Utf8SafeCEscape(name);
  if (all.size() > kShown) shown.push_back(absl::StrCat(all.size() - kShown, " more"));
  return absl::StrCat(absl::StrJoin(shown, ", "), " next to the weights ",
                      all.size() == 1 ? "is" : "are", " not read");
}

absl::StatusOr<Pretrained> FindPretrained(const std::string& folder,
                                          const std::vector<std::string>& ignored) {
  Pretrained pretrained;
  pretrained.ignored = ignored;
  if (HoldsCheckpoints(folder)) {
    if (!ignored.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          folder,
          ": --ignore_fields must be empty for a checkpoint, which has no config.json of "
          "Hugging Face; got '",
          absl::StrJoin(ignored, ","), "'; leave it out"));
    }
    pretrained.kind = Pretrained::Kind::kCheckpoint;
    pretrained.path = CheckpointPath(folder);
    BURST_ASSIGN_OR_RETURN(const CheckpointInfo info, ReadCheckpointInfo(pretrained.path));
    pretrained.model = info.model;
    pretrained.window = info.window;
    pretrained.identity = info.identity;
    return pretrained;
  }
  pretrained.path = folder;
  BURST_ASSIGN_OR_RETURN(const std::string json,
                         ReadFile((fs::path(folder) / kConfig).string(), kMaxSettingsBytes));
  const absl::StatusOr<std::string> read = WithoutFields(json, ignored);
  const absl::StatusOr<HuggingFaceConfig> config =
      read.ok() ? ParseHuggingFaceConfig(*read) : read.status();
  if (!config.ok()) {
    return absl::Status(config.status().code(),
                        absl::StrCat(folder, ": ", config.status().message()));
  }
  pretrained.model = config->model;
  pretrained.window = config->window;
  pretrained.unread = FindUnread(folder);
  return pretrained;
}

absl::Status LoadPretrained(const Pretrained& pretrained, ParameterList* parameters) {
  if (pretrained.kind == Pretrained::Kind::kCheckpoint) {
    return LoadCheckpoint(pretrained.path, parameters, /*optimizer=*/nullptr, pretrained.identity);
  }
  BURST_ASSIGN_OR_RETURN(const HuggingFaceDirectory directory,
                         HuggingFaceDirectory::Open(pretrained.path, pretrained.ignored));
  return directory.Load(parameters);
}

absl::StatusOr<Tokenizer> TokenizerOf(const Pretrained& pretrained) {
  if (pretrained.kind == Pretrained::Kind::kHuggingFace) return Tokenizer::Load(pretrained.path);
  BURST_ASSIGN_OR_RETURN(CheckpointInfo info, ReadCheckpointInfo(pretrained.path));
  if (info.tokenizer.has_value()) return *std::move(info.tokenizer);
  const std::string companions = CompanionsOf(pretrained.path);
  if (Exists(companions)) return Tokenizer::Load(companions);
  return absl::NotFoundError(absl::StrCat(pretrained.path, " holds no tokenizer"));
}

absl::StatusOr<std::string> FingerprintOf(const Pretrained& pretrained) {
  if (pretrained.kind == Pretrained::Kind::kCheckpoint) return pretrained.identity;
  BURST_ASSIGN_OR_RETURN(const HuggingFaceDirectory directory,
                         HuggingFaceDirectory::Open(pretrained.path, pretrained.ignored));
  return directory.Fingerprint();
}

absl::Span<const char* const> CompanionNames() { return kCompanions; }

std::string CompanionsOf(const std::string& checkpoint) {
  return (fs::path(checkpoint).parent_path() / "huggingface").string();
}

int64_t ContextOf(const std::string& checkpoint, const CheckpointInfo& info) {
  const bool began_with_weights = Exists(fs::path(CompanionsOf(checkpoint)) / kConfig);
  return began_with_weights ? std::max(info.seqlen, info.model.context) : info.seqlen;
}

absl::Status CopyCompanions(const std::string& from, const std::string& to,
                            absl::FunctionRef<bool(absl::string_view)> takes) {
  BURST_RETURN_IF_ERROR(MakeFolder(to));
  std::error_code error;
  const auto copy = [&](const char* name, int64_t max_bytes) -> absl::Status {
    const fs::path named = fs::path(from) / name;
    if (!takes(name) || !Exists(named)) return absl::OkStatus();
    const fs::path file = fs::canonical(named, error);
    if (!error && BelongsTo(file, from)) {
      return CopyFileAtomically(file.string(), (fs::path(to) / name).string(), max_bytes);
    }
    std::fprintf(stderr, "warning: %s is left out: it leads to %s, outside of the directory\n",
                 Printable(named.string()).c_str(), Printable(file.string()).c_str());
    return absl::OkStatus();
  };
  for (const char* name : kCompanions) BURST_RETURN_IF_ERROR(copy(name, kMaxTokenizerBytes));
  return copy(kConfig, kMaxSettingsBytes);
}

absl::Status KeepCompanions(const Pretrained& pretrained, const std::string& folder) {
  const std::string from = pretrained.kind == Pretrained::Kind::kCheckpoint
                               ? CompanionsOf(pretrained.path)
                               : pretrained.path;
  if (!Exists(from)) return absl::OkStatus();
  const std::string to = (fs::path(folder) / "huggingface").string();
  BURST_RETURN_IF_ERROR(CopyCompanions(from, to, [](absl::string_view) { return true; }));
  if (pretrained.ignored.empty()) return absl::OkStatus();
  const std::string config = (fs::path(to) / kConfig).string();
  BURST_ASSIGN_OR_RETURN(const std::string json, ReadFile(config, kMaxSettingsBytes));
  BURST_ASSIGN_OR_RETURN(const std::string read, WithoutFields(json, pretrained.ignored));
  return WriteFileAtomically(config, read);
}

absl::Status ImportHuggingFace(const std::string& directory, const std::string& out,
                               const std::vector<std::string>& ignored) {
  if (HoldsCheckpoints(out)) {
    return absl::FailedPreconditionError(
        absl::StrCat("--out: ", out, " holds checkpoints; give another folder"));
  }
  BURST_ASSIGN_OR_RETURN(const HuggingFaceDirectory source,
                         HuggingFaceDirectory::Open(directory, ignored));
  BURST_ASSIGN_OR_RETURN(const Pretrained pretrained, FindPretrained(directory, ignored));
  const std::string unread = UnreadWeights(pretrained);
  if (!unread.empty()) std::fprintf(stderr, "warning: %s\n", unread.c_str());
  BURST_RETURN_IF_ERROR(MakeFolder(out));
  CheckpointInfo info;
  info.model = source.config().model;
  info.window = source.config().window;
  info.seqlen = info.model.context;
  BURST_RETURN_IF_ERROR(KeepCompanions(pretrained, out));
  return SaveWeights(CheckpointPath(out), info, source.parameters(),
                     [&](const Parameter& parameter, const Tensor& whole) {
                       return source.Read(parameter, whole);
                     });
}

}  // namespace burst
