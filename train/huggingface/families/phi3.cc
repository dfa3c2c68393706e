// Phi-3 and Phi-4 (Abdin et al., arXiv 2404.14219): projections that share a tensor, partial
// rotation and LongRoPE.
#include <algorithm>

#include "train/huggingface/families/family.h"

namespace burst {
namespace {

// Writes LongRoPE as Phi-3's own files do, where it is what they can say. transformers 4 reads no
// other form.
void WritePhi3(const HuggingFaceConfig& config, nlohmann::ordered_json* json) {
  constexpr int64_t kPadding = 32000;  // transformers' default, which must be a token
  if (config.model.vocab <= kPadding) (*json)["pad_token_id"] = nullptr;
  const RopeScaling& scaling = config.model.rope_scaling;
  if (scaling.kind != RopeScaling::Kind::kLongRope || scaling.amplitude > 0) return;
  const double longer = static_cast<double>(config.model.context);
  if (scaling.factor != std::max(1.0, longer / static_cast<double>(scaling.first_context))) return;
  (*json)["rope_scaling"] = {{"type", "longrope"},
                             {"short_factor", scaling.short_factors},
                             {"long_factor", scaling.long_factors}};
}

}  // namespace

HuggingFaceFamily Phi3Family() {
  HuggingFaceFamily family = LlamaLike();
  family.type = "phi3";
  family.architecture = "Phi3ForCausalLM";
  family.Set({"rms_norm_eps", &ModelConfig::norm_eps, 1e-5});
  // "su" and "yarn" are the names of LongRoPE in the first files.
  using Kind = RopeScaling::Kind;
  family.rope.types = {{"default", Kind::kNone},
                       {"longrope", Kind::kLongRope},
                       {"su", Kind::kLongRope},
                       {"yarn", Kind::kLongRope}};
  family.rope.partial = true;
  family.rope.first_context = 4096;
  family.read_window = [](Fields& fields, HuggingFaceConfig* config) {
    config->window = ReadWindow(fields, 0);
  };
  family.write_more = WritePhi3;
  family.tensors.inside["attention.qkv"] = {"self_attn.qkv_proj"};
  family.tensors.inside["ffn.gate_up"] = {"mlp.gate_up_proj"};
  return family;
}

}  // namespace burst
