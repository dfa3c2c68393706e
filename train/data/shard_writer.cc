#include "train/data/shard_writer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {

absl::Status ShardWriter::Append(absl::Span<const int32_t> tokens, absl::Span<const uint8_t> marks,
                                 bool masked) {
  BURST_CHECK_EQ(tokens.size(), marks.size());
  while (!tokens.empty()) {
    if (!file_.has_value()) {
      absl::StatusOr<AtomicFile> file = AtomicFile::Create(Path());
      BURST_RETURN_IF_ERROR(file.status());
      file_.emplace(*std::move(file));
      header_.tokens = 0;
      header_.marked = false;
      const std::vector<int32_t> numbers = header_.Numbers();
      BURST_RETURN_IF_ERROR(file_->Write(numbers.data(), kShardHeaderBytes));
    }
    const int64_t count =
        std::min(static_cast<int64_t>(tokens.size()), shard_tokens_ - header_.tokens);
    if (header_.token_bytes == 4) {
      BURST_RETURN_IF_ERROR(file_->Write(tokens.data(), 4 * count));
    } else {
      const std::vector<uint16_t> narrow(tokens.begin(), tokens.begin() + count);
      BURST_RETURN_IF_ERROR(file_->Write(narrow.data(), 2 * count));
    }
    for (const uint8_t mark : marks.subspan(0, count)) marks_.Append(mark);
    header_.marked |= masked;
    tokens.remove_prefix(count);
    marks.remove_prefix(count);
    header_.tokens += count;
    tokens_ += count;
    if (header_.tokens == shard_tokens_) BURST_RETURN_IF_ERROR(Finish());
  }
  return absl::OkStatus();
}

absl::Status ShardWriter::Finish() {
  if (!file_.has_value()) return absl::OkStatus();
  if (header_.marked) BURST_RETURN_IF_ERROR(WriteMarks());
  marks_.Clear();
  const std::vector<int32_t> numbers = header_.Numbers();
  BURST_RETURN_IF_ERROR(file_->WriteAt(0, numbers.data(), kShardHeaderBytes));
  BURST_RETURN_IF_ERROR(file_->Commit());
  file_.reset();
  ++shards_;
  return absl::OkStatus();
}

absl::Status ShardWriter::WriteMarks() const {
  const std::string header = MarksHeader(marks_.size());
  absl::StatusOr<AtomicFile> file = AtomicFile::Create(MarksPath(Path()));
  BURST_RETURN_IF_ERROR(file.status());
  BURST_RETURN_IF_ERROR(file->Write(header.data(), static_cast<int64_t>(header.size())));
  const std::vector<uint8_t>& bytes = marks_.bytes();
  BURST_RETURN_IF_ERROR(file->Write(bytes.data(), static_cast<int64_t>(bytes.size())));
  return file->Commit();
}

std::string ShardWriter::Path() const { return absl::StrFormat("%s_%06d.bin", prefix_, shards_); }

}  // namespace burst
