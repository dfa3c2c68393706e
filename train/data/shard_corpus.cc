#include "train/data/shard_corpus.h"

#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "train/data/shards.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// The version of the scan. Increase it when a scan would find something else.
constexpr int kVersion = 3;

std::string Describe(const ShardScan& scan) {
  return Json{{"version", kVersion},
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
  if (!json.is_object() || json.value("version", Json()) != kVersion) return bad();
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
  int32_t separator() const override { return shards_[0].header().end_of_text; }
  uint64_t digest() const override {
    const ShardHeader& header = shards_[0].header();
    const uint64_t all[] = {scan_.digest, static_cast<uint64_t>(header.vocab),
                            static_cast<uint64_t>(header.end_of_text)};
    return XXH3_64bits(all, sizeof(all));
  }
  int64_t second_document() const override {
    return scan_.second_document < 0 ? size_ : scan_.second_document;
  }

  absl::Status Read(int64_t begin, int64_t count, int32_t* out) const override {
    BURST_CHECK(0 <= begin && begin + count <= size_)
        << "tokens [" << begin << ", " << begin + count << ") of " << size_;
    // Finds the last shard that begins at or before `begin`. Shards after it may be empty.
    size_t shard = std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin();
    for (--shard; count > 0; ++shard) {
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
  // Calls visit(place, mark) for the tokens [begin, end). A shard without marks has them by its
  // end-of-text tokens.
  template <typename Visit>
  absl::Status ForEachMark(int64_t begin, int64_t end, const Visit& visit) const {
    constexpr int64_t kAtOnce = 1 << 16;
    const int32_t end_of_text = separator();
    std::vector<int32_t> tokens;
    std::vector<uint8_t> marks;
    end = std::min(end, size_);
    for (int64_t count; begin < end; begin += count) {
      const size_t shard =
          std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin() - 1;
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
        for (const int32_t token : tokens) {
          marks.push_back(token == end_of_text ? kCounts | kBegins : kCounts);
        }
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
  const std::string key = absl::StrCat("shards ", kVersion, "\n", Fingerprint({&marks}));
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
