// A Transformer's forward written without the library.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/config.h"
#include "model/transformer.h"
#include "tests/model/small_models.h"

namespace burst {

// Computes one token at a time in plain loops. It uses only the parameters' names and numbers from
// the library.
class NaiveTransformer {
  using Values = std::vector<double>;

 public:
  // The factor by which dropout multiplies attention's weight of a query and a key.
  using WeightFactor =
      std::function<double(int64_t layer, int64_t row, int64_t head, int64_t query, int64_t key)>;
  // mask(site): the factors [batch, length, width] that dropout applies at a site; none by default.
  // window: keys that a query sees in layers that full_layers does not name; 0: all before it.
  NaiveTransformer(const Transformer& model, const Text& text,
                   std::function<Values(int64_t)> mask = nullptr, WeightFactor weight = nullptr,
                   int64_t window = 0)
      : config_(model.config()),
        text_(text),
        mask_(std::move(mask)),
        weight_(std::move(weight)),
        window_(window) {
    for (const Parameter& parameter : model.parameters().all()) {
      parameters_[parameter.name] = parameter.variable.value().ToVector<double>();
    }
  }

  // [batch, length, vocab]
  Values Logits() {
    Values logits;
    for (int64_t row = 0; row < text_.batch; ++row) {
      std::vector<Values> x;  // [length][width]
      for (int64_t t = 0; t < text_.length; ++t) {
        x.push_back(Row("embedding.tokens", text_.tokens[row * text_.length + t]));
        if (gpt2()) Accumulate(x[t], Row("embedding.positions", Position(row, t)));
        if (config_.scaled_embedding) {
          for (double& v : x[t]) v *= std::sqrt(double(config_.width));
        }
        x[t] = Drop(0, row, t, x[t]);
      }
      for (int64_t layer = 0; layer < config_.layers; ++layer) Layer(layer, row, x);
      for (int64_t t = 0; t < text_.length; ++t) {
        const Values h = Norm("final_norm", x[t]);
        const Values& head =
            parameters_[config_.tied_embeddings ? "embedding.tokens" : "head.weight"];
        for (int64_t v = 0; v < config_.vocab; ++v) {
          double sum = 0;
          for (int64_t i = 0; i < config_.width; ++i) sum += head[v * config_.width + i] * h[i];
          const double cap = config_.logits_softcap;
          logits.push_back(cap == 0 ? sum : cap * std::tanh(sum / cap));
        }
      }
    }
    return logits;
  }

 private:
  bool gpt2() const { return config_.family == Family::kGpt2; }
  int32_t Position(int64_t row, int64_t t) { return text_.positions[row * text_.length + t]; }
  Values Row(const std::string& table, int64_t row) {
    const auto begin = parameters_[table].begin() + row * config_.width;
    return Values(begin, begin + config_.width);
  }
  static void Accumulate(Values& x, const Values& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  Values Drop(int64_t site, int64_t row, int64_t t, Values x) {
    if (mask_ == nullptr) return x;
    const Values mask = mask_(site);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= mask[(row * text_.length + t) * x.size() + i];
    return x;
  }

  Values Project(const std::string& name, const Values& x) {
    const Values& weight = parameters_[name + ".weight"];
    Values y(weight.size() / x.size(), 0);
    for (size_t o = 0; o < y.size(); ++o) {
      for (size_t i = 0; i < x.size(); ++i) y[o] += weight[o * x.size() + i] * x[i];
    }
    if (parameters_.count(name + ".bias") > 0) Accumulate(y, parameters_[name + ".bias"]);
    return y;
  }

  int64_t head_dim() const { return config_.head_dim; }

  double Offset() const { return config_.unit_offset_norms ? 1 : 0; }

  // RMSNorm of each head, or of all heads together.
  void NormHeads(const std::string& name, Values& x) {
    if (config_.qk_norm == QkNorm::kNone) return;
    const Values& weight = parameters_[name + ".weight"];
    const size_t size = config_.qk_norm == QkNorm::kAll ? x.size() : head_dim();
    for (size_t begin = 0; begin < x.size(); begin += size) {
      double square = 0;
      for (size_t i = 0; i < size; ++i) square += x[begin + i] * x[begin + i] / size;
      for (size_t i = 0; i < size; ++i) {
        x[begin + i] *= (Offset() + weight.at(i)) / std::sqrt(square + config_.norm_eps);
      }
    }
  }

  // The norms before and after a branch, which the layer may not have.
  Values NormBefore(const std::string& name, const Values& x) {
    return config_.norm_position == NormPosition::kAfter ? x : Norm(name, x);
  }
  Values NormAfter(const std::string& name, const Values& x) {
    return config_.norm_position == NormPosition::kBefore ? x : Norm(name, x);
  }

  Values Norm(const std::string& name, const Values& x) {
    double mean = 0, square = 0;
    for (double v : x) mean += gpt2() ? v / x.size() : 0;
    for (double v : x) square += (v - mean) * (v - mean) / x.size();
    Values y;
    for (size_t i = 0; i < x.size(); ++i) {
      y.push_back((x[i] - mean) / std::sqrt(square + config_.norm_eps) *
                  (Offset() + parameters_[name + ".weight"][i]));
      if (gpt2()) y[i] += parameters_[name + ".bias"][i];
    }
    return y;
  }

  static double Gelu(double u) {
    return u * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u)));
  }

  bool IsFull(int64_t layer) const {
    const std::vector<int64_t>& full = config_.full_layers;
    return std::find(full.begin(), full.end(), layer) != full.end();
  }

  void Turn(Values& x, int32_t position, int64_t layer) {  // RoPE, as complex products
    const int64_t d = head_dim();
    const int64_t c = config_.rope_channels > 0 ? config_.rope_channels : d;  // channels that turn
    const RopeScaling& scaling = config_.rope_scaling;
    const RopeAngles angles =
        config_.window_rope_theta > 0 && !IsFull(layer)
            ? MakeRopeAngles(c, config_.window_rope_theta)
            : MakeRopeAngles(c, config_.rope_theta, scaling, text_.length > scaling.first_context);
    for (size_t head = 0; head < x.size() / d; ++head) {
      for (int64_t i = 0; i < c / 2; ++i) {
        const double angle = position * angles.frequencies[i];
        double& re = x[head * d + i];
        double& im = x[head * d + c / 2 + i];
        const double turned = re * std::cos(angle) - im * std::sin(angle);
        im = angles.amplitude * (re * std::sin(angle) + im * std::cos(angle));
        re = angles.amplitude * turned;
      }
    }
  }

  void Layer(int64_t layer, int64_t row, std::vector<Values>& x) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    std::vector<Values> q, k, v;
    for (int64_t t = 0; t < text_.length; ++t) {
      const Values h = NormBefore(prefix + "attention_norm", x[t]);
      const Values qkv = Project(prefix + "attention.qkv", h);
      const auto keys = qkv.begin() + config_.heads * head_dim();
      const auto values = keys + config_.kv_heads * head_dim();
      q.emplace_back(qkv.begin(), keys);
      k.emplace_back(keys, values);
      v.emplace_back(values, qkv.end());
      NormHeads(prefix + "attention.q_norm", q[t]);
      NormHeads(prefix + "attention.k_norm", k[t]);
      if (!gpt2()) Turn(q[t], Position(row, t), layer);
      if (!gpt2()) Turn(k[t], Position(row, t), layer);
    }
    const int64_t d = head_dim();
    for (int64_t t = 0; t < text_.length; ++t) {
      Values attended(config_.heads * d, 0);
      for (int64_t head = 0; head < config_.heads; ++head) {
        const int64_t kv_head = head * config_.kv_heads / config_.heads;
        Values weights;
        double total = 0;
        if (config_.attention_sinks) {
          total = std::exp(parameters_[prefix + "attention.sinks"][head]);
        }
        int64_t first = t - Position(row, t);  // the document's start
        if (window_ > 0 && !IsFull(layer)) first = std::max(first, t - window_ + 1);
        for (int64_t s = first; s <= t; ++s) {
          double score = 0;
          for (int64_t i = 0; i < d; ++i) score += q[t][head * d + i] * k[s][kv_head * d + i];
          score /= std::sqrt(double(config_.score_channels > 0 ? config_.score_channels : d));
          const double cap = config_.attention_softcap;
          weights.push_back(std::exp(cap == 0 ? score : cap * std::tanh(score / cap)));
          total += weights.back();
          if (weight_ != nullptr) weights.back() *= weight_(layer, row, head, t, s);
        }
        for (size_t j = 0; j < weights.size(); ++j) {
          for (int64_t i = 0; i < d; ++i) {
            attended[head * d + i] += weights[j] / total * v[first + j][kv_head * d + i];
          }
        }
      }
      const Values out =
          NormAfter(prefix + "attention_out_norm", Project(prefix + "attention.out", attended));
      Accumulate(x[t], Drop(1 + 2 * layer, row, t, out));
      const Values h = NormBefore(prefix + "ffn_norm", x[t]);
      Values up = Project(prefix + (gpt2() ? "ffn.up" : "ffn.gate_up"), h);
      if (gpt2()) {
        for (double& u : up) u = Gelu(u);
      } else {
        const Values gate(up.begin(), up.begin() + config_.ffn);
        up.erase(up.begin(), up.begin() + config_.ffn);
        for (size_t i = 0; i < up.size(); ++i) {
          up[i] *= config_.gate == Gate::kGelu ? Gelu(gate[i]) : gate[i] / (1 + std::exp(-gate[i]));
        }
      }
      const Values down = NormAfter(prefix + "ffn_out_norm", Project(prefix + "ffn.down", up));
      Accumulate(x[t], Drop(2 + 2 * layer, row, t, down));
    }
  }

  const ModelConfig config_;
  const Text& text_;
  const std::function<Values(int64_t)> mask_;
  const WeightFactor weight_;
  const int64_t window_;
  std::map<std::string, Values> parameters_;
};

}  // namespace burst
