#include "train/data/shards.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "train/data/progress.h"

namespace burst {
namespace {

constexpr int64_t kHeaderBytes = 256 * sizeof(int32_t);
constexpr int32_t kMagic = 20240520;
constexpr int32_t kVersion = 1;

// InvalidArgument that says what is wrong; otherwise the number of tokens.
absl::StatusOr<int64_t> ReadHeader(const InputFile& file) {
  const auto invalid = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(file.path(), ": ", what...));
  };
  const int64_t bytes = file.size();
  if (bytes < kHeaderBytes) {
    return invalid("not a shard: ", bytes, " bytes, shorter than the header of ", kHeaderBytes);
  }
  int32_t header[3];
  BURST_RETURN_IF_ERROR(file.ReadAt(0, sizeof(header), header));
  if (header[0] != kMagic) {
    return invalid("not a shard of llm.c: the magic number is ", header[0], ", expected ", kMagic);
  }
  if (header[1] != kVersion) {
    return invalid("shard version ", header[1], ", expected ", kVersion, " (tokens of 16 bits)");
  }
  const int64_t expected = kHeaderBytes + int64_t{header[2]} * 2;
  if (header[2] < 0 || bytes != expected) {
    return invalid(bytes < expected ? "truncated: " : "wrong length: ", bytes,
                   " bytes, but the header promises ", header[2], " tokens, ", expected, " bytes");
  }
  return int64_t{header[2]};
}

// Tokens [begin, begin + count) of a shard, and where they are in the stream.
struct Piece {
  size_t shard;
  int64_t begin, count, position;
};

}  // namespace

absl::StatusOr<Shard> Shard::Open(const Sources& sources, const SourceFile& file) {
  BURST_ASSIGN_OR_RETURN(InputFile input, sources.Open(file));
  const absl::StatusOr<int64_t> size = ReadHeader(input);
  if (!size.ok()) return sources.Error(size.status());
  return Shard(std::move(input), *size);
}

absl::Status Shard::Read(int64_t begin, int64_t count, uint16_t* out) const {
  return file_.ReadAt(kHeaderBytes + 2 * begin, 2 * count, out);
}

absl::StatusOr<ShardScan> ScanShards(const std::vector<Shard>& shards) {
  constexpr int64_t kPiece = 1 << 20;
  std::vector<Piece> pieces;
  int64_t position = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    for (int64_t begin = 0; begin < shards[i].size(); begin += kPiece) {
      const int64_t count = std::min(kPiece, shards[i].size() - begin);
      pieces.push_back({i, begin, count, position});
      position += count;
    }
  }
  Progress progress(absl::StrCat("scanning ", shards.size(), " shards"), position);
  ShardScan scan;
  scan.largest.assign(shards.size(), -1);
  std::mutex mutex;
  absl::Status first;
  std::atomic<int64_t> next{0};
  const auto scan_piece = [&](const Piece& piece, std::vector<uint16_t>* tokens) -> absl::Status {
    BURST_RETURN_IF_ERROR(shards[piece.shard].Read(piece.begin, piece.count, tokens->data()));
    const auto begin = tokens->begin(), end = begin + piece.count;
    uint16_t largest = 0;  // this loop vectorizes
    for (auto it = begin; it != end; ++it) largest = std::max(largest, *it);
    const auto start = std::find(begin + (piece.position == 0 ? 1 : 0), end, kGpt2EndOfText);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      scan.largest[piece.shard] = std::max<int32_t>(scan.largest[piece.shard], largest);
      const int64_t at = piece.position + (start - begin);
      if (start != end && (scan.second_document < 0 || at < scan.second_document)) {
        scan.second_document = at;
      }
    }
    progress.Add(piece.count);
    return absl::OkStatus();
  };
  ParallelTasks(NumThreads(), [&](int64_t) {
    std::vector<uint16_t> tokens(kPiece);
    for (int64_t i = next++; i < static_cast<int64_t>(pieces.size()); i = next++) {
      const absl::Status status = scan_piece(pieces[i], &tokens);
      if (status.ok()) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (first.ok()) first = status;
      next = static_cast<int64_t>(pieces.size());
    }
  });
  BURST_RETURN_IF_ERROR(first);
  return scan;
}

}  // namespace burst
