#include "train/run/agreement.h"

#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "burst/comm/agreement.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

// Without agreement, --resume=auto on hosts that share no folder would start a run on some hosts
// and continue it on others.
absl::Status AgreeOnResume(const ResolvedConfig& config, Communicator* comm) {
  BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm->AllGather(config.resume ? 1 : 0));
  const auto first = [&](double value) {
    return std::find(all.begin(), all.end(), value) - all.begin();
  };
  const int64_t continues = first(1), starts = first(0), none = all.size();
  if (continues == none || starts == none) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("--resume: rank ", continues, " continues the run in ", config.out, " and rank ",
                   starts, " starts one; give all hosts the same folder and the same --resume"));
}

std::string Digest(const std::string& text) {
  return absl::StrCat("content ", absl::Hex(XXH3_64bits(text.data(), text.size())));
}

}  // namespace

absl::Status AgreeOnOptions(const ResolvedConfig& config, Communicator* comm) {
  BURST_RETURN_IF_ERROR(AgreeOnResume(config, comm));
  return CheckAgreement(comm, config.AgreedOptions(LaunchIsOnOneHost()));
}

absl::Status AgreeOnSetup(const TrainingSetup& setup, Communicator* comm) {
  const ResolvedConfig& config = setup.config;
  std::vector<AgreedItem> items;
  BURST_ASSIGN_OR_RETURN(const auto model, ParseJson(ModelConfigToJson(config.model)));
  for (const auto& [key, value] : model.items()) {
    items.push_back({absl::StrCat("--model, its ", key), value.dump()});
  }
  items.push_back({"--window", absl::StrCat(config.window)});
  const bool reads_weights = config.pretrained.has_value() && !config.resume;
  absl::StatusOr<std::string> weights = std::string("none");
  if (reads_weights) weights = FingerprintOf(*config.pretrained);
  items.push_back({"--model, its weights", weights.ok() ? *weights : weights.status().ToString()});
  items.push_back({"--data, its tokens", absl::StrCat("content ", setup.data_fingerprint)});
  const bool has_tokenizer = setup.data.tokenizer.has_value();
  items.push_back({"--tokenizer", has_tokenizer ? Digest(setup.data.tokenizer->ToJson()) : "none"});
  items.push_back({"--sample", absl::StrCat(setup.sample)});
  BURST_RETURN_IF_ERROR(CheckAgreement(comm, items));
  if (weights.ok()) return absl::OkStatus();
  return absl::Status(weights.status().code(),
                      absl::StrCat("--model: ", weights.status().message()));
}

absl::Status AgreeOnCheckpoint(const TrainingSetup& setup, Communicator* comm) {
  if (!setup.config.resume) return absl::OkStatus();
  const auto steps_of = [](const std::string& value) { return value.substr(0, value.find(',')); };
  BURST_ASSIGN_OR_RETURN(
      const std::optional<Disagreement> found,
      FindDisagreement(comm, {{"--resume", absl::StrCat("step ", setup.resumed->step, ", content ",
                                                        setup.resumed->identity)}}));
  if (!found.has_value()) return absl::OkStatus();
  const std::string own = steps_of(found->value), of_rank0 = steps_of(found->value_of_rank0);
  const std::string why = own == of_rank0
                              ? "two runs have made them; give all hosts the same folder"
                              : "a host sees an older folder; copy the newer one to all hosts";
  const bool by_step = own != of_rank0;
  return absl::FailedPreconditionError(absl::StrCat(
      "--resume: rank ", found->rank, " sees ", by_step ? own : found->value, ", rank 0 ",
      by_step ? of_rank0 : found->value_of_rank0, " in ", setup.config.out, ": ", why));
}

}  // namespace burst
