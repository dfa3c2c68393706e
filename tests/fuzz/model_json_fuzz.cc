// Reads model configurations. Any text gives a model that Validate accepts, or an error. The
// model's JSON gives the same model again.
#include <string>

#include "burst/base/check.h"
#include "model/config.h"
#include "tests/fuzz/fuzz_target.h"

namespace burst {

void FuzzOne(const uint8_t* data, size_t size) {
  const absl::StatusOr<ModelConfig> model =
      ModelConfigFromJson({reinterpret_cast<const char*>(data), size});
  if (!model.ok()) {
    BURST_CHECK(!model.status().message().empty());
    return;
  }
  BURST_CHECK(model->Validate().ok());
  const std::string json = ModelConfigToJson(*model);
  const absl::StatusOr<ModelConfig> again = ModelConfigFromJson(json);
  BURST_CHECK(again.ok()) << json << ": " << again.status().message();
  BURST_CHECK_EQ(ModelConfigToJson(*again), json);
  BURST_CHECK_EQ(ModelDifference(*model, *again), "");
  const ModelConfig full = model->WithDefaults();
  BURST_CHECK(full.Validate().ok()) << json;
  BURST_CHECK(full.kv_heads >= 1 && full.ffn >= 1 && full.init_std > 0);
}

}  // namespace burst
