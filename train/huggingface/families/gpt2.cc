// GPT-2 (Radford et al., 2019).
#include "train/huggingface/families/family.h"

namespace burst {

HuggingFaceFamily Gpt2Family() {
  using M = ModelConfig;
  HuggingFaceFamily family;
  family.type = "gpt2";
  family.architecture = "GPT2LMHeadModel";
  family.base.family = Family::kGpt2;
  family.properties = {{"n_layer", &M::layers},
                       {"n_embd", &M::width},
                       {"n_head", &M::heads},
                       {"n_inner", &M::ffn, 0},
                       {"n_positions", &M::context},
                       {"vocab_size", &M::vocab},
                       {"layer_norm_epsilon", &M::norm_eps, 1e-5},
                       {"tie_word_embeddings", &M::tied_embeddings, 1}};
  // Two names of one function.
  family.fixed = {{"activation_function", {"gelu_new", "gelu_pytorch_tanh"}}};
  family.rates = {{"embd_pdrop", &M::dropout},
                  {"resid_pdrop", &M::dropout},
                  {"attn_pdrop", &M::attention_dropout}};
  family.tensors.prefix = "transformer.";
  family.tensors.layers = "h.";
  family.tensors.outside = {{"embedding.tokens", "wte.weight"},
                            {"embedding.positions", "wpe.weight"},
                            {"final_norm.weight", "ln_f.weight"},
                            {"final_norm.bias", "ln_f.bias"},
                            {"head.weight", "/lm_head.weight"}};
  family.tensors.inside = {
      {"attention_norm", {"ln_1"}},       {"attention.qkv", {"attn.c_attn"}},
      {"attention.out", {"attn.c_proj"}}, {"ffn_norm", {"ln_2"}},
      {"ffn.up", {"mlp.c_fc"}},           {"ffn.down", {"mlp.c_proj"}},
  };
  family.tensors.transposed = true;  // its linear layers are stored as "Conv1D"
  family.tensors.computed = {".attn.bias", ".attn.masked_bias"};
  return family;
}

}  // namespace burst
