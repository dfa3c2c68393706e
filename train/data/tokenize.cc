#include "train/data/tokenize.h"

#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "burst/base/status.h"
#include "burst/cli/file_lock.h"
#include "burst/cli/files.h"
#include "train/data/document_encoder.h"
#include "train/data/progress.h"
#include "train/data/shard_writer.h"
#include "train/data/sources.h"
#include "train/data/text_check.h"
#include "train/data/tokenizer.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

absl::Status Named(absl::string_view option, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("--", option, ": ", status.message()));
}

// Returns whether the program gives files of its unfinished folder such a name.
bool IsOwnName(absl::string_view name) {
  for (const absl::string_view start : {"train_", "val_", "tokenizer", "."}) {
    if (absl::StartsWith(name, start)) return true;
  }
  return false;
}

// The output folder while it is being written.
class OutputFolder {
 public:
  static absl::StatusOr<OutputFolder> Make(const std::string& path) {
    std::error_code error;
    if (fs::exists(path, error)) {
      return absl::AlreadyExistsError(
          absl::StrCat("--out: ", path, " is there already; remove it or give another folder"));
    }
    const std::string part = absl::StrCat(path, ".part");
    // Leftovers are removed below, but a user's folder may have the same name.
    for (fs::directory_iterator it(part, error), end; !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename().string();
      if (IsOwnName(name)) continue;
      return absl::AlreadyExistsError(absl::StrCat("--out: ", part, " holds ", name,
                                                   ", which is not of an unfinished ",
                                                   "//train:tokenize; give another folder"));
    }
    fs::create_directories(part, error);
    if (error) {
      return absl::InternalError(
          absl::StrCat("--out: cannot make the folder ", part, ": ", error.message()));
    }
    absl::StatusOr<FileLock> lock = FileLock::TryAcquire(part + "/" + kLock);
    if (!lock.ok()) return Named("out", lock.status());
    // The earlier holder of the lock may have given the folder its name.
    BURST_RETURN_IF_ERROR(Named("out", lock->CheckStillThere()));
    // Removes the leftovers of a killed process.
    std::vector<fs::path> left;
    for (fs::directory_iterator it(part, error), end; !error && it != end; it.increment(error)) {
      if (it->path().filename() != kLock) left.push_back(it->path());
    }
    for (const fs::path& file : left) fs::remove(file, error);
    return OutputFolder(path, part, *std::move(lock));
  }

  const std::string& part() const { return part_; }

  absl::Status Finish() {
    BURST_RETURN_IF_ERROR(Named("out", SyncFolder(part_)));
    if (rename(part_.c_str(), path_.c_str()) != 0) {
      return absl::InternalError(
          absl::StrCat("--out: cannot rename ", part_, " to ", path_, ": ", strerror(errno)));
    }
    // The lock stays until the folder has its name. Otherwise another process would lock a new file
    // and empty the folder.
    std::error_code error;
    fs::remove(path_ + "/" + kLock, error);
    return Named("out", SyncFolder(fs::path(path_).parent_path().string()));
  }

 private:
  static constexpr char kLock[] = ".lock";

  OutputFolder(std::string path, std::string part, FileLock lock)
      : path_(std::move(path)), part_(std::move(part)), lock_(std::move(lock)) {}

  std::string path_, part_;
  FileLock lock_;
};

// The tokens around a document. If tokens come before it, the first of them separates documents.
struct Surroundings {
  std::vector<int32_t> before, behind;
};

ShardHeader HeaderFor(const Tokenizer& tokenizer, const Surroundings& surroundings) {
  ShardHeader header = ShardHeader::For(tokenizer.vocab(),
                                        surroundings.before.empty() ? -1 : surroundings.before[0]);
  header.closed = !surroundings.behind.empty();
  return header;
}

// Writes each document with its surroundings. The first documents go to validation.
class DocumentWriter {
 public:
  DocumentWriter(const TokenizeConfig& config, const std::string& folder,
                 const Tokenizer& tokenizer, Surroundings surroundings)
      : surroundings_(std::move(surroundings)),
        val_tokens_(config.val_tokens),
        header_(HeaderFor(tokenizer, surroundings_)),
        train_(folder + "/train", header_, config.shard_tokens),
        val_(folder + "/val", header_, config.shard_tokens) {}

  absl::Status Append(const EncodedPiece& piece) {
    size_t at = 0;
    for (size_t i = 0; i < piece.starts.size(); ++i) {
      const size_t start = piece.starts[i];
      BURST_RETURN_IF_ERROR(WriteText(piece, at, start));
      at = start;
      BURST_RETURN_IF_ERROR(EndDocument());
      validation_ = val_.tokens() < val_tokens_;
      BURST_RETURN_IF_ERROR(BeginDocument(i < piece.masked.size() && piece.masked[i]));
    }
    bytes_ += piece.bytes;
    skipped_.Add(piece.skipped);
    return WriteText(piece, at, piece.tokens.size());
  }

  absl::StatusOr<TokenizeSummary> Finish() {
    BURST_RETURN_IF_ERROR(EndDocument());
    BURST_RETURN_IF_ERROR(val_.Finish());
    BURST_RETURN_IF_ERROR(train_.Finish());
    return TokenizeSummary{documents_, bytes_, val_.tokens() + train_.tokens(),
                           val_.shards() + train_.shards(), skipped_};
  }

 private:
  // A document with a mask has no surroundings, because its template writes them.
  absl::Status EndDocument() {
    if (documents_ == 0 || masked_) return absl::OkStatus();
    return Write(surroundings_.behind, kCounts);
  }

  // The first token of a document counts only if it is the separator that ends another one.
  absl::Status BeginDocument(bool masked) {
    const bool ends_another = documents_++ > 0 && !masked_;
    masked_ = masked;
    begins_ = true;
    first_counts_ = !masked && ends_another && !surroundings_.before.empty() && !header_.closed;
    return masked ? absl::OkStatus() : Write(surroundings_.before, kCounts);
  }

  absl::Status Write(absl::Span<const int32_t> tokens, uint8_t mark) {
    return WriteMarked(tokens, std::vector<uint8_t>(tokens.size(), mark));
  }

  // Writes tokens [begin, end) of a piece.
  absl::Status WriteText(const EncodedPiece& piece, size_t begin, size_t end) {
    const auto tokens = absl::MakeSpan(piece.tokens).subspan(begin, end - begin);
    if (piece.counted.empty()) return Write(tokens, kCounts);
    return WriteMarked(tokens, {piece.counted.begin() + begin, piece.counted.begin() + end});
  }

  absl::Status WriteMarked(absl::Span<const int32_t> tokens, std::vector<uint8_t> marks) {
    if (begins_ && !tokens.empty()) {
      marks[0] = first_counts_ ? kBegins | kCounts : kBegins;
      begins_ = false;
    }
    return (validation_ ? val_ : train_).Append(tokens, marks, masked_);
  }

  const Surroundings surroundings_;
  const int64_t val_tokens_;
  const ShardHeader header_;
  ShardWriter train_, val_;
  bool validation_ = false;
  bool masked_ = false;                         // the current document has a mask
  bool begins_ = false, first_counts_ = false;  // the next token begins a document; it counts
  int64_t documents_ = 0, bytes_ = 0;
  SkippedLines skipped_;
};

}  // namespace

namespace {

absl::StatusOr<Surroundings> FindSurroundings(const TokenizeConfig& config,
                                              const Tokenizer& tokenizer) {
  Surroundings found;
  const int32_t end_of_text = tokenizer.end_of_text();
  if (config.separators && end_of_text < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tokenizer: ", config.tokenizer,
                     " has no end-of-text token to separate documents; give --noseparators"));
  }
  if (!config.bos) {
    if (config.separators) found.before = {end_of_text};
    return found;
  }
  absl::StatusOr<std::vector<int32_t>> beginning = tokenizer.Beginning();
  if (!beginning.ok()) return Named("bos", beginning.status());
  if (beginning->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--bos: needs a tokenizer that puts tokens before a text; ", config.tokenizer,
                     " puts none (post_processor of tokenizer.json); give --nobos"));
  }
  found.before = *std::move(beginning);
  // If the separator and the end of text are one token, the next document's separator is the end.
  if (config.separators && found.before[0] != end_of_text) found.behind = {end_of_text};
  return found;
}

}  // namespace

absl::StatusOr<TokenizeSummary> TokenizeToShards(const TokenizeConfig& config) {
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(config.tokenizer);
  if (!tokenizer.ok()) return Named("tokenizer", tokenizer.status());
  BURST_ASSIGN_OR_RETURN(Surroundings surroundings, FindSurroundings(config, *tokenizer));
  BURST_ASSIGN_OR_RETURN(const Sources sources, FindSources("data", config.data));
  BURST_RETURN_IF_ERROR(CheckHasLines(config.lines, sources.json_lines));
  if (sources.shards) {
    return sources.Error(absl::InvalidArgumentError(".bin shards are tokens already"));
  }
  BURST_RETURN_IF_ERROR(CheckIsText(sources, /*any_bytes=*/false, config.lines.field));
  DocumentFormat format;
  format.documents = sources.json_lines ? DocumentsAre::kJsonLines : DocumentsAre::kFiles;
  format.lines = config.lines;
  int64_t bytes = 0;
  for (const SourceFile& file : sources.files) bytes += file.identity.bytes;

  BURST_ASSIGN_OR_RETURN(OutputFolder folder, OutputFolder::Make(config.out));
  DocumentWriter writer(config, folder.part(), *tokenizer, std::move(surroundings));
  Progress progress("tokenizing", bytes);
  BURST_RETURN_IF_ERROR(EncodeDocuments(
      sources, *tokenizer, format, &progress,
      [&](const EncodedPiece& piece) { return Named("out", writer.Append(piece)); }));
  const absl::StatusOr<TokenizeSummary> summary = writer.Finish();
  if (!summary.ok()) return Named("out", summary.status());
  if (summary->tokens == 0) {
    return sources.Error(absl::InvalidArgumentError("there is no text in it"));
  }
  BURST_RETURN_IF_ERROR(
      Named("out", WriteFileAtomically(absl::StrCat(folder.part(), "/", tokenizer->file_name()),
                                       tokenizer->file())));
  BURST_RETURN_IF_ERROR(folder.Finish());
  return summary;
}

}  // namespace burst
