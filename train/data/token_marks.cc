#include "train/data/token_marks.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "burst/base/status.h"

namespace burst {
namespace {

struct Header {
  int32_t magic = 0x4B52414D, version = 1;
  int64_t tokens = 0;
};

}  // namespace

std::string MarksPath(const std::string& shard_path) {
  return absl::StrCat(absl::StripSuffix(shard_path, ".bin"), ".marks");
}

std::string MarksHeader(int64_t tokens) {
  Header header;
  header.tokens = tokens;
  return {reinterpret_cast<const char*>(&header), sizeof(header)};
}

absl::StatusOr<MarksFile> MarksFile::Open(const std::string& path, int64_t tokens) {
  BURST_ASSIGN_OR_RETURN(InputFile file, InputFile::Open(path));
  const std::string expected = MarksHeader(tokens);
  std::string header(expected.size(), '\0');
  const int64_t bytes = static_cast<int64_t>(expected.size()) + TokenMarks::BytesOf(tokens);
  if (file.size() == bytes) {
    BURST_RETURN_IF_ERROR(file.ReadAt(0, static_cast<int64_t>(header.size()), header.data()));
  }
  if (header == expected) return MarksFile(std::move(file));
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": must be the marks of ", tokens, " tokens, version 1, in ", bytes,
                   " bytes; got another file of ", file.size(), "; make the shards anew"));
}

absl::Status MarksFile::Read(int64_t begin, int64_t count, uint8_t* out) const {
  const int64_t first = begin / 4, last = TokenMarks::BytesOf(begin + count);
  std::vector<uint8_t> bytes(last - first);
  BURST_RETURN_IF_ERROR(
      file_.ReadAt(static_cast<int64_t>(sizeof(Header)) + first, last - first, bytes.data()));
  for (int64_t i = 0; i < count; ++i) out[i] = TokenMarks::At(bytes.data(), begin % 4 + i);
  return absl::OkStatus();
}

}  // namespace burst
