#include "train/config/check_config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "burst/attention/strategy.h"
#include "burst/base/status.h"

namespace burst {
namespace {

absl::Status AtLeast(const char* option, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return InvalidOption(option, value, " is too small; it must be at least ", least);
}

// lo <= value < hi.
absl::Status InRange(const char* option, double value, double lo, double hi) {
  if (value >= lo && value < hi) return absl::OkStatus();
  return InvalidOption(option, value, " is out of range; it must lie in [", lo, ", ", hi, ")");
}

absl::Status CheckRingGradDType(const ResolvedConfig& config) {
  if (config.ring_grad_dtype == RingGradDType::kFp32) return absl::OkStatus();
  if (!HasRing(config.strategy)) {
    return InvalidOption("ring_grad_dtype",
                         "bf16 has no effect with --strategy=", Name(config.strategy),
                         "; it is for rings");
  }
  if (config.dtype != DType::kBFloat16) {
    return InvalidOption("ring_grad_dtype", "bf16 is for --precision=bf16, not for ",
                         config.tf32 ? "tf32" : "fp32");
  }
  return absl::OkStatus();
}

absl::Status CheckAttentionFp8(const ResolvedConfig& config) {
  if (!config.attention_fp8) return absl::OkStatus();
  if (config.device == DeviceType::kCpu) {
    return InvalidOption("attention_fp8", "true needs --device=cuda and a Hopper GPU");
  }
  if (config.dtype != DType::kBFloat16) {
    return InvalidOption("attention_fp8", "true is for --precision=bf16");
  }
  const int64_t head_dim = config.model.WithDefaults().head_dim;
  if (head_dim < 72 || head_dim > 128) {
    return InvalidOption("attention_fp8", "true is for a head_dim from 72 to 128, the model's is ",
                         head_dim);
  }
  if (!config.exact) return absl::OkStatus();
  return InvalidOption("attention_fp8", "true is not for --exact: scales are those of blocks of a ",
                       "rank's tokens");
}

absl::Status CheckFp8(const ResolvedConfig& config) {
  if (!config.fp8) return absl::OkStatus();
  if (config.exact) {
    return InvalidOption("precision",
                         "fp8 is not for --exact: a scale depends on the tokens of a rank");
  }
  const ModelConfig model = config.model.WithDefaults();
  const int64_t ranks = config.mesh.tensor;
  for (const auto& [name, channels] :
       {std::pair("width", model.width), std::pair("ffn", model.ffn / ranks),
        std::pair("heads times head_dim", model.attention_channels() / ranks)}) {
    if (channels % 16 == 0) continue;
    return InvalidOption("precision", "fp8 needs multiples of 16 channels; ", name,
                         " of a rank is ", channels);
  }
  return absl::OkStatus();
}

absl::Status CheckAttentionScores(const ResolvedConfig& config) {
  const ModelConfig& model = config.model;
  if (!config.exact && !config.attention_fp8) return absl::OkStatus();
  const char* const with = config.exact ? "--exact" : "--attention_fp8";
  for (const auto& [option, value] : {std::pair("attention_softcap", model.attention_softcap),
                                      std::pair("attention_dropout", model.attention_dropout)}) {
    if (value != 0) return InvalidOption(option, value, " is not for ", with, "; give 0");
  }
  return absl::OkStatus();
}

absl::Status CheckZero(const ResolvedConfig& config) {
  if (config.zero == 0 || config.state_ranks() > 1) return absl::OkStatus();
  if (config.ranks == 1) {
    return InvalidOption("zero", config.zero, " has nothing to divide on one rank; leave it out");
  }
  const std::string group = IsTensorParallel(config.strategy)
                                ? absl::StrCat("--strategy=", Name(config.strategy))
                                : absl::StrCat("--tp=", config.mesh.tensor);
  return InvalidOption("zero", config.zero, " has nothing to divide: with ", group,
                       " and --dp=1 no two ranks have the same parameters; ",
                       "give a larger --dp, or leave it out");
}

absl::Status CheckOffload(const ResolvedConfig& config) {
  if (config.offload == Offload::kNone) return absl::OkStatus();
  const char* name = Name(config.offload);
  if (config.device == DeviceType::kCpu) {
    return InvalidOption("offload", name, " needs --device=cuda; the CPU's memory is the host's");
  }
  if (config.recompute != Recompute::kNone || !OffloadsActivations(config.offload)) {
    return absl::OkStatus();
  }
  return InvalidOption("offload", name,
                       " is of what recomputing layers keep; give --recompute, or optimizer");
}

}  // namespace

absl::Status CheckRanges(const TrainConfig& c) {
  BURST_RETURN_IF_ERROR(AtLeast("seqlen", c.seqlen, 1));
  BURST_RETURN_IF_ERROR(AtLeast("window", c.window, -1));
  BURST_RETURN_IF_ERROR(AtLeast("batch", c.batch, 1));
  BURST_RETURN_IF_ERROR(AtLeast("accumulate", c.accumulate, 1));
  BURST_RETURN_IF_ERROR(AtLeast("steps", c.steps, 1));
  BURST_RETURN_IF_ERROR(AtLeast("warmup", c.warmup, -1));
  BURST_RETURN_IF_ERROR(AtLeast("seed", c.seed, 0));
  BURST_RETURN_IF_ERROR(AtLeast("eval_every", c.eval_every, 0));
  BURST_RETURN_IF_ERROR(AtLeast("eval_batches", c.eval_batches, 0));
  BURST_RETURN_IF_ERROR(AtLeast("checkpoint_every", c.checkpoint_every, 0));
  BURST_RETURN_IF_ERROR(AtLeast("keep", c.keep, 1));
  BURST_RETURN_IF_ERROR(AtLeast("log_every", c.log_every, 1));
  BURST_RETURN_IF_ERROR(AtLeast("patience", c.patience, 0));
  BURST_RETURN_IF_ERROR(AtLeast("sample", c.sample, -1));
  BURST_RETURN_IF_ERROR(AtLeast("recompute_segment", c.recompute_segment, 1));
  BURST_RETURN_IF_ERROR(AtLeast("ffn_chunk", c.ffn_chunk, 0));
  BURST_RETURN_IF_ERROR(AtLeast("head_chunk", c.head_chunk, 0));
  if (c.recompute == Recompute::kSequence && c.head_chunk > 0) {
    return InvalidOption("recompute",
                         "sequence is not for attention in groups of heads; leave "
                         "--head_chunk out, or give selective or full");
  }
  if (c.recompute_segment > 1 && c.recompute == Recompute::kNone) {
    return InvalidOption("recompute_segment", c.recompute_segment, " needs --recompute");
  }
  if (c.zero < 0 || c.zero > 3) return InvalidOption("zero", c.zero, " is no stage; 0, 1, 2 or 3");
  if (c.ranks != -1) BURST_RETURN_IF_ERROR(AtLeast("ranks", c.ranks, 1));
  if (c.dp != -1) BURST_RETURN_IF_ERROR(AtLeast("dp", c.dp, 1));
  if (c.sp != -1) BURST_RETURN_IF_ERROR(AtLeast("sp", c.sp, 1));
  if (c.tp != -1) BURST_RETURN_IF_ERROR(AtLeast("tp", c.tp, 1));
  if (c.ulysses != -1) BURST_RETURN_IF_ERROR(AtLeast("ulysses", c.ulysses, 1));
  BURST_RETURN_IF_ERROR(AtLeast("ranks_per_node", c.ranks_per_node, -1));
  if (c.threads != -1) BURST_RETURN_IF_ERROR(AtLeast("threads", c.threads, 1));
  // A number that no machine could serve is a typing error; say so before memory runs out.
  constexpr int64_t kMaxTokens = int64_t{1} << 31;
  if (c.seqlen > kMaxTokens / c.batch) {
    return InvalidOption("seqlen", c.seqlen, " times --batch=", c.batch,
                         " is more than 2^31 tokens");
  }
  constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;
  if (c.accumulate > kMaxMicroBatches) {
    return InvalidOption("accumulate", c.accumulate, " is too large; at most ", kMaxMicroBatches);
  }
  if (c.ranks > kMaxRanks) return InvalidOption("ranks", c.ranks, " is too large; at most 1024");
  if (c.dp > kMaxRanks) return InvalidOption("dp", c.dp, " is too large; at most 1024");
  if (c.sp > kMaxRanks) return InvalidOption("sp", c.sp, " is too large; at most 1024");
  BURST_RETURN_IF_ERROR(AtLeast("pp", c.pp, 1));
  BURST_RETURN_IF_ERROR(AtLeast("pp_chunks", c.pp_chunks, 1));
  if (c.pp > kMaxRanks) return InvalidOption("pp", c.pp, " is too large; at most 1024");
  if (c.tp > kMaxRanks) return InvalidOption("tp", c.tp, " is too large; at most 1024");
  if (c.dp * c.sp > kMaxRanks) {
    return InvalidOption("dp", c.dp, " times --sp=", c.sp, " is ", c.dp * c.sp,
                         " ranks; at most 1024");
  }
  const int64_t groups = std::max<int64_t>(1, c.dp) * std::max<int64_t>(1, c.sp);
  if (groups * c.pp > kMaxRanks) {
    return InvalidOption("pp", c.pp, " times --dp and --sp is more than 1024 ranks");
  }
  if (groups * c.pp * c.tp > kMaxRanks) {
    return InvalidOption("tp", c.tp, " times --dp, --pp and --sp is more than 1024 ranks");
  }
  if (c.threads > 1024) return InvalidOption("threads", c.threads, " is too large; at most 1024");

  if (c.dropout != -1) BURST_RETURN_IF_ERROR(InRange("dropout", c.dropout, 0, 1));
  if (c.attention_dropout != -1) {
    BURST_RETURN_IF_ERROR(InRange("attention_dropout", c.attention_dropout, 0, 1));
  }
  if (c.attention_softcap != -1) {
    BURST_RETURN_IF_ERROR(InRange("attention_softcap", c.attention_softcap, 0, HUGE_VAL));
  }
  BURST_RETURN_IF_ERROR(InRange("beta1", c.beta1, 0, 1));
  BURST_RETURN_IF_ERROR(InRange("beta2", c.beta2, 0, 1));
  BURST_RETURN_IF_ERROR(InRange("weight_decay", c.weight_decay, 0, HUGE_VAL));
  BURST_RETURN_IF_ERROR(InRange("clip", c.clip, 0, HUGE_VAL));
  constexpr double kMaxLr = 1e30;
  if (c.lr <= 0 || c.lr > kMaxLr) {
    return InvalidOption("lr", c.lr, " is out of range; it must be above 0 and at most ", kMaxLr);
  }
  if (c.eps <= 0) return InvalidOption("eps", c.eps, " is out of range; it must be above 0");
  if (c.min_lr != -1) BURST_RETURN_IF_ERROR(InRange("min_lr", c.min_lr, 0, HUGE_VAL));
  return absl::OkStatus();
}

absl::Status CheckModelFitsDevice(const ResolvedConfig& config) {
  constexpr int64_t kMultiple = 8, kMost = 256;
  const int64_t head_dim = config.model.WithDefaults().head_dim;
  if (config.device == DeviceType::kCpu || (head_dim % kMultiple == 0 && head_dim <= kMost)) {
    return absl::OkStatus();
  }
  return InvalidOption("model", "head_dim (width / heads) is ", head_dim,
                       "; with --device=cuda it must be a ", "multiple of ", kMultiple,
                       " and at most ", kMost);
}

bool CanDivideGradients(const ResolvedConfig& config) {
  const bool same_units = !config.model.tied_embeddings || config.model.family != Family::kGpt2;
  return !config.exact && (config.mesh.stages == 1 || same_units);
}

absl::Status CheckPipeline(const TrainConfig& c, const ResolvedConfig& config) {
  if (c.pp == 1) {
    if (c.pp_chunks == 1) return absl::OkStatus();
    return InvalidOption("pp_chunks", c.pp_chunks, " has no effect without --pp");
  }
  const int64_t layers = config.model.WithDefaults().layers;
  if (c.pp > layers / c.pp_chunks) {
    return InvalidOption("pp", c.pp, " stages of --pp_chunks=", c.pp_chunks,
                         " are more runs of layers than the model has layers, ", layers);
  }
  if (c.pp_chunks > 1 && c.accumulate % c.pp != 0) {
    return InvalidOption("pp_chunks", c.pp_chunks, " takes micro-batches in groups of --pp=", c.pp,
                         ", which does not divide --accumulate=", c.accumulate);
  }
  const auto not_with = [&](const char* option, const auto& value, const char* instead) {
    return InvalidOption(option, value, " is not for --pp=", c.pp, "; ", instead);
  };
  if (c.zero > 1 && !CanDivideGradients(config)) {
    return not_with("zero", c.zero,
                    "give 0 or 1: this model's first stage has positions beside the embeddings "
                    "that it shares with the last one, and pieces of both would not agree");
  }
  if (c.exact) return not_with("exact", "true", "leave one of them out");
  if (OffloadsActivations(c.offload)) {
    return not_with("offload", Name(c.offload), "give optimizer, or leave it out");
  }
  if (c.checkpoint_files == CheckpointFiles::kOne) {
    return not_with("checkpoint_files", "one", "every stage writes its own: give auto");
  }
  return absl::OkStatus();
}

absl::Status CheckContradictions(const ResolvedConfig& config) {
  BURST_RETURN_IF_ERROR(CheckRingGradDType(config));
  BURST_RETURN_IF_ERROR(CheckAttentionFp8(config));
  BURST_RETURN_IF_ERROR(CheckFp8(config));
  BURST_RETURN_IF_ERROR(CheckAttentionScores(config));
  BURST_RETURN_IF_ERROR(CheckZero(config));
  return CheckOffload(config);
}

}  // namespace burst
