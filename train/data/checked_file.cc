#include "train/data/checked_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr int64_t kBlock = 1 << 16;
constexpr char kMagic[9] = "BurstChk";

struct Footer {
  char magic[8];
  int64_t payload_bytes;
  int64_t description_bytes;
  uint64_t checksum;
};

int64_t NumBlocks(int64_t payload_bytes) { return (payload_bytes + kBlock - 1) / kBlock; }

uint64_t Checksum(const Footer& footer, const std::vector<uint64_t>& checksums,
                  absl::string_view description) {
  uint64_t hash =
      XXH3_64bits(&footer.payload_bytes, sizeof(footer.payload_bytes) + sizeof(int64_t));
  hash = XXH3_64bits_withSeed(checksums.data(), checksums.size() * sizeof(uint64_t), hash);
  return XXH3_64bits_withSeed(description.data(), description.size(), hash);
}

absl::Status SystemError(absl::string_view doing, const std::string& path) {
  const std::string message = absl::StrCat("cannot ", doing, " ", path, ": ", strerror(errno));
  return errno == ENOSPC || errno == EDQUOT || errno == EFBIG
             ? absl::ResourceExhaustedError(message)
             : absl::InternalError(message);
}

}  // namespace

absl::StatusOr<std::unique_ptr<const CheckedFile>> CheckedFile::Open(const std::string& path) {
  BURST_ASSIGN_OR_RETURN(InputFile input, InputFile::Open(path));
  std::unique_ptr<CheckedFile> file(new CheckedFile(std::move(input)));
  BURST_RETURN_IF_ERROR(file->ReadFooter());
  return file;
}

absl::Status CheckedFile::ReadFooter() {
  const auto damaged = [&](absl::string_view what) {
    return absl::DataLossError(absl::StrCat(path(), " is damaged: ", what));
  };
  Footer footer;
  const int64_t size = file_.size() - static_cast<int64_t>(sizeof(footer));
  if (size < 0) return damaged("too short");
  BURST_RETURN_IF_ERROR(file_.ReadAt(size, sizeof(footer), &footer));
  if (std::memcmp(footer.magic, kMagic, sizeof(footer.magic)) != 0) {
    return damaged("its end is missing");
  }
  const bool in_range = 0 <= footer.payload_bytes && footer.payload_bytes <= size &&
                        0 <= footer.description_bytes && footer.description_bytes <= size;
  const int64_t blocks = in_range ? NumBlocks(footer.payload_bytes) : 0;
  const int64_t table_bytes = blocks * static_cast<int64_t>(sizeof(uint64_t));
  if (!in_range || footer.payload_bytes + table_bytes + footer.description_bytes != size) {
    return damaged("the sizes at its end are not those of the file");
  }
  payload_bytes_ = footer.payload_bytes;
  checksums_.resize(blocks);
  description_.resize(footer.description_bytes);
  BURST_RETURN_IF_ERROR(file_.ReadAt(payload_bytes_, table_bytes, checksums_.data()));
  BURST_RETURN_IF_ERROR(
      file_.ReadAt(payload_bytes_ + table_bytes, footer.description_bytes, description_.data()));
  if (Checksum(footer, checksums_, description_) != footer.checksum) {
    return damaged("the checksum of its description does not agree");
  }
  checksum_ = footer.checksum;
  checked_ = std::vector<std::atomic<bool>>(blocks);
  return absl::OkStatus();
}

absl::Status CheckedFile::CheckBlock(int64_t block) const {
  if (checked_[block].load(std::memory_order_relaxed)) return absl::OkStatus();
  char buffer[kBlock];  // on the stack, because a read must work without memory, too
  const int64_t offset = block * kBlock, bytes = std::min(kBlock, payload_bytes_ - offset);
  BURST_RETURN_IF_ERROR(file_.ReadAt(offset, bytes, buffer));
  if (XXH3_64bits(buffer, bytes) != checksums_[block]) {
    return absl::DataLossError(absl::StrCat(path(), " is damaged: the checksum of the ", bytes,
                                            " bytes at ", offset, " does not agree"));
  }
  checked_[block].store(true, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status CheckedFile::Read(int64_t offset, int64_t bytes, void* out) const {
  if (offset < 0 || bytes < 0 || offset > payload_bytes_ || bytes > payload_bytes_ - offset) {
    return absl::OutOfRangeError(absl::StrCat(path(), " has no ", bytes, " bytes at ", offset));
  }
  for (int64_t block = offset / kBlock; block < NumBlocks(offset + bytes); ++block) {
    BURST_RETURN_IF_ERROR(CheckBlock(block));
  }
  return file_.ReadAt(offset, bytes, out);
}

absl::StatusOr<std::unique_ptr<CheckedFileWriter>> CheckedFileWriter::Create(
    const std::string& prefix) {
  std::string path = prefix + "XXXXXX";
  const int fd = mkostemp(path.data(), O_CLOEXEC);
  if (fd < 0) return SystemError("create", path);
  if (fchmod(fd, 0644) != 0) {
    const absl::Status status = SystemError("create", path);
    close(fd);
    unlink(path.c_str());
    return status;
  }
  return std::unique_ptr<CheckedFileWriter>(new CheckedFileWriter(std::move(path), fd));
}

CheckedFileWriter::~CheckedFileWriter() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(path_.c_str());
}

absl::Status CheckedFileWriter::Write(int64_t offset, const void* data, int64_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = pwrite(fd_, at, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const absl::Status status = SystemError("write", path_);
      const std::lock_guard<std::mutex> lock(mutex_);
      return write_error_ = status;
    }
    at += n, bytes -= n, offset += n;
  }
  return absl::OkStatus();
}

absl::Status CheckedFileWriter::write_error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return write_error_;
}

absl::Status CheckedFileWriter::Finish(int64_t payload_bytes, absl::string_view description,
                                       const std::string& path,
                                       const std::function<void(int64_t)>& advanced) {
  Footer footer = {};
  std::memcpy(footer.magic, kMagic, sizeof(footer.magic));
  footer.payload_bytes = payload_bytes;
  footer.description_bytes = static_cast<int64_t>(description.size());
  std::vector<uint64_t> checksums(NumBlocks(payload_bytes));
  {
    BURST_ASSIGN_OR_RETURN(const InputFile written, InputFile::Open(path_));
    constexpr int64_t kBlocksAtOnce = 16;  // 1 MiB
    const int64_t blocks = static_cast<int64_t>(checksums.size());
    std::mutex mutex;
    absl::Status first;  // the first error
    ParallelTasks((blocks + kBlocksAtOnce - 1) / kBlocksAtOnce, [&](int64_t task) {
      std::vector<char> buffer(kBlock);
      absl::Status status;
      int64_t bytes = 0;
      for (int64_t block = task * kBlocksAtOnce;
           block < std::min(blocks, (task + 1) * kBlocksAtOnce) && status.ok(); ++block) {
        const int64_t size = std::min(kBlock, payload_bytes - block * kBlock);
        status = written.ReadAt(block * kBlock, size, buffer.data());
        checksums[block] = XXH3_64bits(buffer.data(), size);
        bytes += size;
      }
      const std::lock_guard<std::mutex> lock(mutex);
      advanced(bytes);
      if (first.ok()) first = status;
    });
    BURST_RETURN_IF_ERROR(first);
  }
  footer.checksum = Checksum(footer, checksums, description);
  int64_t at = payload_bytes;
  const auto append = [&](const void* data, int64_t bytes) {
    at += bytes;
    return Write(at - bytes, data, bytes);
  };
  BURST_RETURN_IF_ERROR(
      append(checksums.data(), static_cast<int64_t>(checksums.size() * sizeof(uint64_t))));
  BURST_RETURN_IF_ERROR(append(description.data(), static_cast<int64_t>(description.size())));
  BURST_RETURN_IF_ERROR(append(&footer, sizeof(footer)));
  // The content must be on the disk before the name points to it.
  if (fsync(fd_) != 0) return SystemError("write", path_);
  if (rename(path_.c_str(), path.c_str()) != 0) return SystemError("rename", path_);
  if (close(std::exchange(fd_, -1)) != 0) return SystemError("write", path);
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const int folder_fd = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_CLOEXEC);
  if (folder_fd >= 0) {
    fsync(folder_fd);
    close(folder_fd);
  }
  return absl::OkStatus();
}

}  // namespace burst
