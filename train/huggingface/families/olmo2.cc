// OLMo 2 (arXiv 2501.00656): normalization after the branches, and of queries and keys over all
// heads.
#include "train/huggingface/families/family.h"

namespace burst {

HuggingFaceFamily Olmo2Family() {
  HuggingFaceFamily family = LlamaLike();
  family.type = "olmo2";
  family.architecture = "Olmo2ForCausalLM";
  family.base.norm_position = NormPosition::kAfter;
  family.base.qk_norm = QkNorm::kAll;
  family.Set({"rms_norm_eps", &ModelConfig::norm_eps, 1e-5});
  family.Set({"attention_bias", &ModelConfig::qkv_bias, 0});
  family.out_bias_as_qkv = true;
  family.tensors.inside["attention_out_norm"] = {"post_attention_layernorm"};
  family.tensors.inside["ffn_out_norm"] = {"post_feedforward_layernorm"};
  return family;
}

}  // namespace burst
