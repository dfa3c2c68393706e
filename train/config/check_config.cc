#include "train/config/check_config.h"

#include <algorithm>
#include <string>
#include <utility>

#include "burst/attention/ulysses_attention.h"
#include "burst/base/status.h"
#include "burst/kernels/limits.h"
#include "model/tensor_parallel.h"

namespace burst {

absl::Status CheckProducts(const TrainConfig& c) {
  constexpr int64_t kMaxTokens = int64_t{1} << 31;
  if (c.seqlen > kMaxTokens / c.batch) {
    return InvalidOption("seqlen", "must be at most 2^31 tokens, times --batch=", c.batch, "; got ",
                         c.seqlen, "; give less of one of them");
  }
  int64_t ranks = 1;
  std::pair<int64_t, const char*> largest = {0, ""};
  for (const auto& option : {std::pair(c.dp, "dp"), std::pair(c.pp, "pp"), std::pair(c.sp, "sp"),
                             std::pair(c.tp, "tp")}) {
    ranks *= std::max<int64_t>(1, option.first);
    if (option.first > largest.first) largest = option;
  }
  if (ranks <= kMaxRanks) return absl::OkStatus();
  return InvalidOption(largest.second,
                       "must be, times the others of --dp, --pp, --sp and --tp, at ", "most ",
                       kMaxRanks, " ranks; got ", largest.first, ", which makes ", ranks,
                       "; give less of one of them");
}

absl::Status CheckKernels(const ResolvedConfig& config) {
  constexpr int64_t kFp8Channels = 16;
  const ModelConfig model = config.model.WithDefaults();
  if (config.device == DeviceType::kCuda && !k16BitHeadDims.Has(model.head_dim)) {
    return InvalidOption("model", "head_dim (width / heads) must be a multiple of ",
                         k16BitHeadDims.multiple, " and at most ", k16BitHeadDims.most,
                         " with --device=cuda; got ", model.head_dim,
                         "; give another number of heads");
  }
  if (!config.fp8) return absl::OkStatus();
  if (2 * config.bf16_layers >= model.layers) {
    return InvalidOption("bf16_layers", "must be less than half of the ", model.layers,
                         " layers; got ", config.bf16_layers, "; give less, or --precision=bf16");
  }
  const int64_t ranks = config.mesh.tensor;
  for (const auto& [name, channels] :
       {std::pair("width", model.width), std::pair("ffn", model.ffn / ranks),
        std::pair("heads times head_dim", model.attention_channels() / ranks)}) {
    if (channels % kFp8Channels == 0) continue;
    return InvalidOption(
        "precision", "must be bf16 unless all channels of a rank are multiples of ", kFp8Channels,
        "; got fp8, and ", name, " of a rank is ", channels, "; give bf16");
  }
  return absl::OkStatus();
}

absl::Status CheckStages(const ResolvedConfig& config) {
  const int64_t layers = config.model.WithDefaults().layers;
  if (config.pp > layers / config.pp_chunks) {
    return InvalidOption("pp", "must be at most the layers of the model, ", layers,
                         ", over --pp_chunks=", config.pp_chunks, "; got ", config.pp,
                         "; give fewer stages");
  }
  if (config.pp_chunks == 1 || config.accumulate % config.pp == 0) return absl::OkStatus();
  return InvalidOption("pp_chunks", "must be 1 unless --pp=", config.pp,
                       " divides --accumulate=", config.accumulate, "; got ", config.pp_chunks,
                       "; give a multiple of --pp to --accumulate");
}

absl::Status CheckTensorParallel(const ResolvedConfig& config) {
  if (config.mesh.tensor == 1) return absl::OkStatus();
  const absl::Status fits = TensorParallel::Check(config.model.WithDefaults(), config.mesh.tensor);
  return fits.ok() ? fits : InvalidOption("tp", config.mesh.tensor, ": ", fits.message());
}

absl::Status CheckHeads(const ResolvedConfig& config) {
  const ModelConfig model = config.model.WithDefaults();
  const int64_t kv_heads = config.HeadsAtATime(model.kv_heads);
  const int64_t heads = model.heads / model.kv_heads * kv_heads;
  if (model.kv_heads % kv_heads != 0) {
    return InvalidOption("head_chunk", "must be a divisor of the ", model.kv_heads,
                         " KV heads; got ", config.head_chunk, "; give 1, or leave it out");
  }
  const int sp = config.mesh.sequence;
  if (config.strategy == Strategy::kUlysses) {
    const absl::Status divide = CheckHeadsDivide(heads, kv_heads, sp);
    const char* const option = config.head_chunk > 0 ? "head_chunk" : "strategy";
    if (!divide.ok()) return InvalidOption(option, "ulysses: ", divide.message(), ", or burst");
  }
  if (config.strategy != Strategy::kBurstUlysses) return absl::OkStatus();
  if (sp % config.ulysses != 0) {
    return InvalidOption("ulysses", "must be a divisor of the ", sp, " ranks of a sequence; got ",
                         config.ulysses, "; leave it out");
  }
  const absl::Status divide = CheckHeadsDivide(heads, kv_heads, config.ulysses);
  return divide.ok() ? divide : InvalidOption("ulysses", divide.message());
}

}  // namespace burst
