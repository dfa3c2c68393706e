// Llama 2, 3, 3.1, 3.2 (Touvron et al., arXiv 2302.13971), and Mistral (arXiv 2310.06825).
#include "train/huggingface/families/family.h"

namespace burst {

HuggingFaceFamily LlamaLike() {
  using M = ModelConfig;
  HuggingFaceFamily family;
  family.properties = {{"num_hidden_layers", &M::layers},
                       {"hidden_size", &M::width},
                       {"num_attention_heads", &M::heads},
                       {"num_key_value_heads", &M::kv_heads, 0},
                       {"head_dim", &M::head_dim, 0},
                       {"intermediate_size", &M::ffn},
                       {"vocab_size", &M::vocab},
                       {"max_position_embeddings", &M::context},
                       {"rms_norm_eps", &M::norm_eps, 1e-6},
                       {"rope_theta", &M::rope_theta, 10000},
                       {"tie_word_embeddings", &M::tied_embeddings, 0}};
  family.fixed = {{"hidden_act", {"silu"}}};
  family.rates = {{"attention_dropout", &M::attention_dropout}};
  family.tensors.prefix = "model.";
  family.tensors.layers = "layers.";
  family.tensors.outside = {{"embedding.tokens", "embed_tokens.weight"},
                            {"final_norm.weight", "norm.weight"},
                            {"head.weight", "/lm_head.weight"}};
  family.tensors.inside = {
      {"attention_norm", {"input_layernorm"}},
      {"attention.qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
      {"attention.out", {"self_attn.o_proj"}},
      {"attention.q_norm", {"self_attn.q_norm"}},
      {"attention.k_norm", {"self_attn.k_norm"}},
      {"ffn_norm", {"post_attention_layernorm"}},
      {"ffn.gate_up", {"mlp.gate_proj", "mlp.up_proj"}},
      {"ffn.down", {"mlp.down_proj"}},
  };
  family.tensors.computed = {".rotary_emb.inv_freq"};
  return family;
}

HuggingFaceFamily LlamaFamily() {
  HuggingFaceFamily family = LlamaLike();
  family.type = "llama";
  family.architecture = "LlamaForCausalLM";
  family.Set({"attention_bias", &ModelConfig::qkv_bias, 0});
  family.out_bias_as_qkv = true;
  family.Set({"mlp_bias", &ModelConfig::ffn_bias, 0});
  return family;
}

HuggingFaceFamily MistralFamily() {
  HuggingFaceFamily family = LlamaLike();
  family.type = "mistral";
  family.architecture = "MistralForCausalLM";
  family.Set({"num_key_value_heads", &ModelConfig::kv_heads});
  family.read_window = [](Fields& fields, HuggingFaceConfig* config) {
    config->window = ReadWindow(fields, 4096);
  };
  return family;
}

}  // namespace burst
