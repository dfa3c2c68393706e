#include "train/data/document_encoder.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/text.h"
#include "train/data/blank_lines.h"
#include "train/data/line_encoder.h"

namespace burst {
namespace {

// A part of a file, from the cut at or after `begin` to the cut at or after `end`
// (FileEncoder::NextCut). The end of the file is a cut, too.
struct Piece {
  const SourceFile* file = nullptr;
  int64_t begin = 0, end = 0;
  int64_t first_cut = -1;  // the one at or after `begin`, if it is known
  PieceLines lines;        // lines from cut to cut
};

// The tokens of a piece, computed without knowing where the pieces before it ended.
struct Result {
  EncodedPiece encoded;
  // Where the piece's tokens begin, in bytes of normalized text from its first cut (-1: unknown),
  // and where they end, counted from its last cut.
  int64_t begin = -1, end = 0;
};

// The state of one thread.
struct Worker {
  explicit Worker(const Tokenizer& tokenizer)
      : encoder(tokenizer.of_file()->MakeEncoder(Specials::kAreText)) {}

  std::unique_ptr<FileEncoder> encoder;
  std::optional<InputFile> input;
  const SourceFile* open = nullptr;
};

class DocumentEncoder {
 public:
  DocumentEncoder(const Sources& sources, const Tokenizer& tokenizer, const DocumentFormat& format,
                  Progress* progress, int64_t piece_bytes)
      : sources_(sources),
        tokenizer_(tokenizer),
        format_(format),
        progress_(progress),
        before_(std::min(piece_bytes, kBefore)),
        step_(std::min(piece_bytes, kStep)) {
    for (const SourceFile& file : sources.files) {
      for (int64_t begin = 0; begin < file.identity.bytes; begin += piece_bytes) {
        pieces_.push_back(
            {&file, begin, std::min(begin + piece_bytes, file.identity.bytes), -1, {}});
      }
    }
  }

  absl::Status Run(const std::function<absl::Status(const EncodedPiece&)>& sink);

 private:
  using Body = std::function<absl::Status(int64_t number, Worker& worker)>;
  static constexpr int64_t kBefore = 1 << 12;    // bytes before a piece in which its pieces of text
                                                 // come into step with those of the piece before it
  static constexpr int64_t kStep = 1 << 16;      // bytes that are read at a time
  static constexpr int64_t kFarthest = 1 << 20;  // the most bytes after a piece that are read early

  absl::Status ForEachPiece(const Body& body);
  absl::StatusOr<std::string> Read(const SourceFile& file, int64_t begin, int64_t end,
                                   Worker* worker) const;
  absl::StatusOr<int64_t> Cut(const SourceFile& file, int64_t at, Worker* worker) const;
  absl::StatusOr<int64_t> FirstCut(int64_t number, Worker* worker);
  // Returns the first cut of the next piece, or the end of the file.
  absl::StatusOr<int64_t> LastCut(int64_t number, Worker* worker) {
    const Piece& piece = pieces_[number];
    return piece.end == piece.file->identity.bytes ? piece.end : FirstCut(number + 1, worker);
  }
  absl::Status Survey(int64_t number, Worker* worker);
  absl::StatusOr<Result> EncodeText(int64_t number, int64_t begin, const LineState& state,
                                    Worker* worker);

  const Sources& sources_;
  const Tokenizer& tokenizer_;
  const DocumentFormat& format_;
  Progress* const progress_;
  const int64_t before_, step_;
  std::vector<Piece> pieces_;  // in order
  std::mutex cuts_mutex_;      // guards Piece::first_cut; taken last
  std::mutex mutex_;           // guards the fields below
  std::condition_variable turn_;
  int64_t next_ = 0;  // the piece whose turn it is
  int64_t end_ = 0;   // where the previous piece's tokens end, from its last cut
  bool stopped_ = false;
};

// Threads take pieces in order. No piece is taken after an error.
absl::Status DocumentEncoder::ForEachPiece(const Body& body) {
  std::atomic<int64_t> next{0};
  absl::Status first;
  ParallelTasks(NumThreads(), [&](int64_t) {
    Worker worker(tokenizer_);
    const int64_t count = static_cast<int64_t>(pieces_.size());
    for (int64_t number = next++; number < count; number = next++) {
      const absl::Status status = body(number, worker);
      if (status.ok()) continue;
      next = count;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (first.ok()) first = status;
      stopped_ = true;
      turn_.notify_all();
    }
  });
  return first;
}

absl::StatusOr<std::string> DocumentEncoder::Read(const SourceFile& file, int64_t begin,
                                                  int64_t end, Worker* worker) const {
  if (worker->open != &file) {
    BURST_ASSIGN_OR_RETURN(worker->input, sources_.Open(file));
    worker->open = &file;
  }
  std::string text(std::max<int64_t>(0, std::min(end, file.identity.bytes) - begin), '\0');
  BURST_RETURN_IF_ERROR(
      sources_.Error(worker->input->ReadAt(begin, static_cast<int64_t>(text.size()), text.data())));
  return text;
}

// Returns the first cut at or after a place of a file.
absl::StatusOr<int64_t> DocumentEncoder::Cut(const SourceFile& file, int64_t at,
                                             Worker* worker) const {
  if (at <= 0) return 0;
  const auto reach = static_cast<int64_t>(worker->encoder->Reach());
  for (int64_t bytes = 64; at < file.identity.bytes; at += bytes, bytes = step_) {
    const int64_t from = std::max<int64_t>(0, at - reach);
    BURST_ASSIGN_OR_RETURN(const std::string text, Read(file, from, at + bytes + reach, worker));
    const int64_t end = std::min(at + bytes, file.identity.bytes);
    const size_t cut = worker->encoder->NextCut(text, static_cast<size_t>(at - from),
                                                static_cast<size_t>(end - from));
    if (cut != std::string::npos) return from + static_cast<int64_t>(cut);
  }
  return file.identity.bytes;
}

// Returns the first cut of a piece. A text without cuts is not searched again for each piece of it.
absl::StatusOr<int64_t> DocumentEncoder::FirstCut(int64_t number, Worker* worker) {
  Piece& piece = pieces_[number];
  {
    const std::lock_guard<std::mutex> lock(cuts_mutex_);
    if (piece.begin > 0 && pieces_[number - 1].first_cut >= piece.begin) {
      piece.first_cut = pieces_[number - 1].first_cut;
    }
    if (piece.first_cut >= 0) return piece.first_cut;
  }
  BURST_ASSIGN_OR_RETURN(const int64_t cut, Cut(*piece.file, piece.begin, worker));
  const std::lock_guard<std::mutex> lock(cuts_mutex_);
  return piece.first_cut = cut;
}

absl::Status DocumentEncoder::Survey(int64_t number, Worker* worker) {
  Piece& piece = pieces_[number];
  BURST_ASSIGN_OR_RETURN(const int64_t begin, FirstCut(number, worker));
  BURST_ASSIGN_OR_RETURN(const int64_t end, LastCut(number, worker));
  BURST_ASSIGN_OR_RETURN(const std::string text, Read(*piece.file, begin, end, worker));
  int64_t at = 0;
  for (char c : text) piece.lines.Next(static_cast<unsigned char>(c), at++);
  return absl::OkStatus();
}

// Returns the tokens that begin between the cuts of a piece. `begin` is where a piece of text is
// known to end, in bytes of normalized text from the first cut. With -1, the function finds it by
// beginning earlier. `state` is the state before the first cut.
absl::StatusOr<Result> DocumentEncoder::EncodeText(int64_t number, int64_t begin,
                                                   const LineState& state, Worker* worker) {
  const SourceFile& file = *pieces_[number].file;
  const bool early = begin < 0;
  BURST_ASSIGN_OR_RETURN(const int64_t first, FirstCut(number, worker));
  BURST_ASSIGN_OR_RETURN(const int64_t last, LastCut(number, worker));
  FormedText text;  // each part is formed by itself
  const auto append = [&](int64_t from, int64_t to) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const std::string bytes, Read(file, from, to, worker));
    worker->encoder->AppendNormalized(bytes, /*begins=*/from == 0, &text);
    return absl::OkStatus();
  };
  int64_t warm = first;
  if (early) {
    BURST_ASSIGN_OR_RETURN(warm, Cut(file, first - before_, worker));
    BURST_RETURN_IF_ERROR(append(warm, first));
  }
  const int64_t begin_at = static_cast<int64_t>(text.text.size());
  BURST_RETURN_IF_ERROR(append(first, last));
  const int64_t end_at = static_cast<int64_t>(text.text.size());

  Result result;
  result.encoded.bytes = last - first;
  if (!early && begin_at + begin >= end_at) {  // one piece of text covers all of this piece
    result.begin = begin;
    result.end = begin_at + begin - end_at;
    return result;
  }
  const auto encode = [&](size_t from, size_t to, bool complete) -> absl::StatusOr<size_t> {
    const absl::StatusOr<size_t> end =
        worker->encoder->EncodePieces(text, from, to, complete, &result.encoded.tokens);
    if (end.ok()) return end;
    return sources_.Error(
        absl::Status(end.status().code(), absl::StrCat(file.path, ": ", end.status().message())));
  };
  int64_t known = last;
  for (int64_t more = step_;; more *= 2) {
    BURST_ASSIGN_OR_RETURN(const int64_t next, Cut(file, known + more, worker));
    BURST_RETURN_IF_ERROR(append(known, next));
    known = next;
    const bool complete = known == file.identity.bytes;
    std::vector<int32_t>& tokens = result.encoded.tokens;
    tokens.clear();
    size_t start = static_cast<size_t>(begin_at + begin);
    if (early) {
      BURST_ASSIGN_OR_RETURN(start, encode(0, begin_at, complete));
      tokens.clear();
    }
    size_t end = start;
    if (start != FileEncoder::kMore) {
      BURST_ASSIGN_OR_RETURN(end,
                             encode(start, std::max(static_cast<size_t>(end_at), start), complete));
    }
    if (end != FileEncoder::kMore) {
      result.begin = static_cast<int64_t>(start) - begin_at;
      result.end = static_cast<int64_t>(end) - end_at;
      break;
    }
    // The rest waits for the piece's turn, when it is known whether it is needed.
    if (early && known - last > kFarthest) return Result();
  }

  // The positions where documents start.
  std::vector<int64_t>& starts = result.encoded.starts;
  if (pieces_[number].begin == 0) starts.push_back(0);
  if (format_.documents != DocumentsAre::kBlankLines) return result;
  LineState lines = state;
  const auto next_line = [&](int64_t at) {
    return lines.Next(static_cast<uint8_t>(text.text[at]), at);
  };
  int64_t at = begin_at, token_end = begin_at + result.begin;
  for (; at < token_end; ++at) next_line(at);
  for (size_t i = 0; i < result.encoded.tokens.size(); ++i) {
    token_end += static_cast<int64_t>(
        tokenizer_.of_file()->Length(result.encoded.tokens[i], text, token_end));
    for (; at < token_end; ++at) {
      const bool again = !starts.empty() && starts.back() == static_cast<int64_t>(i);
      if (next_line(at) && !again) starts.push_back(static_cast<int64_t>(i));
    }
  }
  return result;
}

absl::Status DocumentEncoder::Run(const std::function<absl::Status(const EncodedPiece&)>& sink) {
  std::vector<LineState> states(pieces_.size());  // the state before each piece
  if (format_.documents == DocumentsAre::kBlankLines) {
    BURST_RETURN_IF_ERROR(
        ForEachPiece([&](int64_t number, Worker& worker) { return Survey(number, &worker); }));
    for (size_t i = 1; i < pieces_.size(); ++i) {
      if (pieces_[i].begin > 0) states[i] = pieces_[i - 1].lines.After(states[i - 1], 0);
    }
  }
  const auto encode = [&](int64_t number, Worker& worker) -> absl::Status {
    const Piece& piece = pieces_[number];
    const LineState& state = states[number];
    const int64_t known = piece.begin == 0 ? 0 : -1;
    BURST_ASSIGN_OR_RETURN(Result result, EncodeText(number, known, state, &worker));
    std::unique_lock<std::mutex> lock(mutex_);
    turn_.wait(lock, [&] { return next_ == number || stopped_; });
    if (stopped_) return absl::OkStatus();
    if (piece.begin > 0 && result.begin != end_) {
      BURST_ASSIGN_OR_RETURN(result, EncodeText(number, end_, state, &worker));
    }
    end_ = result.end;
    BURST_RETURN_IF_ERROR(sink(result.encoded));
    progress_->Add(piece.end - piece.begin);
    ++next_;
    turn_.notify_all();
    return absl::OkStatus();
  };
  BURST_RETURN_IF_ERROR(ForEachPiece(encode));
  // A file that was replaced meanwhile would mix two texts.
  for (const SourceFile& file : sources_.files) {
    BURST_RETURN_IF_ERROR(sources_.Open(file).status());
  }
  return absl::OkStatus();
}

}  // namespace

void SkippedLines::Add(const SkippedLines& more) {
  if (lines == 0) first = more.first;
  lines += more.lines;
}

std::string SkippedLines::Describe() const {
  if (lines == 0) return "";
  return absl::StrCat("left out ", Thousands(lines), lines == 1 ? " line" : " lines",
                      " that are not documents (--bad_lines=skip); the first: ", first, "\n");
}

absl::Status EncodeDocuments(const Sources& sources, const Tokenizer& tokenizer,
                             const DocumentFormat& format, Progress* progress,
                             const std::function<absl::Status(const EncodedPiece&)>& sink,
                             int64_t piece_bytes) {
  BURST_CHECK_GT(piece_bytes, 0);
  if (format.documents == DocumentsAre::kJsonLines) {
    return EncodeJsonLines(sources, tokenizer, format.lines, progress, sink, piece_bytes);
  }
  BURST_CHECK(tokenizer.of_file() != nullptr) << "a tokenizer without a file";
  return DocumentEncoder(sources, tokenizer, format, progress, piece_bytes).Run(sink);
}

}  // namespace burst
