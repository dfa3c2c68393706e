// Phi-3 and Phi-4 (Abdin et al., arXiv 2404.14219): projections that share a tensor.
#include "train/huggingface/families/family.h"

namespace burst {

HuggingFaceFamily Phi3Family() {
  HuggingFaceFamily family = LlamaLike();
  family.type = "phi3";
  family.architecture = "Phi3ForCausalLM";
  family.Set({"rms_norm_eps", &ModelConfig::norm_eps, 1e-5});
  family.ignored = {"original_max_position_embeddings"};  // counts with longrope, which is refused
  family.read_window = [](Fields& fields, HuggingFaceConfig* config) {
    config->window = ReadWindow(fields, 0);
  };
  family.tensors.inside["attention.qkv"] = {"self_attn.qkv_proj"};
  family.tensors.inside["ffn.gate_up"] = {"mlp.gate_up_proj"};
  return family;
}

}  // namespace burst
