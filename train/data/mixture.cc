#include "train/data/mixture.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

class JoinedCorpus : public Corpus {
 public:
  JoinedCorpus(std::vector<TokenSpan> spans, uint64_t salt) : spans_(std::move(spans)) {
    std::vector<uint64_t> digests = {salt};
    for (const TokenSpan& span : spans_) {
      begins_.push_back(size_);
      size_ += span.size();
      digests.insert(digests.end(), {span.corpus->digest(), static_cast<uint64_t>(span.begin),
                                     static_cast<uint64_t>(span.end)});
    }
    digest_ = XXH3_64bits(digests.data(), digests.size() * sizeof(digests[0]));
  }

  int64_t size() const override { return size_; }
  int32_t separator() const override { return spans_[0].corpus->separator(); }
  uint64_t digest() const override { return digest_; }
  int64_t second_document() const override {
    const int64_t second = spans_[0].corpus->second_document() - spans_[0].begin;
    return second > 0 ? std::min(second, spans_[0].size()) : spans_[0].size();
  }
  absl::Status CheckVocab(int64_t vocab) const override {
    for (const TokenSpan& span : spans_) BURST_RETURN_IF_ERROR(span.corpus->CheckVocab(vocab));
    return absl::OkStatus();
  }
  bool has_marks() const override {
    return std::any_of(spans_.begin(), spans_.end(),
                       [](const TokenSpan& span) { return span.corpus->has_marks(); });
  }

  absl::Status Read(int64_t begin, int64_t count, int32_t* out) const override {
    BURST_CHECK(0 <= begin && begin + count <= size_);
    return ForEachPart(begin, begin + count, [&](const TokenSpan& span, int64_t from, int64_t to) {
      const absl::Status status = span.corpus->Read(from, to - from, out);
      out += to - from;
      return status;
    });
  }
  absl::Status DocumentStarts(int64_t begin, int64_t end,
                              std::vector<int64_t>* starts) const override {
    return Places(
        begin, end, starts,
        [](const TokenSpan& span, int64_t from, int64_t to, std::vector<int64_t>* places) {
          // A part begins with a document.
          if (from == span.begin) places->push_back(from);
          return span.corpus->DocumentStarts(std::max(from, span.begin + 1), to, places);
        });
  }
  // Documents of a part without marks begin with a token that does not count, unless it is a
  // separator.
  absl::Status NotCounted(int64_t begin, int64_t end, std::vector<int64_t>* places) const override {
    return Places(begin, end, places,
                  [](const TokenSpan& span, int64_t from, int64_t to, std::vector<int64_t>* found) {
                    if (span.corpus->has_marks()) return span.corpus->NotCounted(from, to, found);
                    if (span.corpus->separator() >= 0) return absl::OkStatus();
                    return span.corpus->DocumentStarts(from, to, found);
                  });
  }

 private:
  // Calls visit(span, begin, end) for the parts of [begin, end), with places in the part's corpus.
  template <typename Visit>
  absl::Status ForEachPart(int64_t begin, int64_t end, const Visit& visit) const {
    end = std::min(end, size_);
    for (size_t i = 0; i < spans_.size(); ++i) {
      const TokenSpan& span = spans_[i];
      const int64_t from = std::max<int64_t>(0, begin - begins_[i]);
      const int64_t to = std::min(span.size(), end - begins_[i]);
      if (from < to) BURST_RETURN_IF_ERROR(visit(span, span.begin + from, span.begin + to));
    }
    return absl::OkStatus();
  }

  // Appends the places that `find` finds in each part, as places in this corpus.
  template <typename Find>
  absl::Status Places(int64_t begin, int64_t end, std::vector<int64_t>* places,
                      const Find& find) const {
    return ForEachPart(begin, end, [&](const TokenSpan& span, int64_t from, int64_t to) {
      const size_t before = places->size();
      const absl::Status status = find(span, from, to, places);
      const int64_t moved = begins_[&span - spans_.data()] - span.begin;
      for (size_t i = before; i < places->size(); ++i) (*places)[i] += moved;
      return status;
    });
  }

  const std::vector<TokenSpan> spans_;
  std::vector<int64_t> begins_;  // place of each span in this corpus
  int64_t size_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<MixturePart>> ParseMixture(const std::string& data) {
  std::vector<MixturePart> parts;
  std::error_code unknown;  // a name may be too long for a file
  const bool there = std::filesystem::exists(data, unknown);
  for (const absl::string_view text : absl::StrSplit(data, ',')) {
    const size_t colon = text.rfind(':');
    MixturePart part;
    if (there || colon == absl::string_view::npos || colon == 0 ||
        !absl::SimpleAtod(text.substr(colon + 1), &part.weight)) {
      return std::vector<MixturePart>{{data, 1}};
    }
    part.path = std::string(text.substr(0, colon));
    if (!std::isfinite(part.weight) || part.weight <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--data: the weight of a part must be positive; got ", text,
                       "; give PATH:WEIGHT,PATH:WEIGHT"));
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::string MixtureText(const std::vector<MixturePart>& parts) {
  if (parts.size() == 1) return parts[0].path;
  return absl::StrJoin(parts, ",", [](std::string* out, const MixturePart& part) {
    absl::StrAppend(out, part.path, ":", part.weight);
  });
}

std::shared_ptr<const Corpus> JoinCorpora(std::vector<TokenSpan> spans, uint64_t salt) {
  return std::make_shared<JoinedCorpus>(std::move(spans), salt);
}

}  // namespace burst
