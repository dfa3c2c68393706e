#include "train/data/vocabulary_texts.h"

#include <algorithm>
#include <utility>

#include "burst/base/status.h"
#include "train/data/document_encoder.h"
#include "train/data/progress.h"

namespace burst {
namespace {

int64_t FilesWithText(const Sources& sources) {
  return std::count_if(sources.files.begin(), sources.files.end(),
                       [](const SourceFile& file) { return file.identity.bytes > 0; });
}

// Writes tokens and starts one after the other.
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

  void Align() {
    constexpr int64_t kAlign = sizeof(int64_t);
    texts_->payload_bytes = (texts_->payload_bytes + kAlign - 1) / kAlign * kAlign;
  }

 private:
  EncodedTexts* const texts_;
  CheckedFileWriter* const payload_;
};

}  // namespace

absl::StatusOr<EncodedTexts> EncodeVocabularyTexts(const std::vector<const Sources*>& sources,
                                                   const Tokenizer& tokenizer,
                                                   CheckedFileWriter* payload,
                                                   int64_t piece_bytes) {
  int64_t bytes = 0;
  bool has_ends = false;
  for (const Sources* source : sources) {
    for (const SourceFile& file : source->files) bytes += file.identity.bytes;
    const int64_t files = FilesWithText(*source);
    has_ends |= files > 1 && tokenizer.end_of_text() >= 0;
    BURST_RETURN_IF_ERROR(CheckHasText(*source, files));
  }
  Progress progress(EncodingWhat(*sources[0]), bytes);
  const bool narrow = tokenizer.vocab() <= int64_t{1} << 16;
  EncodedTexts texts{tokenizer, {}, 0, narrow ? 2 : 4};
  PayloadWriter writer(&texts, payload);
  for (const Sources* source : sources) {
    EncodedText part;
    part.tokens_at = texts.payload_bytes;
    DocumentFormat format;
    const bool split = FilesWithText(*source) == 1;
    format.documents = split ? DocumentsAre::kBlankLines : DocumentsAre::kFiles;
    std::vector<int64_t> starts;
    const auto sink = [&](const EncodedPiece& piece) -> absl::Status {
      for (int64_t start : piece.starts) starts.push_back(part.tokens + start);
      BURST_RETURN_IF_ERROR(writer.AppendTokens(piece.tokens));
      part.tokens += static_cast<int64_t>(piece.tokens.size());
      if (!has_ends || !piece.ends_file) return absl::OkStatus();
      ++part.tokens;
      return writer.AppendTokens({tokenizer.end_of_text()});
    };
    BURST_RETURN_IF_ERROR(
        EncodeDocuments(*source, tokenizer, format, &progress, sink, piece_bytes));
    writer.Align();
    part.starts_at = texts.payload_bytes;
    part.starts = static_cast<int64_t>(starts.size());
    BURST_RETURN_IF_ERROR(writer.Append(starts));
    texts.parts.push_back(part);
  }
  return texts;
}

}  // namespace burst
