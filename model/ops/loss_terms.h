// What the loss of a language model adds up.
#pragma once

namespace burst {

// The loss is scale * the sum over tokens with a target of
//
//   -log softmax(l)[target] + z lse(l)^2,   l = softcap tanh(x W^T / softcap), or x W^T without one
//
// lse is log(sum(exp)). Its square keeps logits small (PaLM, arXiv 2204.02311, with z = 1e-4).
struct LossTerms {
  LossTerms(double scale, double z = 0, double softcap = 0)
      : scale(scale), z(z), softcap(softcap) {}
  double scale;
  double z;
  double softcap;  // 0: none
};

}  // namespace burst
