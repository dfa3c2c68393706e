#include "burst/comm/agreement.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr size_t kMostShown = 200;  // the most characters of a value in an error

// A rank's first message, a digest. Ranks that agree send each other only 16 bytes.
struct Summary {
  uint64_t hash, bytes;  // hash and length of the text
  bool operator==(const Summary& other) const { return hash == other.hash && bytes == other.bytes; }
};

uint64_t HashOf(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

// Joins names and values in turns, each after its length.
std::string ToText(const std::vector<AgreedItem>& items) {
  std::string text;
  for (const AgreedItem& item : items) {
    for (const std::string& part : {item.name, item.value}) {
      absl::StrAppend(&text, part.size(), ":", part);
    }
  }
  return text;
}

std::vector<AgreedItem> FromText(absl::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::pair<absl::string_view, absl::string_view> split =
        absl::StrSplit(text, absl::MaxSplits(':', 1));
    size_t bytes = 0;
    if (!absl::SimpleAtoi(split.first, &bytes) || bytes > split.second.size()) break;
    parts.emplace_back(split.second.substr(0, bytes));
    text = split.second.substr(bytes);
  }
  std::vector<AgreedItem> items;
  for (size_t i = 0; i + 1 < parts.size(); i += 2) items.push_back({parts[i], parts[i + 1]});
  return items;
}

Disagreement Compare(const std::vector<AgreedItem>& of_rank0,
                     const std::vector<AgreedItem>& of_rank, int rank) {
  const AgreedItem nothing = {"", "nothing"};
  for (size_t i = 0; i < std::max(of_rank0.size(), of_rank.size()); ++i) {
    const AgreedItem& a = i < of_rank0.size() ? of_rank0[i] : nothing;
    const AgreedItem& b = i < of_rank.size() ? of_rank[i] : nothing;
    if (a.name != b.name) return {"what ranks compare", rank, b.name, a.name};
    if (a.value != b.value) return {a.name, rank, b.value, a.value};
  }
  return {"what ranks compare", rank, "other bytes", "bytes"};
}

std::string Shown(const std::string& value) {
  if (value.empty()) return "''";
  if (value.size() <= kMostShown) return absl::CHexEscape(value);
  return absl::StrCat(absl::CHexEscape(value.substr(0, kMostShown)), "... (", value.size(),
                      " characters, hash ", absl::Hex(HashOf(value)), ")");
}

}  // namespace

absl::StatusOr<std::optional<Disagreement>> FindDisagreement(Communicator* comm,
                                                             const std::vector<AgreedItem>& items) {
  std::string text = ToText(items);
  const Summary own = {HashOf(text), text.size()};
  std::vector<Summary> all(comm->world_size());
  BURST_RETURN_IF_ERROR(comm->AllGather(&own, sizeof(own), all.data()));
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const Summary& one) { return !(one == all[0]); });
  if (other == all.end()) return std::optional<Disagreement>();
  const int rank = static_cast<int>(other - all.begin());
  std::vector<AgreedItem> said[2];
  for (const int root : {0, rank}) {
    std::string theirs = text;
    theirs.resize(all[root].bytes);
    BURST_RETURN_IF_ERROR(comm->Broadcast(&theirs[0], all[root].bytes, root));
    said[root == 0 ? 0 : 1] = FromText(theirs);
  }
  return Compare(said[0], said[1], comm->WorldRank(rank));
}

absl::Status CheckAgreement(Communicator* comm, const std::vector<AgreedItem>& items) {
  BURST_ASSIGN_OR_RETURN(const std::optional<Disagreement> found, FindDisagreement(comm, items));
  if (!found.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(found->name, ": ", Shown(found->value), " on rank ", found->rank, ", ",
                   Shown(found->value_of_rank0), " on rank 0; give all ranks the same"));
}

}  // namespace burst
