// Encodes documents that are lines of JSON (document_encoder.h).
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "train/data/document_encoder.h"

namespace burst {

// Does EncodeDocuments for lines. One thread at a time reads and unpacks the next lines of a file,
// and all threads encode them. A piece has whole lines of at least `piece_bytes` bytes.
absl::Status EncodeJsonLines(const Sources& sources, const Tokenizer& tokenizer,
                             const LineFormat& format, Progress* progress,
                             const std::function<absl::Status(const EncodedPiece&)>& sink,
                             int64_t piece_bytes);

}  // namespace burst
