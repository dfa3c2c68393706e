#include "train/data/text_encoder.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "train/data/blank_lines.h"
#include "train/data/progress.h"
#include "train/data/utf8.h"

namespace burst {
namespace {

constexpr int64_t kOverlap = 3;  // the most bytes of a character after its first

// Bytes [offset, offset + bytes) of a file. If a cut is inside a character, the piece has the
// characters that begin in it.
struct Piece {
  int part = 0;  // the source's number
  const SourceFile* file = nullptr;
  int64_t offset = 0, bytes = 0;
  bool last_of_file = false;

  // The survey sets these fields.
  int64_t skipped = 0;  // bytes at the beginning that continue a character
  int64_t overrun = 0;  // bytes after the end that belong to the last character
  int64_t characters = 0;
  int64_t bad_byte = -1;  // offset in the file of the first byte that is not UTF-8
  PieceLines lines;

  // Place sets these fields.
  int64_t position = 0;  // position of its first token in the part
  LineState state;       // before it
};

struct Part {
  const Sources* sources = nullptr;
  int64_t files = 0;  // number of files that are not empty
  bool split_at_blank_lines = false;
};

// Buffers of one thread.
struct Worker {
  std::vector<char> text;
  std::vector<uint16_t> tokens;
  std::vector<int64_t> starts;
  std::vector<char> seen;  // [kCodePoints], or empty
  uint32_t largest = 0;    // the largest character that was seen
  std::optional<InputFile> input;
  const SourceFile* open = nullptr;
};

class TextEncoder {
 public:
  TextEncoder(Tokenizer::Kind kind, const Tokenizer* given, CheckedFileWriter* payload)
      : characters_(kind == Tokenizer::Kind::kChar), given_(given), payload_(payload) {}

  absl::Status AddSource(const Sources& sources, int64_t piece_bytes);
  absl::StatusOr<EncodedTexts> Encode();

 private:
  using Body = std::function<absl::Status(int64_t number, Piece& piece, Worker& worker)>;
  absl::Status ForEachPiece(const Body& body);
  absl::StatusOr<absl::string_view> Text(const Piece& piece, Worker* worker) const;
  absl::Status Survey(int64_t number, Piece& piece, Worker& worker);
  absl::Status CheckCharacters() const;
  absl::StatusOr<Tokenizer> MakeTokenizer();
  void Place(EncodedTexts* result);
  absl::Status EncodePiece(int64_t number, const Piece& piece, Worker& worker,
                           EncodedTexts* result);
  absl::Status AppendStarts(int64_t number, const Piece& piece, const std::vector<int64_t>& starts,
                            EncodedTexts* result);

  const bool characters_;
  const Tokenizer* const given_;  // null: the texts make the vocabulary
  CheckedFileWriter* const payload_;
  bool separates_ = false;  // whether end-of-text separates documents
  std::vector<Part> parts_;
  std::vector<Piece> pieces_;  // in the order of the tokens
  int64_t bytes_ = 0;
  std::optional<Progress> progress_;
  std::atomic<int64_t> bad_piece_{std::numeric_limits<int64_t>::max()};  // a piece with a bad byte
  std::mutex mutex_;                                                     // guards the fields below
  std::vector<bool> seen_ = std::vector<bool>(kCodePoints);
  std::condition_variable turn_;
  int64_t next_starts_ = 0;  // the piece whose document starts are appended next
  bool stopped_ = false;

  std::vector<uint16_t> token_of_;  // the token of each code point
};

absl::Status TextEncoder::AddSource(const Sources& sources, int64_t piece_bytes) {
  BURST_CHECK_GT(piece_bytes, kOverlap);
  Part part;
  part.sources = &sources;
  for (const SourceFile& file : sources.files) {
    const int64_t size = file.identity.bytes;
    bytes_ += size;
    if (size > 0) ++part.files;
    for (int64_t offset = 0; offset < size; offset += piece_bytes) {
      Piece piece;
      piece.part = static_cast<int>(parts_.size());
      piece.file = &file;
      piece.offset = offset;
      piece.bytes = std::min(piece_bytes, size - offset);
      piece.last_of_file = offset + piece.bytes == size;
      pieces_.push_back(piece);
    }
  }
  BURST_RETURN_IF_ERROR(CheckHasText(sources, part.files));
  part.split_at_blank_lines = part.files == 1;
  parts_.push_back(part);
  return absl::OkStatus();
}

// Threads take pieces in order. No piece is taken after an error.
absl::Status TextEncoder::ForEachPiece(const Body& body) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> stop{false};
  absl::Status first;
  ParallelTasks(NumThreads(), [&](int64_t) {
    Worker worker;
    const int64_t count = static_cast<int64_t>(pieces_.size());
    for (int64_t number = next++; number < count && !stop; number = next++) {
      const absl::Status status = body(number, pieces_[number], worker);
      progress_->Add(pieces_[number].bytes);
      if (status.ok()) continue;
      stop = true;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (first.ok()) first = status;
      stopped_ = true;
      turn_.notify_all();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (worker.seen.empty()) return;
    for (uint32_t c = 0; c <= worker.largest; ++c) {
      if (worker.seen[c]) seen_[c] = true;
    }
  });
  return first;
}

absl::StatusOr<absl::string_view> TextEncoder::Text(const Piece& piece, Worker* worker) const {
  const Sources& sources = *parts_[piece.part].sources;
  if (worker->open != piece.file) {
    BURST_ASSIGN_OR_RETURN(worker->input, sources.Open(*piece.file));
    worker->open = piece.file;
  }
  const int64_t bytes = std::min(piece.bytes + kOverlap, piece.file->identity.bytes - piece.offset);
  worker->text.resize(std::max<size_t>(worker->text.size(), bytes));
  const absl::Status status = worker->input->ReadAt(piece.offset, bytes, worker->text.data());
  if (!status.ok()) return sources.Error(status);
  return absl::string_view(worker->text.data(), bytes);
}

absl::Status TextEncoder::Survey(int64_t number, Piece& piece, Worker& worker) {
  if (number > bad_piece_) return absl::OkStatus();
  if (!characters_ && !parts_[piece.part].split_at_blank_lines) {
    piece.characters = piece.bytes;
    return absl::OkStatus();
  }
  BURST_ASSIGN_OR_RETURN(const absl::string_view text, Text(piece, &worker));
  const size_t end = static_cast<size_t>(piece.bytes);
  PieceLines lines;
  int64_t characters = 0;
  if (!characters_) {
    for (; characters < piece.bytes; ++characters) {
      lines.Next(static_cast<unsigned char>(text[characters]), characters);
    }
  } else {
    worker.seen.resize(kCodePoints);
    size_t at = 0;
    if (piece.offset > 0) {
      while (at < std::min<size_t>(text.size(), kOverlap) && ContinuesCharacter(text[at])) ++at;
    }
    piece.skipped = static_cast<int64_t>(at);
    while (at < end) {
      const size_t start = at;
      const uint32_t character = NextCodePoint(text, &at);
      if (character == kCodePoints) {
        piece.bad_byte = piece.offset + static_cast<int64_t>(start);
        bad_piece_ = number;  // CheckCharacters finds an earlier one, too
        break;
      }
      worker.seen[character] = true;
      worker.largest = std::max(worker.largest, character);
      lines.Next(character, characters++);
    }
    if (at > end) piece.overrun = static_cast<int64_t>(at - end);
  }
  piece.characters = characters;
  piece.lines = lines;
  return absl::OkStatus();
}

// Returns the error of the first byte of all texts that is not UTF-8.
absl::Status TextEncoder::CheckCharacters() const {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    int64_t bad_byte = piece.bad_byte;
    // This byte should continue a character, but none began before it.
    const int64_t overrun = piece.offset == 0 ? 0 : pieces_[i - 1].overrun;
    if (piece.skipped > overrun) bad_byte = piece.offset + overrun;
    if (bad_byte < 0) continue;
    return parts_[piece.part].sources->Error(absl::InvalidArgumentError(
        absl::StrCat(piece.file->path, ": ", NotUtf8(bad_byte).message())));
  }
  return absl::OkStatus();
}

absl::StatusOr<Tokenizer> TextEncoder::MakeTokenizer() {
  separates_ =
      std::any_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.files > 1; });
  const Tokenizer::Kind kind = characters_ ? Tokenizer::Kind::kChar : Tokenizer::Kind::kByte;
  BURST_ASSIGN_OR_RETURN(Tokenizer tokenizer,
                         TokenizerOfTexts(*parts_[0].sources, kind, seen_, separates_, given_));
  if (!characters_) return tokenizer;
  token_of_.resize(kCodePoints);
  for (size_t token = 0; token < tokenizer.code_points().size(); ++token) {
    token_of_[tokenizer.code_points()[token]] = static_cast<uint16_t>(token);
  }
  return tokenizer;
}

// Computes the place of every piece's tokens, and the state before the piece.
void TextEncoder::Place(EncodedTexts* result) {
  result->parts.resize(parts_.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    Piece& piece = pieces_[i];
    int64_t& tokens = result->parts[piece.part].tokens;
    piece.position = tokens;
    if (piece.offset > 0)
      piece.state = pieces_[i - 1].lines.After(pieces_[i - 1].state, pieces_[i - 1].position);
    tokens += piece.characters;
    if (piece.last_of_file && separates_) ++tokens;
  }
  for (EncodedText& part : result->parts) {
    constexpr int64_t kAlign = 8;  // alignment of the starts, which follow the tokens
    part.tokens_at = result->payload_bytes;
    result->payload_bytes += (2 * part.tokens + kAlign - 1) / kAlign * kAlign;
  }
}

absl::Status TextEncoder::EncodePiece(int64_t number, const Piece& piece, Worker& worker,
                                      EncodedTexts* result) {
  BURST_ASSIGN_OR_RETURN(const absl::string_view text, Text(piece, &worker));
  const Part& part = parts_[piece.part];
  LineState state = piece.state;
  worker.tokens.clear();
  worker.starts.clear();
  if (piece.offset == 0) worker.starts.push_back(piece.position);
  const auto add = [&](uint32_t character, uint16_t token) {
    const int64_t at = piece.position + static_cast<int64_t>(worker.tokens.size());
    if (part.split_at_blank_lines && state.Next(character, at)) {
      worker.starts.push_back(state.line_start);
    }
    worker.tokens.push_back(token);
  };
  const size_t end = static_cast<size_t>(piece.bytes);
  for (size_t at = static_cast<size_t>(piece.skipped); at < end;) {
    if (characters_) {
      const uint32_t character = NextCodePoint(text, &at);
      // This happens only if the file is being changed, which Sources::Open finds, or the next
      // start.
      if (character == kCodePoints) return part.sources->Error(NotUtf8(piece.offset));
      add(character, token_of_[character]);
    } else {
      const auto byte = static_cast<unsigned char>(text[at++]);
      add(byte, byte);
    }
  }
  if (piece.last_of_file && separates_) {
    worker.tokens.push_back(static_cast<uint16_t>(result->tokenizer.end_of_text()));
  }
  BURST_RETURN_IF_ERROR(payload_->Write(result->parts[piece.part].tokens_at + 2 * piece.position,
                                        worker.tokens.data(),
                                        2 * static_cast<int64_t>(worker.tokens.size())));
  return AppendStarts(number, piece, worker.starts, result);
}

// Appends in the order of the pieces. Each waits for the pieces before it, which other threads have
// taken.
absl::Status TextEncoder::AppendStarts(int64_t number, const Piece& piece,
                                       const std::vector<int64_t>& starts, EncodedTexts* result) {
  std::unique_lock<std::mutex> lock(mutex_);
  turn_.wait(lock, [&] { return next_starts_ == number || stopped_; });
  if (stopped_) return absl::OkStatus();
  EncodedText& part = result->parts[piece.part];
  if (part.starts == 0) part.starts_at = result->payload_bytes;
  const int64_t bytes = static_cast<int64_t>(starts.size() * sizeof(starts[0]));
  BURST_RETURN_IF_ERROR(payload_->Write(result->payload_bytes, starts.data(), bytes));
  part.starts += static_cast<int64_t>(starts.size());
  result->payload_bytes += bytes;
  ++next_starts_;
  turn_.notify_all();
  return absl::OkStatus();
}

absl::StatusOr<EncodedTexts> TextEncoder::Encode() {
  progress_.emplace(EncodingWhat(*parts_[0].sources), 2 * bytes_);
  BURST_RETURN_IF_ERROR(ForEachPiece(
      [&](int64_t number, Piece& piece, Worker& worker) { return Survey(number, piece, worker); }));
  BURST_RETURN_IF_ERROR(CheckCharacters());
  BURST_ASSIGN_OR_RETURN(Tokenizer tokenizer, MakeTokenizer());
  EncodedTexts result{std::move(tokenizer), {}, 0, 2};
  Place(&result);
  BURST_RETURN_IF_ERROR(ForEachPiece([&](int64_t number, Piece& piece, Worker& worker) {
    return EncodePiece(number, piece, worker, &result);
  }));
  // A file that was replaced meanwhile would mix two texts.
  for (const Part& part : parts_) {
    for (const SourceFile& file : part.sources->files) {
      BURST_RETURN_IF_ERROR(part.sources->Open(file).status());
    }
  }
  return result;
}

}  // namespace

absl::Status CheckHasText(const Sources& sources, int64_t files) {
  if (files > 0) return absl::OkStatus();
  return sources.Error(absl::InvalidArgumentError(
      sources.files.size() == 1 ? absl::StrCat(sources.files[0].path, " is empty")
                                : std::string("every file of the folder is empty")));
}

std::string EncodingWhat(const Sources& sources) {
  const std::vector<SourceFile>& files = sources.files;
  return absl::StrCat("encoding ", files.size() == 1
                                       ? std::filesystem::path(files[0].path).filename().string()
                                       : absl::StrCat(files.size(), " files"));
}

absl::StatusOr<Tokenizer> TokenizerOfTexts(const Sources& sources, Tokenizer::Kind kind,
                                           const std::vector<bool>& seen, bool separate,
                                           const Tokenizer* given) {
  const bool end_of_text = separate || (given != nullptr && given->end_of_text() >= 0);
  if (kind == Tokenizer::Kind::kByte) return Tokenizer::Byte(end_of_text);
  std::vector<bool> characters = seen;
  if (given != nullptr) {
    characters.assign(kCodePoints, false);
    for (const uint32_t character : given->code_points()) characters[character] = true;
    for (uint32_t c = 0; c < seen.size(); ++c) {
      if (!seen[c] || characters[c]) continue;
      return sources.Error(absl::InvalidArgumentError(
          absl::StrFormat("the character U+%04X is not one of the %d that the model was trained "
                          "on; give --tokenizer, "
                          "or a text without it",
                          c, given->code_points().size())));
    }
  }
  absl::StatusOr<Tokenizer> tokenizer = Tokenizer::OfCharacters(characters, end_of_text);
  if (!tokenizer.ok()) return sources.Error(tokenizer.status());
  return tokenizer;
}

absl::StatusOr<EncodedTexts> EncodeTexts(const std::vector<const Sources*>& sources,
                                         Tokenizer::Kind kind, CheckedFileWriter* payload,
                                         int64_t piece_bytes, const Tokenizer* given) {
  TextEncoder encoder(kind, given, payload);
  for (const Sources* source : sources) {
    BURST_RETURN_IF_ERROR(encoder.AddSource(*source, piece_bytes));
  }
  return encoder.Encode();
}

}  // namespace burst
