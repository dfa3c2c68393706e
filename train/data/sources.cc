#include "train/data/sources.h"

#include <glob.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "burst/base/status.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

// Returns whether the names of all files end with `end`, or with that and the suffix of a packed
// file if these `may_be_packed`. It is an InvalidArgument error if only some do.
absl::StatusOr<bool> AllEnd(const std::vector<SourceFile>& files, const std::string& path,
                            absl::string_view end, bool may_be_packed) {
  const auto is_one = [&](const SourceFile& file) {
    absl::string_view name = file.path;
    if (may_be_packed) absl::ConsumeSuffix(&name, ".gz") || absl::ConsumeSuffix(&name, ".zst");
    return absl::EndsWith(name, end);
  };
  const auto count = std::count_if(files.begin(), files.end(), is_one);
  if (count == 0 || count == static_cast<int64_t>(files.size())) return count > 0;
  return absl::InvalidArgumentError(
      absl::StrCat(path, " mixes ", end,
                   " files with others; name only one kind, by a pattern that ends with *", end));
}

absl::Status CannotRead(const fs::path& path, const std::error_code& error) {
  const std::string message = absl::StrCat(path.string(), ": ", error.message());
  const bool missing = error == std::errc::no_such_file_or_directory;
  return missing ? absl::NotFoundError(message) : absl::InternalError(message);
}

absl::StatusOr<std::vector<std::string>> FilesOfFolder(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  fs::recursive_directory_iterator it(folder, error), end;
  fs::path path = folder;  // the path that an error names; a folder is opened after it was seen
  for (; !error && it != end; it.increment(error)) {
    path = it->path();
    if (absl::StartsWith(path.filename().string(), ".")) {
      it.disable_recursion_pending();
      continue;
    }
    std::error_code unknown;  // a link that leads nowhere, or in a circle
    const fs::file_status status = it->status(unknown);
    if (unknown) return CannotRead(path, unknown);
    if (fs::is_regular_file(status)) files.push_back(path.string());
  }
  if (error) return CannotRead(path, error);
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<std::string> MatchPattern(const std::string& pattern) {
  glob_t matches;
  std::vector<std::string> files;
  if (glob(pattern.c_str(), 0, nullptr, &matches) == 0) {
    files.assign(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  }
  globfree(&matches);
  return files;
}

absl::StatusOr<std::vector<std::string>> FindFiles(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) {
    BURST_ASSIGN_OR_RETURN(std::vector<std::string> files, FilesOfFolder(path));
    if (files.empty()) {
      return absl::NotFoundError(absl::StrCat("the folder ", path, " holds no files"));
    }
    return files;
  }
  if (fs::exists(status)) return std::vector<std::string>{path};
  std::vector<std::string> files = MatchPattern(path);
  if (!files.empty()) return files;
  if (status.type() == fs::file_type::none) return CannotRead(path, error);
  return absl::NotFoundError(absl::StrCat("no such file or folder: ", path));
}

absl::StatusOr<std::vector<SourceFile>> Identify(const std::vector<std::string>& paths) {
  std::vector<SourceFile> files;
  for (const std::string& path : paths) {
    BURST_ASSIGN_OR_RETURN(const FileIdentity identity, IdentityOf(path));
    files.push_back({path, identity});
  }
  return files;
}

}  // namespace

absl::Status Sources::Error(const absl::Status& status) const {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("--", option, ": ", status.message()));
}

absl::StatusOr<InputFile> Sources::Open(const SourceFile& file) const {
  absl::StatusOr<InputFile> input = InputFile::Open(file.path);
  if (!input.ok()) return Error(input.status());
  if (input->identity() == file.identity) return input;
  return Error(absl::AbortedError(
      absl::StrCat(file.path, " was changed while it was read; start again when it is complete")));
}

absl::StatusOr<Sources> FindSources(absl::string_view option, const std::string& path) {
  Sources sources;
  sources.option = std::string(option);
  const absl::StatusOr<std::vector<std::string>> paths = FindFiles(path);
  if (!paths.ok()) return sources.Error(paths.status());
  absl::StatusOr<std::vector<SourceFile>> files = Identify(*paths);
  if (!files.ok()) return sources.Error(files.status());
  sources.files = *std::move(files);
  for (const auto& [end, all] :
       {std::pair(".bin", &sources.shards), std::pair(".jsonl", &sources.json_lines)}) {
    const absl::StatusOr<bool> found =
        AllEnd(sources.files, path, end, /*may_be_packed=*/all == &sources.json_lines);
    if (!found.ok()) return sources.Error(found.status());
    *all = *found;
  }
  return sources;
}

std::string Fingerprint(const std::vector<const Sources*>& sources) {
  constexpr int64_t kTick = 20000000;  // ns; the kernel's timestamps are 1 to 10 ms apart
  std::string fingerprint;
  int64_t newest = 0;
  for (const Sources* source : sources) {
    absl::StrAppend(&fingerprint, source->option, "\n");
    for (const SourceFile& file : source->files) {
      const FileIdentity& id = file.identity;
      absl::StrAppend(&fingerprint, file.path, "\n", id.bytes, " ", id.modified_ns, " ",
                      id.changed_ns, " ", id.inode, "\n");
      newest = std::max(newest, id.changed_ns);
    }
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t age = std::chrono::nanoseconds(now).count() - newest;
  if (0 <= age && age < kTick) std::this_thread::sleep_for(std::chrono::nanoseconds(kTick));
  return fingerprint;
}

}  // namespace burst
