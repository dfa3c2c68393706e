// Reads config.json of Hugging Face directories. Any text gives a model that Validate accepts, or
// an error that says where. Writing the model's config.json and reading it gives the same model.
#include <cmath>
#include <string>

#include "absl/status/status.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/huggingface/config.h"

namespace burst {

void FuzzOne(const uint8_t* data, size_t size) {
  const absl::StatusOr<HuggingFaceConfig> config =
      ParseHuggingFaceConfig({reinterpret_cast<const char*>(data), size});
  if (!config.ok()) {
    BURST_CHECK(absl::IsInvalidArgument(config.status()));
    BURST_CHECK_EQ(config.status().message().substr(0, 13), "config.json: ");
    return;
  }
  const ModelConfig& model = config->model;
  BURST_CHECK(model.Validate().ok() && model.vocab >= 1 && config->window >= 0);
  constexpr int64_t kLayers = 1000;  // the kind of each layer is written
  if (model.layers > kLayers) return;
  const absl::StatusOr<std::string> json = MakeHuggingFaceConfig(*config);
  BURST_CHECK(json.ok()) << json.status().ToString();
  const absl::StatusOr<HuggingFaceConfig> again = ParseHuggingFaceConfig(*json);
  BURST_CHECK(again.ok()) << *json << again.status().ToString();
  BURST_CHECK_EQ(ModelDifference(model, again->model), "") << *json;
  BURST_CHECK_EQ(config->window, again->window) << *json;
  if (model.family == Family::kGpt2 || model.head_dim > 1024) return;
  constexpr double kMost = 1e6;  // longrope may divide by 1e-6
  for (const bool is_long : {false, true}) {
    for (const double frequency : model.AnglesOf(/*full=*/true, is_long).frequencies) {
      BURST_CHECK(std::isfinite(frequency) && frequency >= 0 && frequency <= kMost) << *json;
    }
  }
}

}  // namespace burst
