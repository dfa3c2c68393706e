#include "train/data/data_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "train/data/progress.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr char kSuffix[] = ".cache", kLock[] = ".lock", kTemporary[] = ".tmp-";

absl::Status InFolder(const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("--data_cache: ", status.message()));
}

// Returns whether a file of the cache could have this name. The folder may hold other files, too.
bool IsName(absl::string_view name) {
  const auto is_digit = [](char c) { return ('0' <= c && c <= '9') || ('a' <= c && c <= 'f'); };
  return name.size() == 32 && std::all_of(name.begin(), name.end(), is_digit);
}

std::vector<fs::path> FilesIn(const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    files.push_back(it->path());
  }
  return files;
}

// Prints once which process it waits for, unless the wait is short.
FileLock::Waiting SayWhoIsWaitedFor(const std::string& path) {
  return [told = false, path](const std::string& holder, double seconds) mutable -> absl::Status {
    constexpr double kMoment = 2;
    if (told || seconds < kMoment) return absl::OkStatus();
    told = true;
    std::printf("waiting for %s, which is being made by %s\n", path.c_str(), holder.c_str());
    std::fflush(stdout);
    return absl::OkStatus();
  };
}

}  // namespace

std::string DataCache::Path(absl::string_view name, absl::string_view suffix) const {
  return (fs::path(folder_) / absl::StrCat(name, suffix)).string();
}

absl::StatusOr<std::unique_ptr<const CheckedFile>> DataCache::Get(absl::string_view key,
                                                                  const Check& check,
                                                                  const Make& make) const {
  const XXH128_hash_t hash = XXH3_128bits(key.data(), key.size());
  const std::string name = absl::StrFormat("%016x%016x", hash.high64, hash.low64);
  const std::string path = Path(name, kSuffix);
  const auto open = [&]() -> absl::StatusOr<std::unique_ptr<const CheckedFile>> {
    BURST_ASSIGN_OR_RETURN(auto file, CheckedFile::Open(path));
    BURST_RETURN_IF_ERROR(check(*file));
    // Marks the file as used now; without permission its time stays.
    utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
    return file;
  };
  const auto to_make = [](const absl::Status& status) {
    return absl::IsNotFound(status) || absl::IsDataLoss(status);
  };
  auto file = open();
  if (file.ok()) return file;
  if (!to_make(file.status())) return InFolder(file.status());

  std::vector<std::string> made;
  BURST_ASSIGN_OR_RETURN(const FileLock lock, Lock(name, &made));
  file = open();  // another process may have made it
  if (file.ok()) return file;
  if (!to_make(file.status())) return InFolder(file.status());
  const absl::Status status = MakeFile(name, make);
  if (!status.ok()) {
    std::error_code error;  // a folder that holds another file stays
    fs::remove(Path(name, kLock), error);
    for (const std::string& folder : made) fs::remove(folder, error);
    return status;
  }
  RemoveOldest();
  file = open();
  if (!file.ok()) return InFolder(file.status());
  return file;
}

// Locks a name, and appends the folders that it makes, the inner ones first. Meanwhile a process
// that could not make the file may remove the lock's file and the folder.
absl::StatusOr<FileLock> DataCache::Lock(const std::string& name,
                                         std::vector<std::string>* made) const {
  while (true) {
    std::error_code error;
    for (fs::path at = folder_; !at.empty() && !fs::exists(at, error); at = at.parent_path()) {
      made->push_back(at.string());
    }
    fs::create_directories(folder_, error);
    if (error) {
      return InFolder(absl::InternalError(
          absl::StrCat("cannot make the folder ", folder_, ": ", error.message())));
    }
    const std::string path = Path(name, kLock);
    absl::StatusOr<FileLock> lock = FileLock::Acquire(path, SayWhoIsWaitedFor(Path(name, kSuffix)));
    if (lock.ok() && lock->CheckStillThere().ok()) return lock;
    if (!lock.ok() && !absl::IsNotFound(lock.status())) return InFolder(lock.status());
  }
}

// Makes the file. The caller holds the lock of the name.
absl::Status DataCache::MakeFile(const std::string& name, const Make& make) const {
  RemoveLeftovers(name);
  auto writer = CheckedFileWriter::Create(Path(name, kTemporary));
  if (!writer.ok()) return InFolder(writer.status());
  const ScopedThreadPool pool(NumCores());
  const absl::StatusOr<Content> made = make(writer->get());
  BURST_RETURN_IF_ERROR(InFolder((*writer)->write_error()));
  BURST_ASSIGN_OR_RETURN(const Content content, made);
  Progress progress("checksums", content.payload_bytes);
  return InFolder((*writer)->Finish(content.payload_bytes, content.description, Path(name, kSuffix),
                                    [&](int64_t bytes) { progress.Add(bytes); }));
}

// Removes leftovers of killed processes: files of this name, and files of other names that no
// process is making.
void DataCache::RemoveLeftovers(const std::string& name) const {
  for (const fs::path& file : FilesIn(folder_)) {
    const std::string file_name = file.filename().string();
    const size_t end = file_name.find(kTemporary);
    if (end == std::string::npos) continue;
    const std::string of = file_name.substr(0, end);
    if (!IsName(of)) continue;
    std::error_code error;
    if (of == name) {
      fs::remove(file, error);
    } else if (FileLock::TryAcquire(Path(of, kLock)).ok()) {
      fs::remove(file, error);
    }
  }
}

// Removes all files except the kKept that were used last. A process that reads a removed file keeps
// it until it ends.
void DataCache::RemoveOldest() const {
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error;
  for (const fs::path& file : FilesIn(folder_)) {
    if (file.extension() != kSuffix || !IsName(file.stem().string())) continue;
    const fs::file_time_type used = fs::last_write_time(file, error);
    if (!error) files.emplace_back(used, file);
  }
  std::sort(files.begin(), files.end());
  for (size_t i = 0; i + kKept < files.size(); ++i) {
    fs::path path = files[i].second;
    fs::remove(path, error);
    // A process that waits for this lock file makes the data file again, perhaps in parallel with
    // another process. Both write the same content.
    fs::remove(path.replace_extension(kLock), error);
  }
}

}  // namespace burst
