#include "train/trainer/sample.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/cli/process.h"
#include "train/checkpoint/checkpoint.h"
#include "train/generate/generate.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

// Loads the whole model from its checkpoint, for a rank that owns a part of it.
absl::StatusOr<std::unique_ptr<Transformer>> LoadWhole(const ResolvedConfig& config,
                                                       const std::string& checkpoint) {
  BURST_ASSIGN_OR_RETURN(
      std::unique_ptr<Transformer> model,
      Transformer::Create(config.model, config.dtype, /*seed=*/std::nullopt, config.device,
                          /*parallel=*/{}, StateSharding::ValuesAlone()));
  BURST_RETURN_IF_ERROR(LoadCheckpoint(checkpoint, &model->parameters(), nullptr));
  return model;
}

}  // namespace

absl::StatusOr<std::string> SampleText(const RankState& rank, const RunFolder& folder) {
  const ScopedPhase phase("sample");
  const ResolvedConfig& config = rank.config;
  const Transformer* model = rank.model.get();
  std::unique_ptr<Transformer> whole;
  if (rank.tensor != nullptr || rank.pipeline != nullptr || config.zero == 3) {
    BURST_ASSIGN_OR_RETURN(whole, LoadWhole(config, folder.checkpoint()));
    model = whole.get();
  }
  const Tokenizer& tokenizer = *rank.setup.data.tokenizer;
  GenerationOptions generation;
  generation.sampling.seed = static_cast<uint64_t>(config.seed);
  generation.tokens = rank.setup.sample;
  BURST_ASSIGN_OR_RETURN(const CheckpointInfo info, ReadCheckpointInfo(folder.checkpoint()));
  generation.context = ContextOf(folder.checkpoint(), info);
  generation.window = config.window;
  // A complete run does not fail because of its model's files.
  const PromptRules rules = RulesOfCheckpoint(folder.checkpoint(), tokenizer, /*with_begin=*/true)
                                .value_or(PromptRules());
  generation.ends = rules.ends;
  BURST_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, EncodePrompt(tokenizer, "", rules));
  const auto beyond = [&](int32_t token) { return token >= config.model.vocab; };
  if (std::any_of(prompt.begin(), prompt.end(), beyond)) prompt = {0};
  std::string text;
  BURST_RETURN_IF_ERROR(
      Generate(*model, tokenizer, prompt, generation, [&](absl::string_view piece) {
        absl::StrAppend(&text, piece);
        return InterruptSignal() == 0;
      }));
  return text;
}

}  // namespace burst
