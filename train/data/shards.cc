#include "train/data/shards.h"

#include <xxhash.h>

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

constexpr int32_t kMagic[] = {20240520, 20240801};  // for tokens of 16 and of 32 bits
constexpr int32_t kVersion[] = {1, 7};

// Reads the header. An InvalidArgument error says what is wrong with it.
absl::StatusOr<ShardHeader> ReadHeader(const InputFile& file) {
  const auto invalid = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(file.path(), ": ", what...));
  };
  const int64_t bytes = file.size();
  if (bytes < kShardHeaderBytes) {
    return invalid("not a shard: ", bytes, " bytes, shorter than the header of ",
                   kShardHeaderBytes);
  }
  int32_t numbers[6];
  BURST_RETURN_IF_ERROR(file.ReadAt(0, sizeof(numbers), numbers));
  const auto [magic, version, tokens, vocab, end_of_text, marked] = numbers;
  if (magic != kMagic[0] && magic != kMagic[1]) {
    return invalid("not a shard of llm.c: the magic number is ", magic, ", expected ", kMagic[0],
                   " or ", kMagic[1]);
  }
  const bool wide = magic == kMagic[1];
  if (version != kVersion[wide]) {
    return invalid("shard version ", version, ", expected ", kVersion[wide], " (tokens of ",
                   wide ? 32 : 16, " bits)");
  }
  ShardHeader header;
  header.tokens = tokens;
  header.token_bytes = wide ? 4 : 2;
  if (wide) header.vocab = kLlama3Vocab, header.end_of_text = kLlama3BeginOfText;
  const int64_t expected = kShardHeaderBytes + header.tokens * header.token_bytes;
  if (tokens < 0 || bytes != expected) {
    return invalid(bytes < expected ? "truncated: " : "wrong length: ", bytes,
                   " bytes, but the header promises ", tokens, " tokens, ", expected, " bytes");
  }
  if (vocab == 0) return header;
  if (vocab < 0 || end_of_text < -1 || end_of_text >= vocab) {
    return invalid("the header has an end-of-text token ", end_of_text, " of a vocabulary of ",
                   vocab);
  }
  if (marked != 0 && marked != 1) {
    return invalid("the header must have 0 or 1 as its number 5 (marks); got ", marked);
  }
  header.vocab = vocab;
  header.end_of_text = end_of_text;
  header.marked = marked == 1;
  return header;
}

// Tokens [begin, begin + count) of a shard, and their position in the stream.
struct Piece {
  size_t shard;
  int64_t begin, count, position;
  uint64_t hash = 0;  // hash of its tokens as int32
};

}  // namespace

ShardHeader ShardHeader::For(int64_t vocab, int32_t end_of_text) {
  constexpr int64_t kOf16Bits = int64_t{1} << 16;
  ShardHeader header;
  header.token_bytes = vocab <= kOf16Bits ? 2 : 4;
  header.vocab = vocab;
  header.end_of_text = end_of_text;
  return header;
}

std::vector<int32_t> ShardHeader::Numbers() const {
  std::vector<int32_t> numbers(kShardHeaderBytes / sizeof(int32_t));
  const bool wide = token_bytes == 4;
  numbers[0] = kMagic[wide], numbers[1] = kVersion[wide];
  numbers[2] = static_cast<int32_t>(tokens);
  numbers[3] = static_cast<int32_t>(vocab), numbers[4] = end_of_text, numbers[5] = marked;
  return numbers;
}

absl::StatusOr<Shard> Shard::Open(const Sources& sources, const SourceFile& file) {
  BURST_ASSIGN_OR_RETURN(InputFile input, sources.Open(file));
  const absl::StatusOr<ShardHeader> header = ReadHeader(input);
  if (!header.ok()) return sources.Error(header.status());
  Shard shard(std::move(input), *header);
  if (header->marked) {
    absl::StatusOr<MarksFile> marks = MarksFile::Open(MarksPath(file.path), header->tokens);
    if (!marks.ok()) return sources.Error(marks.status());
    shard.marks_ = *std::move(marks);
  }
  return shard;
}

absl::Status Shard::Read(int64_t begin, int64_t count, int32_t* out) const {
  const int64_t offset = kShardHeaderBytes + header_.token_bytes * begin;
  if (header_.token_bytes == 4) {
    BURST_RETURN_IF_ERROR(file_.ReadAt(offset, 4 * count, out));
    for (int64_t i = 0; i < count; ++i) {
      if (out[i] < 0) out[i] = INT32_MAX;
    }
    return absl::OkStatus();
  }
  std::vector<uint16_t> tokens(count);
  BURST_RETURN_IF_ERROR(file_.ReadAt(offset, 2 * count, tokens.data()));
  std::copy(tokens.begin(), tokens.end(), out);
  return absl::OkStatus();
}

absl::StatusOr<ShardScan> ScanShards(const std::vector<Shard>& shards) {
  constexpr int64_t kPiece = 1 << 20;
  std::vector<Piece> pieces;
  int64_t position = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    for (int64_t begin = 0; begin < shards[i].size(); begin += kPiece) {
      const int64_t count = std::min(kPiece, shards[i].size() - begin);
      pieces.push_back({i, begin, count, position, 0});
      position += count;
    }
  }
  Progress progress(absl::StrCat("scanning ", shards.size(), " shards"), position);
  ShardScan scan;
  scan.largest.assign(shards.size(), -1);
  std::mutex mutex;
  absl::Status first;
  std::atomic<int64_t> next{0};
  const int32_t end_of_text = shards.empty() ? -1 : shards[0].header().end_of_text;
  const auto scan_piece = [&](Piece& piece, std::vector<int32_t>* tokens) -> absl::Status {
    tokens->resize(piece.count);
    BURST_RETURN_IF_ERROR(shards[piece.shard].Read(piece.begin, piece.count, tokens->data()));
    piece.hash = XXH3_64bits(tokens->data(), tokens->size() * sizeof(int32_t));
    const auto begin = tokens->begin(), end = tokens->end();
    int32_t largest = 0;  // this loop vectorizes
    for (auto it = begin; it != end; ++it) largest = std::max(largest, *it);
    auto start = std::find(begin + (piece.position == 0 ? 1 : 0), end, end_of_text);
    if (const MarksFile* const file = shards[piece.shard].marks(); file != nullptr) {
      std::vector<uint8_t> marks(piece.count);
      BURST_RETURN_IF_ERROR(file->Read(piece.begin, piece.count, marks.data()));
      piece.hash = XXH3_64bits_withSeed(marks.data(), marks.size(), piece.hash);
      const auto begins = [](uint8_t mark) { return (mark & kBegins) != 0; };
      start = begin +
              (std::find_if(marks.begin() + (piece.position == 0 ? 1 : 0), marks.end(), begins) -
               marks.begin());
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      scan.largest[piece.shard] = std::max(scan.largest[piece.shard], largest);
      const int64_t at = piece.position + (start - begin);
      if (start != end && (scan.second_document < 0 || at < scan.second_document)) {
        scan.second_document = at;
      }
    }
    progress.Add(piece.count);
    return absl::OkStatus();
  };
  ParallelTasks(NumThreads(), [&](int64_t) {
    std::vector<int32_t> tokens;
    for (int64_t i = next++; i < static_cast<int64_t>(pieces.size()); i = next++) {
      const absl::Status status = scan_piece(pieces[i], &tokens);
      if (status.ok()) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (first.ok()) first = status;
      next = static_cast<int64_t>(pieces.size());
    }
  });
  BURST_RETURN_IF_ERROR(first);
  std::vector<uint64_t> hashes;
  for (const Piece& piece : pieces) hashes.push_back(piece.hash);
  scan.digest = XXH3_64bits(hashes.data(), hashes.size() * sizeof(uint64_t));
  return scan;
}

}  // namespace burst
