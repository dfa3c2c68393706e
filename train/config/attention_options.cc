// The options that spread attention over ranks: their rows, conflicts and checks.
#include "absl/strings/str_cat.h"
#include "burst/attention/ulysses_attention.h"
#include "burst/base/status.h"
#include "train/config/option_group.h"

namespace burst {
namespace {

absl::StatusOr<Strategy> ParseTrainStrategy(absl::string_view name) {
  if (name != "tp" && name != "tp+sp") return ParseStrategy(name);
  return absl::InvalidArgumentError(
      absl::StrCat("must be a way to spread attention; got ", name, "; give --tp=N"));
}

void AddRows(TrainConfig* c, OptionTable* t) {
  t->Group("attention over ranks");
  t->Add("strategy", &c->strategy, ParseTrainStrategy)
      .MayChange()
      .Help(
          "Spread attention as single (one rank), burst (a ring), ring (RingAttention), ulysses or "
          "burst+ulysses.");
  t->Add("ulysses", &c->ulysses)
      .Min(1)
      .Or(-1)
      .Unit("ranks")
      .MayChange()
      .Help(
          "Share the heads among groups of N ranks. -1: as many as divide the ranks and the KV "
          "heads.");
  t->Add("ranks_per_node", &c->ranks_per_node)
      .Min(-1)
      .Unit("ranks")
      .MayChange()
      .Help(
          "Make a double ring of nodes with N ranks of a sequence each. 0: one flat ring. -1: as "
          "a launcher says.");
  t->Add("layout", &c->layout, ParseLayout)
      .MayChange()
      .Help(
          "Spread a sequence as contiguous, zigzag, striped, or, with --packed, balanced (whole "
          "documents where ranks get equal work, else zigzag).");
  t->Add("ring_backward", &c->ring_backward, ParseBackwardDirection)
      .MayChange()
      .Help(
          "Send queries (burst) or keys and values (ring) in the backward pass. auto: the fewer "
          "bytes.");
  t->Add("ring_grad_dtype", &c->ring_grad_dtype, ParseRingGradDType)
      .MayChange()
      .Help("Send gradients around the ring in bf16, rounded at every transfer, or in fp32.");
  t->Add("deterministic", &c->deterministic)
      .MayChange()
      .Help(
          "Compute the same bits in every run. false: GPU kernels may be faster, CPU kernels "
          "stay the same.");
  t->Add("exact", &c->exact)
      .Help(
          "Compute the same bits on any number of ranks, in any layout, at the cost of time and "
          "memory (docs/training/several_gpus.md).");
  t->Add("exact_chunk", &c->exact_chunk)
      .Min(0)
      .Unit("tokens")
      .Help(
          "Divide exact sums into chunks of N tokens, a multiple of 16; bits depend on it. 0: up "
          "to 8192, in 8 chunks or more.");
}

constexpr Side kSequenceParallel = {"sp", "--sp above 1", "1", "--sp=2",
                                    [](const Config& c) { return c.mesh.sequence > 1; }};
constexpr Side kSingle = {"strategy", "--strategy=single", "another one", "--strategy=single",
                          [](const Config& c) { return c.strategy == Strategy::kSingle; }};
constexpr Side kUlysses = {"strategy", "--strategy=ulysses or burst+ulysses", "burst or ring",
                           "--strategy=ulysses", [](const Config& c) {
                             return c.strategy == Strategy::kUlysses ||
                                    c.strategy == Strategy::kBurstUlysses;
                           }};
constexpr Side kNotBurstUlysses = {
    "strategy", "without --strategy=burst+ulysses", "burst+ulysses", "",
    [](const Config& c) { return c.strategy != Strategy::kBurstUlysses; }};
constexpr Side kInexactStrategy = {"strategy", "--strategy=ring, ulysses or burst+ulysses",
                                   "burst or single", "--strategy=ring", [](const Config& c) {
                                     return c.strategy != Strategy::kBurst &&
                                            c.strategy != Strategy::kSingle;
                                   }};
constexpr Side kOneDirection = {"strategy", "--strategy=single, ring or ulysses",
                                "burst or burst+ulysses", "--strategy=ulysses",
                                [](const Config& c) {
                                  const bool same = c.strategy == Strategy::kRing &&
                                                    c.ring_backward == BackwardDirection::kRing;
                                  return !HasDirections(c.strategy) && !same;
                                }};
constexpr Side kNoRing = {"strategy", "--strategy=single or ulysses",
                          "burst, ring or burst+ulysses", "--strategy=ulysses",
                          [](const Config& c) { return !HasRing(c.strategy); }};
constexpr Side kUlyssesRanks = {"ulysses", "--ulysses", "-1", "--ulysses=1",
                                [](const Config& c) { return c.given().ulysses != -1; }};
constexpr Side kRingBackward = {
    "ring_backward", "--ring_backward", "auto", "--ring_backward=burst",
    [](const Config& c) { return c.ring_backward != BackwardDirection::kAuto; }};
constexpr Side kBf16RingGradients = {
    "ring_grad_dtype", "--ring_grad_dtype=bf16", "fp32", "--ring_grad_dtype=bf16",
    [](const Config& c) { return c.ring_grad_dtype != RingGradDType::kFp32; }};
constexpr Side kRanksPerNode = {"ranks_per_node", "--ranks_per_node", "-1 or 0",
                                "--ranks_per_node=1",
                                [](const Config& c) { return c.given().ranks_per_node > 0; }};
constexpr Side kNotExact = {"exact", "without --exact", "true", "",
                            [](const Config& c) { return !c.exact; }};
constexpr Side kExactChunk = {"exact_chunk", "--exact_chunk", "0", "--exact_chunk=16",
                              [](const Config& c) { return c.given().exact_chunk != 0; }};
constexpr Side kNotDeterministic = {"deterministic", "--nodeterministic", "true",
                                    "--nodeterministic",
                                    [](const Config& c) { return !c.deterministic; }};
constexpr Side kFp8 = {"precision", "--precision=fp8", "bf16, fp32 or tf32", "--precision=fp8",
                       [](const Config& c) { return c.fp8; }};
constexpr Side kNotBf16 = {"precision", "--precision=fp32 or tf32", "bf16", "--precision=fp32",
                           [](const Config& c) { return c.dtype != DType::kBFloat16; }};
constexpr Side kSoftcap = {"model.attention_softcap", "--model.attention_softcap", "0",
                           "--model.attention_softcap=30",
                           [](const Config& c) { return c.model.attention_softcap != 0; }};
constexpr Side kAttentionDropout = {"model.attention_dropout", "--model.attention_dropout", "0",
                                    "--model.attention_dropout=0.5",
                                    [](const Config& c) { return c.model.attention_dropout != 0; }};

constexpr TrainConflict kConflicts[] = {
    {kSingle, kSequenceParallel, "one rank keeps the whole sequence",
     "give --sp=1 or another strategy"},
    {kTensorParallel, kUlysses, "both divide the heads", "give --strategy=burst or ring"},
    {kUlyssesRanks, kNotBurstUlysses, "it is the size of that strategy's groups", kLeaveOut},
    {kRingBackward, kOneDirection, "the backward of that strategy has one direction", kLeaveOut},
    {kBf16RingGradients, kNoRing, "it is the type of gradients in rings", kLeaveOut},
    {kBf16RingGradients, kNotBf16, "activations must be bf16, too", "give --precision=bf16"},
    {kRanksPerNode, kNoRing, "it divides rings", kLeaveOut},
    {kInexactStrategy, kExact, "ranks gather keys and values", kLeaveOut},
    {kTensorParallel, kExact, "its sums depend on the number of ranks", kLeaveOut},
    {kExact, kPipeline, "chunks of tokens pass all layers of a rank"},
    {kNotDeterministic, kExact, "sums in any order are not exact", kLeaveOut},
    {kRingBackward, kExact, "exact runs have no ring", kLeaveOut},
    {kBf16RingGradients, kExact, "exact runs have no ring", kLeaveOut},
    {kRanksPerNode, kExact, "exact runs have no ring", kLeaveOut},
    {kFp8, kExact, "a scale depends on the tokens of a rank", "give bf16"},
    {kSoftcap, kExact, "exact kernels do not change scores", "give 0"},
    {kAttentionDropout, kExact, "exact kernels do not change scores", "give 0"},
    {kExactChunk, kNotExact, "it is the size of the chunks of an exact run", "give --exact"},
};

// Checks how ranks divide the heads that attention takes at a time.
absl::Status Check(const ResolvedConfig& config) {
  const ModelConfig model = config.model.WithDefaults();
  const int64_t kv_heads = config.HeadsAtATime(model.kv_heads);
  const int64_t heads = model.heads / model.kv_heads * kv_heads;
  const int sp = config.mesh.sequence;
  if (config.strategy == Strategy::kUlysses) {
    return OrBurst(CheckHeadsDivide("--sp with --strategy=ulysses", heads, kv_heads, sp));
  }
  if (config.strategy != Strategy::kBurstUlysses) return absl::OkStatus();
  if (sp % config.ulysses != 0) {
    return InvalidOption("ulysses", "must be a divisor of the ", sp, " ranks of a sequence; got ",
                         config.ulysses, "; leave it out");
  }
  return CheckHeadsDivide("--ulysses", heads, kv_heads, config.ulysses);
}

}  // namespace

const OptionGroup kAttentionOptions = {AddRows, kConflicts, Check};

}  // namespace burst
