// Reads headers of checkpoints. The result is a description from which a model can be made, or
// DataLoss.
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_file.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/checkpoint/checkpoint.h"

namespace burst {

void FuzzOne(const uint8_t* data, size_t size) {
  static const FuzzFolder folder;
  const std::string path = folder.Write("checkpoint", SafetensorsContent(data, size));
  const absl::StatusOr<CheckpointInfo> info = ReadCheckpointInfo(path);
  if (!info.ok()) {
    BURST_CHECK(absl::IsDataLoss(info.status())) << info.status().ToString();
    BURST_CHECK(absl::StrContains(info.status().message(), path)) << info.status().ToString();
    return;
  }
  BURST_CHECK(info->step >= 0 && info->updates >= 0 && info->window >= 0);
  BURST_CHECK(info->seqlen >= 1) << "seqlen " << info->seqlen;
  BURST_CHECK(info->model.Validate().ok());
  BURST_CHECK(info->model.vocab >= 1) << "vocab " << info->model.vocab;
  BURST_CHECK(!info->tokenizer.has_value() || info->tokenizer->vocab() <= info->model.vocab)
      << info->tokenizer->vocab() << " tokens, vocabulary " << info->model.vocab;
}

}  // namespace burst
