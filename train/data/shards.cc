#include "train/data/shards.h"

#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "train/data/progress.h"

namespace burst {
namespace {

using Json = nlohmann::json;

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
  int32_t numbers[7];
  BURST_RETURN_IF_ERROR(file.ReadAt(0, sizeof(numbers), numbers));
  const auto [magic, version, tokens, vocab, end_of_text, marked, closed] = numbers;
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
  if (closed != 0 && closed != 1) {
    return invalid("the header must have 0 or 1 as its number 6 (ends); got ", closed);
  }
  header.vocab = vocab;
  header.end_of_text = end_of_text;
  header.marked = marked == 1;
  header.closed = closed == 1;
  return header;
}

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
  numbers[3] = static_cast<int32_t>(vocab), numbers[4] = end_of_text;
  numbers[5] = marked, numbers[6] = closed;
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

namespace {

// ---- The scan of all shards, whose results a cache keeps.

// The results of a scan of all shards.
struct ShardScan {
  std::vector<int32_t> largest;  // the largest token of each shard; -1 for an empty shard
  // The first document start after token 0 of the stream of all shards; -1: none.
  int64_t second_document = -1;
  uint64_t digest = 0;  // a hash of all tokens and of their shards
};

// Tokens [begin, begin + count) of a shard, and their position in the stream.
struct Piece {
  size_t shard;
  int64_t begin, count, position;
  uint64_t hash = 0;  // hash of its tokens as int32
};

// Scans shards of one vocabulary on all threads of the caller's pool. Shows progress.
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

// The version of the scan. Increase it when a scan would find something else.
constexpr int kScanVersion = 3;

std::string Describe(const ShardScan& scan) {
  return Json{{"version", kScanVersion},
              {"largest", scan.largest},
              {"second_document", scan.second_document},
              {"digest", scan.digest}}
      .dump();
}

absl::StatusOr<ShardScan> ParseDescription(const CheckedFile& file, size_t num_shards) {
  const auto bad = [&] {
    return absl::DataLossError(
        absl::StrCat(file.path(), " is damaged: not the description of shards"));
  };
  const Json json = Json::parse(file.description(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("version", Json()) != kScanVersion) return bad();
  const Json largest = json.value("largest", Json()),
             second = json.value("second_document", Json()), digest = json.value("digest", Json());
  if (!digest.is_number_unsigned() || !second.is_number_integer() || !largest.is_array() ||
      largest.size() != num_shards) {
    return bad();
  }
  ShardScan scan;
  scan.second_document = second;
  scan.digest = digest;
  for (const Json& token : largest) {
    if (!token.is_number_integer()) return bad();
    scan.largest.push_back(token);
  }
  return scan;
}

// ---- The corpus.

class ShardCorpus : public Corpus {
 public:
  ShardCorpus(std::string option, std::vector<Shard> shards)
      : option_(std::move(option)), shards_(std::move(shards)) {
    for (const Shard& shard : shards_) {
      begins_.push_back(size_);
      size_ += shard.size();
    }
  }
  void set_scan(ShardScan scan) { scan_ = std::move(scan); }
  const std::vector<Shard>& shards() const { return shards_; }

  int64_t size() const override { return size_; }
  uint64_t digest() const override {
    const ShardHeader& header = shards_[0].header();
    // Closed documents change a bit that no token has.
    const uint64_t closed = uint64_t{header.closed} << 40;
    const uint64_t all[] = {scan_.digest, static_cast<uint64_t>(header.vocab),
                            static_cast<uint64_t>(header.end_of_text) ^ closed};
    return XXH3_64bits(all, sizeof(all));
  }
  int64_t second_document() const override {
    return scan_.second_document < 0 ? size_ : scan_.second_document;
  }

  absl::Status Read(int64_t begin, int64_t count, int32_t* out) const override {
    BURST_CHECK(0 <= begin && begin + count <= size_)
        << "tokens [" << begin << ", " << begin + count << ") of " << size_;
    for (size_t shard = ShardOf(begin); count > 0; ++shard) {
      const int64_t offset = begin - begins_[shard];
      const int64_t n = std::min(count, shards_[shard].size() - offset);
      BURST_RETURN_IF_ERROR(Named(shards_[shard].Read(offset, n, out)));
      begin += n, out += n, count -= n;
    }
    return absl::OkStatus();
  }

  absl::Status DocumentStarts(int64_t begin, int64_t end,
                              std::vector<int64_t>* starts) const override {
    return ForEachMark(begin, end, [&](int64_t at, uint8_t mark) {
      if ((mark & kBegins) != 0) starts->push_back(at);
    });
  }

  bool StartEndsADocument(int64_t start) const override {
    return !shards_[ShardOf(start)].header().closed;
  }

  bool has_marks() const override {
    return std::any_of(shards_.begin(), shards_.end(),
                       [](const Shard& shard) { return shard.marks() != nullptr; });
  }
  absl::Status NotCounted(int64_t begin, int64_t end, std::vector<int64_t>* places) const override {
    return ForEachMark(begin, end, [&](int64_t at, uint8_t mark) {
      if ((mark & kCounts) == 0) places->push_back(at);
    });
  }

  absl::Status CheckVocab(int64_t vocab) const override {
    for (size_t i = 0; i < shards_.size(); ++i) {
      if (scan_.largest[i] < vocab) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(shards_[i].path(), ": token ", FirstFrom(i, vocab),
                       " is beyond the model's vocabulary of ", vocab));
    }
    return absl::OkStatus();
  }

 private:
  // Returns the last shard that begins at or before `place`. Shards after it may be empty.
  size_t ShardOf(int64_t place) const {
    return std::upper_bound(begins_.begin(), begins_.end(), place) - begins_.begin() - 1;
  }

  // Calls visit(place, mark) for the tokens [begin, end). A shard without marks has them by its
  // end-of-text tokens.
  template <typename Visit>
  absl::Status ForEachMark(int64_t begin, int64_t end, const Visit& visit) const {
    constexpr int64_t kAtOnce = 1 << 16;
    const int32_t end_of_text = shards_[0].header().end_of_text;
    std::vector<int32_t> tokens;
    std::vector<uint8_t> marks;
    end = std::min(end, size_);
    for (int64_t count; begin < end; begin += count) {
      const size_t shard = ShardOf(begin);
      const int64_t offset = begin - begins_[shard];
      count = std::min({kAtOnce, end - begin, shards_[shard].size() - offset});
      const MarksFile* const file = shards_[shard].marks();
      if (file != nullptr) {
        marks.resize(count);
        BURST_RETURN_IF_ERROR(Named(file->Read(offset, count, marks.data())));
      } else {
        tokens.resize(count);
        BURST_RETURN_IF_ERROR(Named(shards_[shard].Read(offset, count, tokens.data())));
        marks.clear();
        const uint8_t start = shards_[shard].header().closed ? kBegins : kCounts | kBegins;
        for (const int32_t token : tokens) marks.push_back(token == end_of_text ? start : kCounts);
      }
      for (int64_t i = 0; i < count; ++i) visit(begin + i, marks[i]);
    }
    return absl::OkStatus();
  }

  absl::Status Named(const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat("--", option_, ": ", status.message()));
  }

  // Describes the first token of a shard that is not below `vocab`, such as "50257 at position 41".
  std::string FirstFrom(size_t shard, int64_t vocab) const {
    constexpr int64_t kAtOnce = 1 << 16;
    std::vector<int32_t> tokens(kAtOnce);
    for (int64_t begin = 0; begin < shards_[shard].size(); begin += kAtOnce) {
      const int64_t n = std::min(kAtOnce, shards_[shard].size() - begin);
      if (!shards_[shard].Read(begin, n, tokens.data()).ok()) break;
      for (int64_t i = 0; i < n; ++i) {
        if (tokens[i] >= vocab) return absl::StrCat(tokens[i], " at position ", begin + i);
      }
    }
    return absl::StrCat(scan_.largest[shard]);
  }

  const std::string option_;
  const std::vector<Shard> shards_;
  std::vector<int64_t> begins_;  // position of each shard in the stream
  int64_t size_ = 0;
  ShardScan scan_;
};

}  // namespace

absl::StatusOr<ShardData> OpenShards(const Sources& sources, const DataCache& cache) {
  std::vector<Shard> shards;
  for (const SourceFile& file : sources.files) {
    BURST_ASSIGN_OR_RETURN(Shard shard, Shard::Open(sources, file));
    shards.push_back(std::move(shard));
  }
  for (const Shard& shard : shards) {
    const ShardHeader &one = shards[0].header(), &other = shard.header();
    if (one.vocab == other.vocab && one.end_of_text == other.end_of_text) continue;
    return sources.Error(absl::InvalidArgumentError(
        absl::StrCat(shard.path(), " is of another vocabulary (", other.vocab, " tokens) than ",
                     shards[0].path(), " (", one.vocab, ")")));
  }
  const ShardHeader header = shards[0].header();
  const size_t num_shards = shards.size();
  const auto corpus = std::make_shared<ShardCorpus>(sources.option, std::move(shards));
  if (corpus->size() == 0) {
    return sources.Error(absl::InvalidArgumentError("the shards hold no tokens"));
  }
  Sources marks = sources;  // a run reads the files of marks, too
  for (const Shard& shard : corpus->shards()) {
    if (shard.marks() == nullptr) continue;
    marks.files.push_back({MarksPath(shard.path()), shard.marks()->identity()});
  }
  const std::string key = absl::StrCat("shards ", kScanVersion, "\n", Fingerprint({&marks}));
  const auto check = [&](const CheckedFile& file) {
    return ParseDescription(file, num_shards).status();
  };
  const auto make = [&](CheckedFileWriter*) -> absl::StatusOr<DataCache::Content> {
    const absl::StatusOr<ShardScan> scan = ScanShards(corpus->shards());
    if (!scan.ok()) return sources.Error(scan.status());
    return DataCache::Content{0, Describe(*scan)};
  };
  BURST_ASSIGN_OR_RETURN(const auto file, cache.Get(key, check, make));
  BURST_ASSIGN_OR_RETURN(ShardScan scan, ParseDescription(*file, num_shards));
  corpus->set_scan(std::move(scan));
  return ShardData{corpus, header.vocab, header.end_of_text};
}

}  // namespace burst
