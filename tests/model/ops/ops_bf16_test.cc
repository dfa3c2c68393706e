// Tests the memory-bound ops in bfloat16, compared with the CPU in double. Every run gives the same
// bits.
//
// bfloat16 keeps 8 bits, so rounding to it has a relative error of at most u = 2^-8. The ops
// compute in float from bfloat16 inputs and round once. So their results lie within u |y|, plus
// float's own error, of the exact ones. So do the gradients of activations. A gradient that is
// added to another one is also rounded once. Gradients of parameters are summed in float and not
// rounded to bfloat16.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/base/philox.h"
#include "burst/tensor/tensor.h"
#include "model/ops/ops.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

using Values = std::vector<double>;

constexpr double kRounding = 0x1p-8;

// An input of an op and whether it is a parameter, whose gradient is summed in float.
struct Input {
  Shape shape;
  bool parameter = false;
  double scale = 1;
};

// Makes y from the inputs, which are on `device`.
using Op = std::function<Variable(Tape&, const std::vector<Variable>&, DeviceType device)>;

struct Case {
  std::string name;
  std::vector<Input> inputs;
  Op op;
  // The terms in the longest sum of floats. Each may round once.
  double terms = 1;
  // The backward adds to the gradient that the input has already.
  bool in_passing = false;
};

struct Results {
  std::vector<Values> arrays;  // y, then the gradients of the inputs
};

// Computes y and gradients in `dtype`, from inputs that bfloat16 can represent.
Results Evaluate(const Case& c, DType dtype, DeviceType device) {
  std::vector<Variable> inputs;
  std::vector<Tensor> before;
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const Input& input = c.inputs[i];
    const auto on_device = [&](const Tensor& values, DType type) {
      return values.To(DType::kBFloat16).To(type).To(device);
    };
    const Tensor value = on_device(RandomTensor(input.shape, 10 + i, input.scale), dtype);
    const Tensor grad = RandomTensor(input.shape, 20 + i);
    if (input.parameter) {
      const DType sums = dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
      inputs.push_back(Variable(value, on_device(grad, sums)));
    } else {
      inputs.push_back(Variable(value, /*requires_grad=*/true));
      if (c.in_passing) inputs.back().AddGrad(on_device(grad, dtype));
    }
  }
  Tape tape;
  const Variable y = c.op(tape, inputs, device);
  const Tensor dy = RandomTensor(y.shape(), 30).To(DType::kBFloat16).To(dtype).To(device);
  EXPECT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy}).ok());
  Results results;
  results.arrays.push_back(y.value().ToVector<double>());
  for (const Variable& input : inputs) results.arrays.push_back(input.grad().ToVector<double>());
  return results;
}

Tensor Ids(int64_t n, int64_t below, const Shape& shape, DeviceType device) {
  std::vector<int32_t> ids(n);
  // One id has a third of the tokens.
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t r = Philox(7, 8, i)[0];
    ids[i] = static_cast<int32_t>(r % 3 == 0 ? 5 : r / 3 % below);
  }
  return Tensor::FromVector(ids, shape, device);
}

// Returns every op at widths that take each path. The paths are vectors by one and by several
// warps, two vectors a thread, rows too wide for registers, and rows that do not fit vectors.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int64_t width : {int64_t{40}, int64_t{768}, int64_t{2048}, int64_t{4096},
                              int64_t{16384}, int64_t{100}, int64_t{1021}}) {
    const int64_t rows = width < 1000 ? 700 : 150;
    const Input x = {{rows, width}}, parameter = {{width}, true};
    const double terms = static_cast<double>(std::max(rows, width));
    const std::string suffix = "/" + std::to_string(width);
    cases.push_back({"rmsnorm" + suffix,
                     {x, parameter},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return RmsNorm(tape, in[0], in[1], 1e-5);
                     },
                     terms,
                     true});
    cases.push_back({"rmsnorm_of_offset_weight" + suffix,
                     {x, parameter},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return RmsNorm(tape, in[0], in[1], 1e-5, LinearPrecision::kTensors, 1);
                     },
                     terms,
                     true});
    cases.push_back({"layernorm" + suffix,
                     {x, parameter, parameter},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return LayerNorm(tape, in[0], in[1], in[2], 1e-5);
                     },
                     terms,
                     true});
  }
  for (const int64_t width : {37, 64, 1000}) {
    const std::string suffix = "/" + std::to_string(width);
    cases.push_back({"gelu" + suffix,
                     {{{33, width}, false, 2}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return Gelu(tape, in[0]);
                     }});
    cases.push_back({"swiglu" + suffix,
                     {{{33, 2 * width}, false, 2}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return SwiGlu(tape, in[0]);
                     }});
    cases.push_back({"geglu" + suffix,
                     {{{33, 2 * width}, false, 2}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return GeGlu(tape, in[0]);
                     }});
    cases.push_back({"scale" + suffix,
                     {{{33, width}}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return Scale(tape, in[0], 5.5);
                     }});
    cases.push_back({"add" + suffix,
                     {{{33, width}}, {{33, width}}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return Add(tape, in[0], in[1]);
                     }});
    cases.push_back({"dropout" + suffix,
                     {{{2, 30, width}}, {{2, 30, width}}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType device) {
                       DropoutSite site;
                       site.rate = 0.25;
                       site.key = {3, 4, true};
                       site.site = 5;
                       site.positions = Ids(30, 1 << 20, {30}, device);
                       return Dropout(tape, in[0], site, in[1]);
                     }});
    cases.push_back({"embedding" + suffix,
                     {{{50, width}, true}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType device) {
                       return Embedding(tape, Ids(2000, 50, {2, 1000}, device), in[0]);
                     },
                     2000});
    cases.push_back({"embedding_positions" + suffix,
                     {{{50, width}, true}, {{30, width}, true}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType device) {
                       return Embedding(tape, Ids(2000, 50, {2, 1000}, device), in[0],
                                        Ids(2000, 30, {2, 1000}, device), in[1]);
                     },
                     2000});
  }
  for (const auto& [head_dim, channels] :
       {std::pair(64, 64), std::pair(128, 128), std::pair(12, 12), std::pair(128, 96),
        std::pair(64, 24), std::pair(12, 8)}) {
    cases.push_back(
        {"rope/" + std::to_string(head_dim) + "/" + std::to_string(channels),
         {{{2, 21, 7, head_dim}}},
         [channels = channels](Tape& tape, const std::vector<Variable>& in, DeviceType device) {
           const auto table = MakeRopeTable(Ids(42, 5000, {2, 21}, device),
                                            MakeRopeAngles(channels, 1e4), in[0].value().dtype());
           return Rope(tape, in[0], table, 5);
         }});
  }
  for (const int64_t head_dim : {64, 128, 12}) {
    cases.push_back({"rmsnorm_heads/" + std::to_string(head_dim),
                     {{{2, 21, 7, head_dim}}, {{head_dim}, true}, {{head_dim}, true}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       return RmsNormHeads(tape, in[0], {in[1], 4}, {in[2], 2}, 1e-5);
                     },
                     static_cast<double>(std::max<int64_t>(2 * 21 * 4, head_dim))});
    // Two ranks have the same heads.
    cases.push_back({"rmsnorm_heads_of_ranks/" + std::to_string(head_dim),
                     {{{2, 21, 7, head_dim}}, {{4 * head_dim}, true}, {{2 * head_dim}, true}},
                     [](Tape& tape, const std::vector<Variable>& in, DeviceType) {
                       const HeadRanks ranks = {2, [](const Tensor& sums) { sums.Scale(2); }};
                       return RmsNormHeads(tape, in[0], {in[1], 4}, {in[2], 2}, 1e-5, 0, ranks);
                     },
                     static_cast<double>(4 * head_dim)});
  }
  return cases;
}

class OpsInBFloat16 : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Ops, OpsInBFloat16, testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name = info.param.name;
  for (char& c : name) c = c == '/' ? '_' : c;
  return name;
});

// |actual - expected| <= relative |expected| + absolute max |expected|, elementwise.
void ExpectWithin(const Results& actual, const Results& expected, const Case& c,
                  const std::function<double(size_t array)>& relative, double absolute) {
  ASSERT_EQ(actual.arrays.size(), expected.arrays.size());
  for (size_t array = 0; array < expected.arrays.size(); ++array) {
    const Values &a = actual.arrays[array], &e = expected.arrays[array];
    ASSERT_EQ(a.size(), e.size());
    double largest = 0;
    for (double value : e) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < e.size(); ++i) {
      ASSERT_NEAR(a[i], e[i], relative(array) * std::abs(e[i]) + absolute * largest)
          << c.name << (array == 0 ? " output" : " gradient ") << array << " element " << i;
    }
  }
}

// Returns float's roundings in sums of up to `terms` terms of about the largest element's size, in
// any order. The kernels for bfloat16 use exponentials with an error of 2^-21.
double FloatError(const Case& c) { return 0x1p-21 * (8 + std::sqrt(c.terms)); }

TEST_P(OpsInBFloat16, BFloat16IsRoundedOnce) {
  const Case& c = GetParam();
  const auto relative = [&](size_t array) {
    const bool parameter = array > 0 && c.inputs[array - 1].parameter;
    return parameter ? 0 : kRounding * (1 + 1e-3);
  };
  Results actual = Evaluate(c, DType::kBFloat16, kTestDevice);
  ExpectWithin(actual, Evaluate(c, DType::kFloat64, DeviceType::kCpu), c, relative, FloatError(c));
}

#ifdef BURST_TEST_CUDA
TEST_P(OpsInBFloat16, FloatAgreesWithTheCpu) {
  const Case& c = GetParam();
  ExpectWithin(
      Evaluate(c, DType::kFloat32, kTestDevice), Evaluate(c, DType::kFloat32, DeviceType::kCpu), c,
      [](size_t) { return 0; }, FloatError(c));
}
#endif

TEST_P(OpsInBFloat16, SameBitsInEveryRun) {
  const Results first = Evaluate(GetParam(), DType::kBFloat16, kTestDevice);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Evaluate(GetParam(), DType::kBFloat16, kTestDevice).arrays, first.arrays);
  }
}

// Gradients that are not asked for are not computed, and a tensor without rows is served.
TEST(OpsInBFloat16Edges, NoRows) {
  const auto empty = [](const Shape& shape) {
    return Variable(Tensor::Empty(shape, DType::kBFloat16, kTestDevice), true);
  };
  const Variable weight(RandomTensor({16}, 1).To(DType::kBFloat16).To(kTestDevice),
                        Tensor::Zeros({16}, DType::kFloat32, kTestDevice));
  Tape tape;
  const Variable x = empty({1, 0, 16});
  DropoutSite site;
  site.rate = 0.5;
  site.key.enabled = true;
  site.positions = Tensor::Empty({0}, DType::kInt32, kTestDevice);
  const auto table = MakeRopeTable(Tensor::Empty({1, 0}, DType::kInt32, kTestDevice),
                                   MakeRopeAngles(16, 1e4), DType::kBFloat16);
  const std::vector<Variable> outputs = {RmsNorm(tape, x, weight, 1e-5),
                                         LayerNorm(tape, x, weight, weight, 1e-5),
                                         Gelu(tape, x),
                                         SwiGlu(tape, x),
                                         GeGlu(tape, x),
                                         Scale(tape, x, 2),
                                         Add(tape, x, x),
                                         Dropout(tape, x, site, x),
                                         Rope(tape, empty({1, 0, 2, 16}), table)};
  std::vector<Tensor> grads;
  for (const Variable& y : outputs) grads.push_back(Tensor::EmptyLike(y.value()));
  ASSERT_TRUE(tape.Backward(outputs, grads).ok());
  EXPECT_EQ(weight.grad().ToVector<float>(), std::vector<float>(16, 0));
}

// The masks equal the CPU's, bit for bit, for every width and dtype.
TEST(OpsInBFloat16Edges, DropoutMasksAreThoseOfTheCpu) {
  for (const int64_t width : {1, 7, 64, 72, 500, 768}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      const auto kept = [&](DeviceType device) {
        DropoutSite site;
        site.rate = 0.1;
        site.key = {uint64_t{1} << 63 | 12345, 77, true};
        site.site = 3;
        site.positions = Tensor::FromVector<int32_t>({5, 0, 2147483647, 100000, 6}, {5}, device);
        const DType on_device = device == DeviceType::kCpu ? DType::kFloat64 : dtype;
        const Tensor ones = Tensor::Empty({3, 5, width}, on_device, device);
        ones.Fill(1);
        Tape tape(/*recording=*/false);
        std::vector<bool> result;
        for (double y : Dropout(tape, Variable(ones), site).value().ToVector<double>()) {
          result.push_back(y != 0);
        }
        return result;
      };
      EXPECT_EQ(kept(kTestDevice), kept(DeviceType::kCpu)) << width << " " << Name(dtype);
    }
  }
}

// Parameters are views into flat buffers, so rows may begin anywhere.
TEST(OpsInBFloat16Edges, ParametersAtAnyAddress) {
  const int64_t width = 768, rows = 64;
  const Tensor flat = RandomTensor({width + 1}, 1).To(DType::kBFloat16).To(kTestDevice);
  const Tensor flat_grad = Tensor::Zeros({width + 1}, DType::kFloat32, kTestDevice);
  const Tensor x = RandomTensor({rows, width}, 2).To(DType::kBFloat16).To(kTestDevice);
  const Tensor dy = RandomTensor({rows, width}, 3).To(DType::kBFloat16).To(kTestDevice);
  const Tensor weight = flat.Slice(0, 1, width), dweight = flat_grad.Slice(0, 1, width);
  std::vector<std::vector<float>> results;
  for (const bool aligned : {false, true}) {
    const Variable w =
        aligned ? Variable(weight.Clone(), Tensor::ZerosLike(dweight)) : Variable(weight, dweight);
    Tape tape;
    const Variable y = RmsNorm(tape, Variable(x), w, 1e-5);
    ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy}).ok());
    results.push_back(y.value().ToVector<float>());
    const std::vector<float> grad = w.grad().ToVector<float>();
    results.back().insert(results.back().end(), grad.begin(), grad.end());
  }
  // The sums have another order. So the statistic may differ in its last bits, and a result between
  // two numbers may round the other way.
  for (size_t i = 0; i < results[0].size(); ++i) {
    ASSERT_NEAR(results[0][i], results[1][i], 2 * kRounding * std::abs(results[1][i]) + 1e-4);
  }
  EXPECT_EQ(flat_grad.ToVector<float>()[0], 0);
}

}  // namespace
}  // namespace burst
