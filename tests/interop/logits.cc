// Writes the logits of a Hugging Face directory, computed by this library. hf_parity.py compares
// them with those of transformers.
//
//   logits DIRECTORY TOKENS OUT [fp32|bf16]
//
// TOKENS is a JSON array of rows of tokens of one length. OUT is a safetensors file with "logits",
// float32 [rows, length, vocab]. The program computes on the CPU, or with a dtype on a GPU with
// activations in that dtype.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "burst/attention/burst_attention.h"
#include "burst/base/json.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/device/device.h"
#include "model/transformer.h"
#include "train/checkpoint/safetensors.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

absl::Status WriteLogits(const std::string& directory, const std::string& tokens_path,
                         const std::string& out, DType dtype, DeviceType device) {
  BURST_ASSIGN_OR_RETURN(const Pretrained pretrained, FindPretrained(directory));
  BURST_ASSIGN_OR_RETURN(const std::unique_ptr<Transformer> model,
                         Transformer::Create(pretrained.model, dtype, std::nullopt, device));
  BURST_RETURN_IF_ERROR(LoadPretrained(pretrained, &model->parameters()));

  BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(tokens_path));
  BURST_ASSIGN_OR_RETURN(const nlohmann::json rows, ParseJson(text));
  std::vector<int32_t> tokens, positions;
  for (const nlohmann::json& row : rows) {
    for (const nlohmann::json& token : row) tokens.push_back(token.get<int32_t>());
    for (size_t t = 0; t < row.size(); ++t) positions.push_back(static_cast<int32_t>(t));
  }
  const Shape shape = {static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size())};
  BurstAttentionOptions options;
  options.scores.softcap = model->config().attention_softcap;
  BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, nullptr));
  BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules,
                         MakeLayerSchedules(model->config(), *attention, shape[1],
                                            Mask::SlidingWindow(pretrained.window)));
  const SequenceBatch batch = {Tensor::FromVector(tokens, shape, device),
                               Tensor::FromVector(positions, shape, device), Tensor(), schedules};
  Tape tape(/*recording=*/false);
  const Variable logits = model->Logits(tape, *attention, batch);
  BURST_RETURN_IF_ERROR(tape.status());
  const Tensor result = logits.value().To(DeviceType::kCpu).To(DType::kFloat32);
  return WriteSafetensors(out, {{"logits", result}}, {});
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  const std::string dtype = argc == 5 ? argv[4] : "";
  if (argc < 4 || argc > 5 || (argc == 5 && dtype != "fp32" && dtype != "bf16")) {
    std::fprintf(stderr, "usage: logits DIRECTORY TOKENS OUT [fp32|bf16]\n");
    return 2;
  }
  const burst::DeviceType device =
      dtype.empty() ? burst::DeviceType::kCpu : burst::DeviceType::kCuda;
  if (device == burst::DeviceType::kCuda && burst::CudaDeviceCount() == 0) {
    std::fprintf(stderr, "error: no GPU was found\n");
    return 1;
  }
  const burst::ScopedThreadPool pool(burst::NumCores());
  const absl::Status status = burst::WriteLogits(
      argv[1], argv[2], argv[3], dtype == "bf16" ? burst::DType::kBFloat16 : burst::DType::kFloat32,
      device);
  if (status.ok()) return 0;
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return 1;
}
