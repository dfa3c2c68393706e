// The configuration of a model: two families of decoder-only Transformers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/rope.h"

namespace burst {

enum class Family {
  kLlama,  // RMSNorm, RoPE, SwiGLU, grouped-query heads, no biases (Touvron et al., arXiv
           // 2302.13971); with qkv_bias, qk_norm also Qwen2, Qwen3
  kGpt2,   // LayerNorm, learned positions, GELU (tanh), biases (Radford et al., 2019)
};

const char* Name(Family family);  // "llama", "gpt2"

// Where a layer normalizes, for attention and for the feed-forward alike.
enum class NormPosition {
  kBefore,  // x + f(norm(x)) (pre-norm)
  kAfter,   // x + norm(f(x)) (OLMo 2, arXiv 2501.00656)
  kBoth,    // x + norm(f(norm(x))) (Gemma 2, arXiv 2408.00118)
};

// The RMSNorm of queries and keys before RoPE.
enum class QkNorm {
  kNone,
  kHead,  // of each head; all query heads share a weight, and all key heads (Qwen3)
  kAll,   // of all heads' channels together (OLMo 2)
};

// The activation of the gate in a llama's feed-forward.
enum class Gate {
  kSilu,  // SwiGLU
  kGelu,  // GEGLU, with the tanh form of GELU (Gemma, arXiv 2403.08295)
};

struct ModelConfig {
  Family family = Family::kLlama;
  int64_t layers = 0;
  int64_t width = 0;  // channels of the residual stream
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads; 0: heads
  int64_t head_dim = 0;  // channels of a head; 0: width / heads, which must be whole
  int64_t ffn = 0;  // hidden channels of the feed-forward; 0: 4 width (gpt2), 8/3 width rounded up
                    // to 64 (llama)
  int64_t vocab = 0;  // 0: the tokenizer's (filled in by the trainer before a model is made)
  // gpt2: the number of learned positions, 0: the training seqlen. llama: the longest text that an
  // imported model was made for, 0: not known; exports repeat it.
  int64_t context = 0;
  bool tied_embeddings = false;  // the head shares the token embedding
  double dropout = 0;            // on the embedding and on each residual branch
  double attention_dropout = 0;  // the rate for attention's weights, in training
  // c > 0: attention's scores s become c tanh(s / c) (Gemma 2, arXiv 2408.00118). 0: they stay.
  double attention_softcap = 0;
  // c > 0: the head's logits l become c tanh(l / c) (Gemma 2). 0: they stay.
  double logits_softcap = 0;
  // A learned logit of each query head takes part in attention's softmax and has no value: a head
  // may attend to nothing (gpt-oss, arXiv 2508.10925).
  bool attention_sinks = false;
  bool qkv_bias = false;            // llama: biases of the projections to queries, keys and values
  bool attention_out_bias = false;  // llama: a bias of the projection after attention
  bool ffn_bias = false;            // llama: biases of gate, up and down
  QkNorm qk_norm = QkNorm::kNone;   // llama
  NormPosition norm_position = NormPosition::kBefore;  // llama
  bool unit_offset_norms = false;  // llama: RMSNorm multiplies by 1 + weight (Gemma)
  Gate gate = Gate::kSilu;         // llama
  // llama: the token embedding is multiplied by sqrt(width), rounded to the model's dtype (Gemma).
  bool scaled_embedding = false;
  // llama: attention's scores are divided by the square root of this number (Gemma 2). 0: head_dim.
  int64_t score_channels = 0;
  // llama: RoPE turns this many of a head's channels, the first ones (partial rotation). 0: all.
  int64_t rope_channels = 0;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  // The numbers of the layers whose attention has no window, increasing. A run's window is for the
  // other layers. Empty: for all layers.
  std::vector<int64_t> full_layers;
  // The base of RoPE, without scaling, in the layers that full_layers does not name (Gemma 3, arXiv
  // 2503.19786). 0: rope_theta and rope_scaling are for all layers.
  double window_rope_theta = 0;
  double norm_eps = 1e-5;
  // Standard deviation of the matrices' initial weights. A matrix that ends a branch of a layer has
  // 1 / sqrt(2 layers) of it. 0: sqrt(2 / (5 width)), SmallInit of Nguyen and Salazar (arXiv
  // 1910.05895), with which activations keep their scale at any width. (nanoGPT's CPU model, of
  // width 128, ends at a validation loss of 1.76; with GPT-2's 0.02 it ends at 1.89.)
  double init_std = 0;

  // Which linear layers have biases; gpt2's all do.
  bool has_qkv_bias() const { return family == Family::kGpt2 || qkv_bias; }
  bool has_out_bias() const { return family == Family::kGpt2 || attention_out_bias; }
  bool has_ffn_bias() const { return family == Family::kGpt2 || ffn_bias; }
  bool IsFull(int64_t layer) const;  // whether full_layers names it
  // RoPE's angles in full_layers, or in the others. is_long: rope_scaling.IsLong of the text. Their
  // amplitude makes queries and keys long enough for score_channels. Needs WithDefaults.
  RopeAngles AnglesOf(bool full, bool is_long) const;
  int64_t attention_channels() const { return heads * head_dim; }  // needs WithDefaults

  // InvalidArgument naming the field, its value and what would be valid. `vocab` and `context` may
  // still be 0.
  absl::Status Validate() const;
  // Returns the model with the defaults of kv_heads, head_dim, ffn and init_std filled in.
  ModelConfig WithDefaults() const;
};

// What a layer's forward saves for its backward, which computes the rest again
// (burst/autograd/tape.h). Results do not depend on it; with kSequence to rounding.
enum class Recompute {
  kNone,  // all activations; nothing is computed again
  kFull,  // the layer's input (Chen et al., arXiv 1604.06174)
  // The layer's input and attention's result, out and lse: what is expensive to compute for its
  // size (Korthikanti et al., arXiv 2205.05198). For long sequences that is attention (BurstEngine,
  // arXiv 2509.19836).
  kSelective,
  // As kSelective, for the later half of the sequence alone. Under a causal mask the attention of
  // the earlier half is a quarter of the whole (BurstEngine).
  kSequence,
};
absl::StatusOr<Recompute> ParseRecompute(absl::string_view name);  // "none", "selective", ...
const char* Name(Recompute recompute);

// A named preset: nanogpt_cpu, nanogpt_gpu, d12, llama_tiny, ... An unknown name is an error that
// lists them.
absl::StatusOr<ModelConfig> ModelPreset(absl::string_view name);
std::string ModelPresetNames();  // "d12, llama_tiny, ..."

// JSON object with the fields of ModelConfig as keys; a key that is absent keeps its default.
// Unknown keys, wrong types and what Validate rejects are errors that name the key.
absl::StatusOr<ModelConfig> ModelConfigFromJson(absl::string_view json);
std::string ModelConfigToJson(const ModelConfig& config);

// The fields in which two models differ: "width 128 instead of 192, heads 4 instead of 6"; empty
// for equal ones.
std::string ModelDifference(const ModelConfig& config, const ModelConfig& other);

}  // namespace burst
