#include "train/data/vocabulary_texts.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/status.h"
#include "train/data/document_encoder.h"
#include "train/data/progress.h"
#include "train/data/token_marks.h"
#include "train/data/utf8.h"

namespace burst {
namespace {

int64_t FilesWithText(const Sources& sources) {
  return std::count_if(sources.files.begin(), sources.files.end(),
                       [](const SourceFile& file) { return file.identity.bytes > 0; });
}

// Writes the tokens, then the starts.
class PayloadWriter {
 public:
  PayloadWriter(EncodedTexts* texts, CheckedFileWriter* payload)
      : texts_(texts), payload_(payload) {}

  absl::Status AppendTokens(const std::vector<int32_t>& tokens) {
    if (texts_->token_bytes == 4) return Append(tokens);
    return Append(std::vector<uint16_t>(tokens.begin(), tokens.end()));
  }

  template <typename T>
  absl::Status Append(const std::vector<T>& values) {
    const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(T));
    BURST_RETURN_IF_ERROR(payload_->Write(texts_->payload_bytes, values.data(), bytes));
    texts_->payload_bytes += bytes;
    return absl::OkStatus();
  }

  int64_t at() const { return texts_->payload_bytes; }
  void Align() {
    constexpr int64_t kAlign = sizeof(int64_t);
    texts_->payload_bytes = (texts_->payload_bytes + kAlign - 1) / kAlign * kAlign;
  }

 private:
  EncodedTexts* const texts_;
  CheckedFileWriter* const payload_;
};

// Puts the tokens of a source's documents into the payload, and notes where they start.
class SourceWriter {
 public:
  // `end_of_text` is the token after each document, or in `split` texts after the last one. -1
  // means no token.
  SourceWriter(PayloadWriter* writer, EncodedText* part, int32_t end_of_text, bool split)
      : writer_(writer), part_(part), end_of_text_(end_of_text), split_(split) {}

  absl::Status Append(const EncodedPiece& piece) {
    skipped_.Add(piece.skipped);
    std::vector<int32_t> tokens;
    tokens.reserve(piece.tokens.size() + piece.starts.size());
    size_t from = 0;
    const auto append = [&](size_t to) {
      for (; from < to; ++from) {
        tokens.push_back(piece.tokens[from]);
        Mark(piece.counted.empty() || piece.counted[from]);
      }
    };
    for (size_t i = 0; i < piece.starts.size(); ++i) {
      append(piece.starts[i]);
      if (!starts_.empty() && !split_ && EndsText()) tokens.push_back(end_of_text_);
      const int64_t at = part_->tokens + static_cast<int64_t>(tokens.size());
      if (starts_.empty() || starts_.back() < at) starts_.push_back(at);
      masked_ = i < piece.masked.size() && piece.masked[i];
      if (masked_ && !any_masked_) BeginMarks(at);
      begins_ = true;
    }
    append(piece.tokens.size());
    return Write(tokens);
  }

  absl::Status Finish() {
    if (!starts_.empty() && EndsText()) BURST_RETURN_IF_ERROR(Write({end_of_text_}));
    // A start after the last token does not begin a document.
    while (!starts_.empty() && starts_.back() >= part_->tokens) starts_.pop_back();
    writer_->Align();
    part_->starts_at = writer_->at();
    part_->starts = static_cast<int64_t>(starts_.size());
    std::fputs(skipped_.Describe().c_str(), stdout);
    BURST_RETURN_IF_ERROR(writer_->Append(starts_));
    if (!any_masked_) return absl::OkStatus();
    BURST_CHECK_EQ(marks_.size(), part_->tokens);
    part_->marks_at = writer_->at();
    return writer_->Append(marks_.bytes());
  }

 private:
  // Marks the first `tokens` tokens, whose documents have no masks.
  void BeginMarks(int64_t tokens) {
    any_masked_ = true;
    size_t start = 0;
    for (int64_t at = 0; at < tokens; ++at) {
      const bool begins = starts_[start] == at;
      start += begins && start + 1 < starts_.size();
      marks_.Append(begins ? 0 : kCounts);
    }
  }

  // Notes whether the next token counts. The first token of a document does not.
  void Mark(bool counts) {
    if (!any_masked_) return;
    marks_.Append(counts && !begins_ ? kCounts : 0);
    begins_ = false;
  }

  // Returns whether an end-of-text token ends the current document, which then counts. A document
  // with a mask has its own end.
  bool EndsText() {
    if (masked_ || end_of_text_ < 0) return false;
    Mark(true);
    return true;
  }

  absl::Status Write(const std::vector<int32_t>& tokens) {
    part_->tokens += static_cast<int64_t>(tokens.size());
    return writer_->AppendTokens(tokens);
  }

  PayloadWriter* const writer_;
  EncodedText* const part_;
  const int32_t end_of_text_;
  const bool split_;
  std::vector<int64_t> starts_;
  TokenMarks marks_;
  bool masked_ = false, any_masked_ = false;  // the current document has a mask; any has one
  bool begins_ = false;                       // the next token is a document's first one
  SkippedLines skipped_;
};

DocumentFormat FormatOf(const Sources& sources, const LineFormat& lines) {
  DocumentFormat format;
  format.lines = lines;
  format.documents = sources.json_lines            ? DocumentsAre::kJsonLines
                     : FilesWithText(sources) == 1 ? DocumentsAre::kBlankLines
                                                   : DocumentsAre::kFiles;
  return format;
}

}  // namespace

absl::StatusOr<EncodedTexts> EncodeVocabularyTexts(const std::vector<const Sources*>& sources,
                                                   const Tokenizer& tokenizer,
                                                   CheckedFileWriter* payload,
                                                   const LineFormat& lines, int64_t piece_bytes) {
  int64_t bytes = 0;
  bool separates = false;  // whether end-of-text separates documents
  for (const Sources* source : sources) {
    for (const SourceFile& file : source->files) bytes += file.identity.bytes;
    const int64_t files = FilesWithText(*source);
    separates |= files > 1 || source->json_lines;
    BURST_RETURN_IF_ERROR(CheckHasText(*source, files));
  }
  Progress progress(EncodingWhat(*sources[0]), bytes);
  const bool narrow = tokenizer.vocab() <= int64_t{1} << 16;
  EncodedTexts texts{tokenizer, {}, 0, narrow ? 2 : 4};
  PayloadWriter writer(&texts, payload);
  const int32_t end_of_text = separates ? tokenizer.end_of_text() : -1;
  for (const Sources* source : sources) {
    EncodedText part;
    part.tokens_at = texts.payload_bytes;
    const DocumentFormat format = FormatOf(*source, lines);
    SourceWriter documents(&writer, &part, end_of_text,
                           format.documents == DocumentsAre::kBlankLines);
    BURST_RETURN_IF_ERROR(EncodeDocuments(
        *source, tokenizer, format, &progress,
        [&](const EncodedPiece& piece) { return documents.Append(piece); }, piece_bytes));
    BURST_RETURN_IF_ERROR(documents.Finish());
    if (part.starts == 0) {
      return source->Error(absl::InvalidArgumentError("there is no text in it"));
    }
    texts.parts.push_back(part);
  }
  return texts;
}

absl::StatusOr<Tokenizer> TokenizerOfLines(const std::vector<const Sources*>& sources,
                                           Tokenizer::Kind kind, const LineFormat& lines,
                                           const Tokenizer* given) {
  std::vector<bool> seen(kCodePoints);
  if (kind == Tokenizer::Kind::kChar) {
    int64_t bytes = 0;
    for (const Sources* source : sources) {
      for (const SourceFile& file : source->files) bytes += file.identity.bytes;
    }
    Progress progress("reading the characters", bytes);
    for (const Sources* source : sources) {
      // The texts of a piece are whole, and they are UTF-8, as JSON is.
      const auto sink = [&](const EncodedPiece& piece) {
        const std::string text = Tokenizer::Byte(false).Decode(piece.tokens);
        for (size_t at = 0; at < text.size();) {
          const uint32_t character = NextCodePoint(text, &at);
          if (character < kCodePoints) seen[character] = true;
        }
        return absl::OkStatus();
      };
      BURST_RETURN_IF_ERROR(EncodeDocuments(*source, Tokenizer::Byte(false),
                                            FormatOf(*source, lines), &progress, sink));
    }
  }
  return TokenizerOfTexts(*sources[0], kind, seen, /*separate=*/true, given);
}

}  // namespace burst
