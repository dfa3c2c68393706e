#include "train/data/unpacked_file.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr int64_t kAtOnce = 1 << 18;

class PlainFile : public UnpackedFile {
 public:
  explicit PlainFile(InputFile file) : UnpackedFile(std::move(file), /*packed=*/false) {}

 private:
  absl::StatusOr<int64_t> Unpack(int64_t bytes, char* out) override {
    const size_t count = std::min<size_t>(bytes, input_.size());
    std::memcpy(out, input_.data(), count);
    input_.erase(0, count);
    return static_cast<int64_t>(count);
  }
  bool Complete() const override { return true; }
};

// A file of gzip members (RFC 1952), one behind the other.
class GzipFile : public UnpackedFile {
 public:
  explicit GzipFile(InputFile file) : UnpackedFile(std::move(file), /*packed=*/true) {
    constexpr int kGzipOnly = 16;
    BURST_CHECK_EQ(inflateInit2(&stream_, MAX_WBITS + kGzipOnly), Z_OK);
  }
  ~GzipFile() override { inflateEnd(&stream_); }

 private:
  absl::StatusOr<int64_t> Unpack(int64_t bytes, char* out) override {
    if (complete_) {
      // Some programs fill the end of a file with zeros.
      if (input_.find_first_not_of('\0') == std::string::npos) input_.clear();
      if (input_.empty()) return 0;
      inflateReset(&stream_);
      complete_ = false;
    }
    stream_.next_in = reinterpret_cast<Bytef*>(input_.data());
    stream_.avail_in = static_cast<uInt>(input_.size());
    stream_.next_out = reinterpret_cast<Bytef*>(out);
    stream_.avail_out = static_cast<uInt>(bytes);
    const int result = inflate(&stream_, Z_NO_FLUSH);
    input_.erase(0, input_.size() - stream_.avail_in);
    if (result == Z_STREAM_END) complete_ = true;
    if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) {
      return Damaged("its gzip data is damaged");
    }
    return bytes - static_cast<int64_t>(stream_.avail_out);
  }
  bool Complete() const override { return complete_; }

  z_stream stream_ = {};
  bool complete_ = false;
};

// A file of zstd's frames (RFC 8878), one behind the other.
class ZstdFile : public UnpackedFile {
 public:
  explicit ZstdFile(InputFile file)
      : UnpackedFile(std::move(file), /*packed=*/true), stream_(ZSTD_createDStream()) {}
  ~ZstdFile() override { ZSTD_freeDStream(stream_); }

 private:
  absl::StatusOr<int64_t> Unpack(int64_t bytes, char* out) override {
    if (complete_ && input_.empty()) return 0;
    ZSTD_inBuffer in = {input_.data(), input_.size(), 0};
    ZSTD_outBuffer to = {out, static_cast<size_t>(bytes), 0};
    const size_t result = ZSTD_decompressStream(stream_, &to, &in);
    if (ZSTD_isError(result)) return Damaged("its zstd data is damaged");
    complete_ = result == 0;
    input_.erase(0, in.pos);
    return static_cast<int64_t>(to.pos);
  }
  bool Complete() const override { return complete_; }

  ZSTD_DStream* const stream_;
  bool complete_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<UnpackedFile>> UnpackedFile::Open(InputFile file) {
  std::string magic(std::min<int64_t>(4, file.size()), '\0');
  BURST_RETURN_IF_ERROR(file.ReadAt(0, static_cast<int64_t>(magic.size()), magic.data()));
  std::unique_ptr<UnpackedFile> unpacked;
  if (absl::StartsWith(magic, "\x1f\x8b\x08")) {
    unpacked = std::make_unique<GzipFile>(std::move(file));
  } else if (magic == "\x28\xb5\x2f\xfd") {
    unpacked = std::make_unique<ZstdFile>(std::move(file));
  } else {
    unpacked = std::make_unique<PlainFile>(std::move(file));
  }
  return unpacked;
}

absl::Status UnpackedFile::Damaged(const char* what) const {
  return absl::DataLossError(
      absl::StrCat(file_.path(), ": ", what, " before byte ", offset_, "; make the file anew"));
}

absl::Status UnpackedFile::Refill() {
  std::string more(std::min(kAtOnce, file_.size() - offset_), '\0');
  BURST_RETURN_IF_ERROR(file_.ReadAt(offset_, static_cast<int64_t>(more.size()), more.data()));
  offset_ += static_cast<int64_t>(more.size());
  input_ += more;
  return absl::OkStatus();
}

absl::Status UnpackedFile::Read(int64_t bytes, std::string* out) {
  const size_t begin = out->size();
  out->resize(begin + bytes);
  int64_t done = 0;
  while (done < bytes) {
    if (input_.empty() && offset_ < file_.size()) BURST_RETURN_IF_ERROR(Refill());
    const size_t before = input_.size();
    BURST_ASSIGN_OR_RETURN(const int64_t count,
                           Unpack(std::min(bytes - done, kAtOnce), out->data() + begin + done));
    done += count;
    if (count > 0 || input_.size() < before) continue;
    if (offset_ < file_.size()) {
      BURST_RETURN_IF_ERROR(Refill());
      continue;
    }
    if (!Complete()) return Damaged("its packed data ends");
    break;
  }
  out->resize(begin + done);
  return absl::OkStatus();
}

}  // namespace burst
