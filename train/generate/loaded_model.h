// Loads a model that a program runs without training it: its options, its ranks and its weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/cli/options.h"
#include "burst/comm/communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/device/device.h"
#include "model/transformer.h"
#include "train/config/config.h"
#include "train/data/tokenizer.h"
#include "train/generate/prompt.h"
#include "train/huggingface/pretrained.h"

namespace burst {

struct ModelOptions {
  std::string checkpoint, tokenizer;
  int64_t ranks = -1;
  TrainConfig train;  // options that //train has, too
};

// Adds --checkpoint and --tokenizer, or the options of devices and ranks.
void AddSourceOptions(ModelOptions* options, OptionTable* table);
void AddRankOptions(ModelOptions* options, OptionTable* table);

// The device, ranks and precision of the model.
struct Place {
  DeviceType device;
  DType dtype = DType::kFloat32;
  int ranks = 1;
  int threads = 1;         // threads of each rank, on the CPU
  bool processes = false;  // a launcher's processes are the ranks; else threads
};

// The source of a model with weights: a checkpoint, or a Hugging Face directory.
struct ModelSource {
  // Finds the model of --checkpoint. Errors name the option and the file.
  static absl::StatusOr<ModelSource> Find(const ModelOptions& options);

  // Returns the model with its weights, on this rank's device.
  absl::StatusOr<std::unique_ptr<Transformer>> Load(const Place& place) const;
  // Returns the model's own tokenizer, or the one of --tokenizer.
  absl::StatusOr<Tokenizer> FindTokenizer(const ModelOptions& options) const;
  // Returns which tokens begin and end its texts. Without `with_begin`, none begins them.
  absl::StatusOr<PromptRules> FindRules(const Tokenizer& own, bool with_begin) const;
  // InvalidArgument if the sources of two processes differ. Collective.
  absl::Status CheckAgreement(Communicator* processes) const;

  std::string path;
  Pretrained pretrained;
  ModelConfig model;
  int64_t seqlen = 0;   // tokens of a sequence that the model was trained with last
  int64_t context = 0;  // tokens that it takes: more than `seqlen` if it began with trained weights
  int64_t window = 0;
  std::string identity;  // identity of the weights

 private:
  // Completes an error of reading the source. For a run's checkpoint it adds which other checkpoint
  // is good.
  absl::Status Unusable(const absl::Status& status) const;
};

// Returns the attention of ranks that share sequences.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> AttentionOver(
    const ModelOptions& options, const ModelSource& source, Communicator* comm);

// Calls `work` on each rank, with the communicator of all ranks.
absl::Status OnRanks(const Place& place, Communicator* processes,
                     const std::function<absl::Status(Communicator&)>& work);

// Runs `work` with the place that the options choose, and with this process's communicator if the
// ranks are processes, else null. Returns the program's exit code. `usage`: the error of parsing
// the options.
int RunOnPlace(const ModelOptions& options, const OptionTable& table, absl::Status usage,
               const std::function<absl::Status(const Place&, Communicator*)>& work);

}  // namespace burst
