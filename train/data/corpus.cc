#include "train/data/corpus.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

// llm.c's shards: 256 int32 (magic, version, number of tokens, zeros), then uint16 tokens.
constexpr int64_t kShardHeaderBytes = 256 * sizeof(int32_t);
constexpr int32_t kShardMagic = 20240520;
constexpr int32_t kShardVersion = 1;

bool IsShard(const std::string& path) { return absl::EndsWith(path, ".bin"); }

struct Sources {
  bool shards = false;
  std::vector<std::string> files;  // at least one
};

absl::Status FilesOfFolder(const std::string& folder, std::vector<std::string>* files) {
  std::error_code error;
  fs::recursive_directory_iterator it(folder, error), end;
  for (; !error && it != end; it.increment(error)) {
    const bool hidden = absl::StartsWith(it->path().filename().string(), ".");
    if (hidden && it->is_directory()) it.disable_recursion_pending();
    if (!hidden && it->is_regular_file()) files->push_back(it->path().string());
  }
  if (error) return absl::NotFoundError(absl::StrCat(folder, ": ", error.message()));
  std::sort(files->begin(), files->end());
  return absl::OkStatus();
}

std::vector<std::string> MatchPattern(const std::string& pattern) {
  glob_t matches;
  std::vector<std::string> files;
  if (glob(pattern.c_str(), 0, nullptr, &matches) == 0) {
    files.assign(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  }
  globfree(&matches);
  return files;
}

absl::StatusOr<Sources> FindSources(const std::string& data) {
  Sources sources;
  std::error_code error;
  if (fs::is_directory(data, error)) {
    BURST_RETURN_IF_ERROR(FilesOfFolder(data, &sources.files));
    if (sources.files.empty()) {
      return absl::NotFoundError(absl::StrCat("the folder ", data, " holds no files"));
    }
  } else if (fs::exists(data, error)) {
    sources.files = {data};
  } else {
    sources.files = MatchPattern(data);
    if (sources.files.empty()) {
      return absl::NotFoundError(absl::StrCat("no such file or folder: ", data));
    }
  }
  const int64_t shards = std::count_if(sources.files.begin(), sources.files.end(), IsShard);
  if (shards != 0 && shards != static_cast<int64_t>(sources.files.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(data, " mixes .bin shards with other files; name only one kind"));
  }
  sources.shards = shards != 0;
  return sources;
}

// Documents of a single text: blocks between blank lines. Each view reaches to the next one.
std::vector<absl::string_view> SplitAtBlankLines(absl::string_view text) {
  std::vector<absl::string_view> documents;
  size_t document = 0;
  bool after_blank = false;
  for (size_t line = 0; line < text.size();) {
    const size_t newline = std::min(text.find('\n', line), text.size() - 1);
    const absl::string_view content = text.substr(line, newline + 1 - line);
    const bool blank = content.find_first_not_of(" \t\r\n") == absl::string_view::npos;
    if (!blank && after_blank && line > document) {
      const absl::string_view before = text.substr(document, line - document);
      // Blank lines before the first document belong to it.
      if (before.find_first_not_of(" \t\r\n") != absl::string_view::npos) {
        documents.push_back(before);
        document = line;
      }
    }
    after_blank = blank;
    line = newline + 1;
  }
  documents.push_back(text.substr(document));
  return documents;
}

struct Texts {
  std::vector<std::string> files, contents;
};

absl::StatusOr<Texts> ReadTexts(const Sources& sources) {
  Texts texts;
  for (const std::string& file : sources.files) {
    BURST_ASSIGN_OR_RETURN(std::string content, ReadFile(file));
    if (content.empty() && sources.files.size() == 1) {
      return absl::InvalidArgumentError(absl::StrCat(file, " is empty"));
    }
    if (content.empty()) continue;  // an empty document adds nothing
    texts.files.push_back(file);
    texts.contents.push_back(std::move(content));
  }
  if (texts.files.empty()) return absl::InvalidArgumentError("every file of the folder is empty");
  return texts;
}

absl::Status InOption(absl::string_view option, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("--", option, ": ", status.message()));
}

std::string InFile(const std::string& file, const absl::Status& status) {
  return absl::StrCat(file, ": ", status.message());
}

}  // namespace

class CorpusBuilder {
 public:
  // One document a file, ended by the tokenizer's end-of-text; or one file of many documents.
  static absl::StatusOr<std::shared_ptr<const Corpus>> FromTexts(const Texts& texts,
                                                                 const Tokenizer& tokenizer) {
    auto corpus = std::make_shared<Corpus>();
    for (size_t i = 0; i < texts.files.size(); ++i) {
      std::vector<absl::string_view> documents = {texts.contents[i]};
      if (texts.files.size() == 1) documents = SplitAtBlankLines(texts.contents[i]);
      auto tokens = std::make_shared<std::vector<uint16_t>>();
      tokens->reserve(texts.contents[i].size() + 1);
      for (absl::string_view document : documents) {
        corpus->document_starts_.push_back(corpus->size_ + static_cast<int64_t>(tokens->size()));
        const absl::Status status = tokenizer.Encode(document, tokens.get());
        if (!status.ok()) {
          return absl::InvalidArgumentError(InFile(texts.files[i], status));
        }
      }
      if (tokenizer.end_of_text() >= 0) {
        tokens->push_back(static_cast<uint16_t>(tokenizer.end_of_text()));
      }
      Append(corpus.get(),
             {texts.files[i], 0, static_cast<int64_t>(tokens->size()), tokens->data(), tokens});
    }
    return corpus;
  }

  static absl::StatusOr<std::shared_ptr<const Corpus>> FromShards(
      const std::vector<std::string>& files) {
    auto corpus = std::make_shared<Corpus>();
    corpus->starts_are_tokens_ = true;
    for (const std::string& file : files) {
      BURST_ASSIGN_OR_RETURN(Corpus::Piece piece, MapShard(file));
      Append(corpus.get(), std::move(piece));
    }
    if (corpus->size_ == 0) return absl::InvalidArgumentError("the shards hold no tokens");
    return corpus;
  }

 private:
  static void Append(Corpus* corpus, Corpus::Piece piece) {
    piece.begin = corpus->size_;
    corpus->size_ += piece.size;
    if (piece.size > 0) corpus->pieces_.push_back(std::move(piece));
  }

  static absl::StatusOr<Corpus::Piece> MapShard(const std::string& file) {
    const auto invalid = [&](const auto&... what) {
      return absl::InvalidArgumentError(absl::StrCat(file, ": ", what...));
    };
    const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return absl::NotFoundError(absl::StrCat(file, ": ", strerror(errno)));
    struct stat info;
    fstat(fd, &info);
    const int64_t bytes = info.st_size;
    if (bytes < kShardHeaderBytes) {
      close(fd);
      return invalid("not a shard: ", bytes, " bytes, shorter than the header of ",
                     kShardHeaderBytes);
    }
    void* memory = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    const int map_errno = errno;
    close(fd);
    if (memory == MAP_FAILED) {
      return absl::InternalError(absl::StrCat(file, ": cannot be mapped: ", strerror(map_errno)));
    }
    std::shared_ptr<const void> owner(memory, [bytes](void* mapped) { munmap(mapped, bytes); });

    int32_t header[3];
    std::memcpy(header, memory, sizeof(header));
    if (header[0] != kShardMagic) {
      return invalid("not a shard of llm.c: the magic number is ", header[0], ", expected ",
                     kShardMagic);
    }
    if (header[1] != kShardVersion) {
      return invalid("shard version ", header[1], ", expected ", kShardVersion,
                     " (tokens of 16 bits)");
    }
    const int64_t expected = kShardHeaderBytes + int64_t{header[2]} * 2;
    if (header[2] < 0 || bytes != expected) {
      return invalid(bytes < expected ? "truncated: " : "wrong length: ", bytes,
                     " bytes, but the header promises ", header[2], " tokens, ", expected,
                     " bytes");
    }
    const auto* tokens =
        reinterpret_cast<const uint16_t*>(static_cast<const char*>(memory) + kShardHeaderBytes);
    return Corpus::Piece{file, 0, header[2], tokens, std::move(owner)};
  }
};

void Corpus::Read(int64_t begin, int64_t count, int32_t* out) const {
  BURST_CHECK(0 <= begin && begin + count <= size_)
      << "tokens [" << begin << ", " << begin + count << ") of " << size_;
  auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                [](int64_t at, const Piece& p) { return at < p.begin; });
  for (--piece; count > 0; ++piece) {
    const int64_t offset = begin - piece->begin;
    const int64_t n = std::min(count, piece->size - offset);
    std::copy_n(piece->tokens + offset, n, out);
    begin += n, out += n, count -= n;
  }
}

void Corpus::DocumentStarts(int64_t begin, int64_t end, std::vector<int64_t>* starts) const {
  if (!starts_are_tokens_) {
    const auto first = std::lower_bound(document_starts_.begin(), document_starts_.end(), begin);
    const auto last = std::lower_bound(first, document_starts_.end(), end);
    starts->insert(starts->end(), first, last);
    return;
  }
  for (const Piece& piece : pieces_) {
    const int64_t last = std::min(end, piece.begin + piece.size);
    for (int64_t i = std::max(begin, piece.begin); i < last; ++i) {
      if (piece.tokens[i - piece.begin] == kGpt2EndOfText) starts->push_back(i);
    }
  }
}

absl::Status Corpus::CheckVocab(int64_t vocab) const {
  if (vocab > UINT16_MAX) return absl::OkStatus();
  for (const Piece& piece : pieces_) {
    // A maximum vectorizes; the culprit is looked for only when there is one.
    uint16_t largest = 0;
    for (int64_t i = 0; i < piece.size; ++i) largest = std::max(largest, piece.tokens[i]);
    if (largest < vocab) continue;
    const auto* bad = std::find_if(piece.tokens, piece.tokens + piece.size,
                                   [vocab](uint16_t token) { return token >= vocab; });
    return absl::InvalidArgumentError(absl::StrCat(piece.file, ": token ", *bad, " at position ",
                                                   bad - piece.tokens,
                                                   " is beyond the model's vocabulary of ", vocab));
  }
  return absl::OkStatus();
}

namespace {

std::string Describe(const Corpus& corpus, const Sources& sources, const TrainingData& data) {
  const std::string what = sources.files.size() == 1
                               ? fs::path(sources.files[0]).filename().string()
                               : absl::StrCat(sources.files.size(), " files");
  if (sources.shards) return absl::StrCat(Thousands(corpus.size()), " tokens of ", what);
  return absl::StrFormat("%s %s of %s, %d tokens in the vocabulary", Thousands(corpus.size()),
                         data.tokenizer->kind() == Tokenizer::Kind::kByte ? "bytes" : "characters",
                         what, data.vocab);
}

// Both texts are read before either is encoded: the characters of both make the vocabulary.
absl::Status LoadTexts(const Sources& train, const Sources* validation, Tokenizer::Kind kind,
                       TrainingData* data) {
  absl::StatusOr<Texts> train_texts = ReadTexts(train);
  BURST_RETURN_IF_ERROR(InOption("data", train_texts.status()));
  absl::StatusOr<Texts> validation_texts = Texts();
  if (validation != nullptr) validation_texts = ReadTexts(*validation);
  BURST_RETURN_IF_ERROR(InOption("val_data", validation_texts.status()));

  const bool end_of_text = train_texts->files.size() > 1 || validation_texts->files.size() > 1;
  if (kind == Tokenizer::Kind::kByte) {
    data->tokenizer = Tokenizer::Byte(end_of_text);
  } else {
    std::vector<absl::string_view> all;
    for (const Texts* texts : {&*train_texts, &*validation_texts}) {
      for (size_t i = 0; i < texts->files.size(); ++i) {
        // One at a time first, so that an error names the file.
        const absl::Status status = Tokenizer::Char({texts->contents[i]}, false).status();
        if (!status.ok()) {
          return absl::InvalidArgumentError(
              absl::StrCat(texts == &*train_texts ? "--data: " : "--val_data: ",
                           InFile(texts->files[i], status)));
        }
        all.push_back(texts->contents[i]);
      }
    }
    BURST_ASSIGN_OR_RETURN(data->tokenizer, Tokenizer::Char(all, end_of_text));
  }
  data->vocab = data->tokenizer->vocab();
  BURST_ASSIGN_OR_RETURN(data->train.corpus,
                         CorpusBuilder::FromTexts(*train_texts, *data->tokenizer));
  if (validation != nullptr) {
    BURST_ASSIGN_OR_RETURN(data->validation.corpus,
                           CorpusBuilder::FromTexts(*validation_texts, *data->tokenizer));
  }
  return absl::OkStatus();
}

absl::Status LoadShards(const Sources& train, const Sources* validation, TrainingData* data) {
  data->vocab = kGpt2Vocab;
  auto corpus = CorpusBuilder::FromShards(train.files);
  BURST_RETURN_IF_ERROR(InOption("data", corpus.status()));
  data->train.corpus = *corpus;
  if (validation != nullptr) {
    corpus = CorpusBuilder::FromShards(validation->files);
    BURST_RETURN_IF_ERROR(InOption("val_data", corpus.status()));
    data->validation.corpus = *corpus;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TrainingData> LoadTrainingData(const std::string& data_path,
                                              const std::string& validation_path,
                                              std::optional<Tokenizer::Kind> tokenizer) {
  absl::StatusOr<Sources> train = FindSources(data_path);
  BURST_RETURN_IF_ERROR(InOption("data", train.status()));
  std::optional<Sources> validation;
  if (!validation_path.empty()) {
    absl::StatusOr<Sources> found = FindSources(validation_path);
    BURST_RETURN_IF_ERROR(InOption("val_data", found.status()));
    validation = *std::move(found);
    if (validation->shards != train->shards) {
      return absl::InvalidArgumentError(absl::StrCat("--val_data: ", validation_path,
                                                     " must be of the same kind as --data (",
                                                     train->shards ? ".bin shards" : "text", ")"));
    }
  }
  const Sources* validation_sources = validation.has_value() ? &*validation : nullptr;

  TrainingData data;
  if (train->shards) {
    if (tokenizer.has_value()) {
      return absl::InvalidArgumentError(
          "--tokenizer: .bin shards hold tokens already; leave it out");
    }
    BURST_RETURN_IF_ERROR(LoadShards(*train, validation_sources, &data));
  } else {
    BURST_RETURN_IF_ERROR(
        LoadTexts(*train, validation_sources, tokenizer.value_or(Tokenizer::Kind::kChar), &data));
  }

  data.train.end = data.train.corpus->size();
  if (validation.has_value()) {
    data.validation.end = data.validation.corpus->size();
  } else {
    data.train.end = static_cast<int64_t>(0.9 * static_cast<double>(data.train.end));
    data.validation = {data.train.corpus, data.train.end, data.train.corpus->size()};
  }
  std::vector<int64_t> starts;
  data.train.corpus->DocumentStarts(1, data.train.end, &starts);
  data.has_documents = !starts.empty();
  data.summary = Describe(*data.train.corpus, *train, data);
  return data;
}

}  // namespace burst
