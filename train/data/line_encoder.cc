#include "train/data/line_encoder.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "train/data/unpacked_file.h"

namespace burst {
namespace {

// Whole lines of a file.
struct Lines {
  int64_t number = 0;  // in the order of the texts
  const SourceFile* file = nullptr;
  int64_t first_line = 1;
  std::string text;
  int64_t input_bytes = 0;  // bytes of the file that were read for them
};

// Reads the files in order.
class LineReader {
 public:
  LineReader(const Sources& sources, int64_t bytes) : sources_(sources), bytes_(bytes) {}

  // Returns the next lines. Their text is empty only at the end of all files.
  absl::StatusOr<Lines> Next() {
    Lines lines;
    while (lines.text.empty()) {
      if (file_ == nullptr) {
        if (next_file_ == sources_.files.size()) return lines;
        open_ = &sources_.files[next_file_++];
        BURST_ASSIGN_OR_RETURN(InputFile input, sources_.Open(*open_));
        absl::StatusOr<std::unique_ptr<UnpackedFile>> file = UnpackedFile::Open(std::move(input));
        if (!file.ok()) return sources_.Error(file.status());
        file_ = *std::move(file);
        line_ = 1, counted_ = 0;
      }
      BURST_RETURN_IF_ERROR(sources_.Error(Fill(&lines.text)));
      lines.number = number_;
      lines.file = open_;
      lines.first_line = line_;
      lines.input_bytes = file_->input_bytes() - counted_;
      counted_ += lines.input_bytes;
      line_ += std::count(lines.text.begin(), lines.text.end(), '\n');
      if (lines.text.empty()) file_ = nullptr;
    }
    ++number_;
    return lines;
  }

 private:
  // Moves whole lines from the file to `text`, and at the end of the file what there is.
  absl::Status Fill(std::string* text) {
    text->swap(rest_);
    rest_.clear();
    for (size_t from = 0;;) {
      const size_t end = text->rfind('\n');
      if (static_cast<int64_t>(text->size()) >= bytes_ && end != std::string::npos && end >= from) {
        rest_ = text->substr(end + 1);
        text->resize(end + 1);
        return absl::OkStatus();
      }
      from = text->size();
      BURST_RETURN_IF_ERROR(file_->Read(std::max<int64_t>(bytes_, text->size()), text));
      if (text->size() == from) return absl::OkStatus();
    }
  }

  const Sources& sources_;
  const int64_t bytes_;
  size_t next_file_ = 0;
  const SourceFile* open_ = nullptr;
  std::unique_ptr<UnpackedFile> file_;
  std::string rest_;  // the beginning of a line that is not whole yet
  int64_t number_ = 0, line_ = 1, counted_ = 0;
};

// The encoders of a thread; null for tokenizers of bytes and of characters.
struct Encoders {
  std::unique_ptr<FileEncoder> text;   // special tokens are text
  std::unique_ptr<FileEncoder> chats;  // special tokens are tokens
};

class LineEncoder {
 public:
  LineEncoder(const Sources& sources, const Tokenizer& tokenizer, const LineFormat& format,
              Progress* progress, int64_t piece_bytes)
      : sources_(sources),
        tokenizer_(tokenizer),
        format_(format),
        progress_(progress),
        reader_(sources, piece_bytes) {}

  absl::Status Run(const std::function<absl::Status(const EncodedPiece&)>& sink) {
    ParallelTasks(NumThreads(), [&](int64_t) { Work(sink); });
    BURST_RETURN_IF_ERROR(error_);
    // A file that was replaced meanwhile would mix two texts.
    for (const SourceFile& file : sources_.files) {
      BURST_RETURN_IF_ERROR(sources_.Open(file).status());
    }
    return absl::OkStatus();
  }

 private:
  // Works on one thread. The sink gets the pieces in order, and the first error ends all threads.
  void Work(const std::function<absl::Status(const EncodedPiece&)>& sink) {
    const FileTokenizer* const of_file = tokenizer_.of_file().get();
    Encoders encoders;
    if (of_file != nullptr) {
      encoders = {of_file->MakeEncoder(Specials::kAreText),
                  of_file->MakeEncoder(Specials::kAreTokens)};
    }
    while (true) {
      absl::StatusOr<Lines> lines = Read();
      if (lines.ok() && lines->text.empty()) return;
      EncodedPiece piece;
      absl::Status status = lines.ok() ? Encode(*lines, encoders, &piece) : lines.status();
      std::unique_lock<std::mutex> lock(mutex_);
      const int64_t number = lines.ok() ? lines->number : read_;
      turn_.wait(lock, [&] { return next_ == number || !error_.ok(); });
      if (!error_.ok()) return;
      if (status.ok()) status = sink(piece);
      if (status.ok()) progress_->Add(lines->input_bytes);
      error_ = status;
      ++next_;
      turn_.notify_all();
    }
  }

  // Returns no lines after an error.
  absl::StatusOr<Lines> Read() {
    const std::lock_guard<std::mutex> lock(read_mutex_);
    if (read_ended_) return Lines();
    absl::StatusOr<Lines> lines = reader_.Next();
    read_ended_ = !lines.ok() || lines->text.empty();
    if (lines.ok() && !lines->text.empty()) read_ = lines->number + 1;
    return lines;
  }

  absl::Status Encode(const Lines& lines, const Encoders& encoders, EncodedPiece* piece) const {
    piece->bytes = static_cast<int64_t>(lines.text.size());
    const absl::string_view text = lines.text;
    int64_t number = lines.first_line;
    for (size_t at = 0; at < text.size(); ++number) {
      const size_t end = std::min(text.find('\n', at), text.size());
      const absl::string_view line = text.substr(at, end - at);
      at = end + 1;
      if (line.find_first_not_of(" \t\r") == absl::string_view::npos) continue;
      const size_t tokens = piece->tokens.size();
      absl::Status status = EncodeLine(line, encoders, piece);
      if (status.ok()) continue;
      status =
          sources_.Error(absl::Status(status.code(), absl::StrCat(lines.file->path, ": line ",
                                                                  number, ": ", status.message())));
      if (format_.bad_lines == BadLines::kError) return status;
      piece->tokens.resize(tokens);
      if (!piece->counted.empty()) piece->counted.resize(tokens);
      piece->skipped.Add({1, std::string(status.message())});
    }
    return absl::OkStatus();
  }

  absl::Status EncodeLine(absl::string_view line, const Encoders& encoders,
                          EncodedPiece* piece) const {
    BURST_ASSIGN_OR_RETURN(const LineDocument document, ParseLine(line, format_));
    const size_t start = piece->tokens.size();
    if (document.masked) {
      BURST_RETURN_IF_ERROR(EncodeMasked(document, encoders.chats.get(), piece));
    } else {
      BURST_RETURN_IF_ERROR(encoders.text == nullptr
                                ? tokenizer_.Encode(document.text, &piece->tokens)
                                : encoders.text->Encode(document.text, &piece->tokens));
      if (!piece->counted.empty()) piece->counted.resize(piece->tokens.size(), true);
    }
    piece->starts.push_back(static_cast<int64_t>(start));
    if (document.masked || !piece->masked.empty()) {
      piece->masked.resize(piece->starts.size() - 1, false);
      piece->masked.push_back(document.masked);
    }
    return absl::OkStatus();
  }

  // Appends the tokens of a text with a mask. A token counts if it holds a byte of a counted range,
  // except for the first one, which nothing predicts.
  absl::Status EncodeMasked(const LineDocument& document, FileEncoder* encoder,
                            EncodedPiece* piece) const {
    if (encoder == nullptr) {
      return absl::InvalidArgumentError("a text with a mask needs a file's tokens (--tokenizer)");
    }
    std::vector<size_t> places;  // begin and end of each counted range
    for (const LineDocument::Range& range : document.counted) {
      places.push_back(static_cast<size_t>(range.begin));
      places.push_back(static_cast<size_t>(range.end));
    }
    FormedText text;
    encoder->AppendWithPlaces(document.text, /*begins=*/true, absl::MakeSpan(places), &text);
    std::vector<int32_t>& tokens = piece->tokens;
    const size_t first = tokens.size();
    piece->counted.resize(first, true);
    BURST_RETURN_IF_ERROR(
        encoder->EncodePieces(text, 0, text.text.size(), /*complete=*/true, &tokens).status());
    size_t range = 0;  // the place where the next range begins
    for (size_t i = first, begin = 0; i < tokens.size(); ++i) {
      const size_t end = begin + tokenizer_.of_file()->Length(tokens[i], text, begin);
      while (range < places.size() && places[range + 1] <= begin) range += 2;
      const bool counts = range < places.size() && places[range] < end;
      piece->counted.push_back(counts && i > first);
      begin = end;
    }
    return absl::OkStatus();
  }

  const Sources& sources_;
  const Tokenizer& tokenizer_;
  const LineFormat& format_;
  Progress* const progress_;
  std::mutex read_mutex_;  // guards the reader
  LineReader reader_;
  bool read_ended_ = false;
  int64_t read_ = 0;  // pieces that were read; the thread that ended the reading uses it
  std::mutex mutex_;  // guards the fields below
  std::condition_variable turn_;
  int64_t next_ = 0;  // the piece whose turn it is
  absl::Status error_;
};

}  // namespace

absl::Status EncodeJsonLines(const Sources& sources, const Tokenizer& tokenizer,
                             const LineFormat& format, Progress* progress,
                             const std::function<absl::Status(const EncodedPiece&)>& sink,
                             int64_t piece_bytes) {
  return LineEncoder(sources, tokenizer, format, progress, piece_bytes).Run(sink);
}

}  // namespace burst
