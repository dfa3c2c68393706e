// Tests functions that take a batch chunk by chunk. Their values and gradients equal those of the
// function on all tokens at once.
#include "burst/autograd/chunks.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "burst/base/philox.h"

namespace burst {
namespace {

constexpr int64_t kBatch = 2, kLength = 6, kWidth = 3;

Tensor Random(const Shape& shape, uint64_t stream) {
  const Tensor tensor = Tensor::Empty(shape, DType::kFloat64);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data<double>()[i] = Philox(3, stream, i)[0] * 0x1p-31 - 1;
  }
  return tensor;
}

// y = x * z, elementwise; dx += dy z, dz += dy x.
Variable Multiply(Tape& tape, const Variable& x, const Variable& z) {
  const auto product = [](const Tensor& a, const Tensor& b) {
    const Tensor c = Tensor::EmptyLike(a);
    for (int64_t i = 0; i < c.numel(); ++i) {
      c.data<double>()[i] = a.data<double>()[i] * b.data<double>()[i];
    }
    return c;
  };
  const Variable y = tape.Output(product(x.value().Contiguous(), z.value().Contiguous()), {x, z});
  if (!tape.NeedsGrad({x, z})) return y;
  tape.Record("multiply", {y}, [=] {
    x.AddGrad(product(y.grad(), z.value().Contiguous()));
    z.AddGrad(product(y.grad(), x.value().Contiguous()));
  });
  return y;
}

// Returns the sum of x's elements.
Variable Total(Tape& tape, const Variable& x) {
  const Tensor sum = Tensor::Zeros({}, DType::kFloat64);
  for (const double value : x.value().ToVector<double>()) sum.data<double>()[0] += value;
  const Variable y = tape.Output(sum, {x});
  if (!tape.NeedsGrad({x})) return y;
  tape.Record("total", {y}, [=] {
    const Tensor dx = Tensor::EmptyLike(x.value());
    dx.Fill(y.grad().data<double>()[0]);
    x.AddGrad(dx);
  });
  return y;
}

// loss = sum of x z x.
struct Results {
  std::vector<double> y, dx, dz;
  double loss = 0;
};

Results WithoutChunks(const Tensor& x_value, const Tensor& z_value) {
  Tape tape;
  const Variable x(x_value, true), z(z_value, true);
  const Variable y = Multiply(tape, Multiply(tape, x, z), x);
  const Variable loss = Total(tape, y);
  EXPECT_EQ(tape.Backward(loss), absl::OkStatus());
  return {y.value().ToVector<double>(), x.grad().ToVector<double>(), z.grad().ToVector<double>(),
          loss.value().data<double>()[0]};
}

Results WithChunks(const Tensor& x_value, const Tensor& z_value, int64_t chunk, int64_t rows,
                   int* done) {
  ChunkOptions options{kBatch, kLength, chunk, rows, [done] { ++*done; }};
  Tape tape;
  const Variable x(x_value, true), z(z_value, true);
  const Variable product =
      InChunks(tape, {x, z}, options, {kWidth}, DType::kFloat64, DeviceType::kCpu,
               [](Tape& tape, const std::vector<Variable>& inputs, const TokenChunk&) {
                 return Multiply(tape, inputs[0], inputs[1]);
               });
  // x is an input of both. The second one's gradient is complete when the first one's backward
  // runs.
  const Variable y =
      InChunks(tape, {product, x}, options, {kWidth}, DType::kFloat64, DeviceType::kCpu,
               [](Tape& tape, const std::vector<Variable>& inputs, const TokenChunk&) {
                 return Multiply(tape, inputs[0], inputs[1]);
               });
  const std::vector<double> value = y.value().ToVector<double>();
  const Variable loss =
      SumOfChunks(tape, {y}, options, DeviceType::kCpu, ExactGrid::For(0x1p-44, 16),
                  [](Tape& tape, const std::vector<Variable>& inputs, const TokenChunk&) {
                    return Total(tape, inputs[0]);
                  });
  EXPECT_EQ(tape.Backward(loss), absl::OkStatus());
  return {value, x.grad().ToVector<double>(), z.grad().ToVector<double>(),
          loss.value().data<double>()[0]};
}

TEST(ChunksTest, AreTheWholeFunction) {
  const Tensor x = Random({kBatch, kLength, kWidth}, 1), z = Random({kBatch, kLength, kWidth}, 2);
  const Results expected = WithoutChunks(x, z);
  // `chunk` tokens of each of `rows` sequences.
  for (const auto& [chunk, rows] :
       {std::pair<int64_t, int64_t>{1, 1}, {2, 1}, {3, 1}, {6, 1}, {6, 2}, {6, 3}}) {
    int done = 0;
    const Results actual = WithChunks(x, z, chunk, rows, &done);
    EXPECT_EQ(actual.y, expected.y) << chunk;
    EXPECT_EQ(actual.dx, expected.dx) << chunk;
    EXPECT_EQ(actual.dz, expected.dz) << chunk;
    // At most 12 chunks are each rounded by half a unit.
    EXPECT_NEAR(actual.loss, expected.loss, 12 * 0x1p-45 + 1e-14) << chunk;
    EXPECT_EQ(done, 3 * (kLength / chunk) * ((kBatch + rows - 1) / rows));
  }
}

TEST(ChunksTest, KnowTheirTokens) {
  const Tensor numbers = Tensor::Empty({kBatch, kLength}, DType::kFloat64);
  for (int64_t i = 0; i < numbers.numel(); ++i) numbers.data<double>()[i] = i;
  std::vector<double> seen;
  Tape tape(/*recording=*/false);
  const Variable y =
      InChunks(tape, {}, {kBatch, kLength, 3, 1, nullptr}, {}, DType::kFloat64, DeviceType::kCpu,
               [&](Tape&, const std::vector<Variable>&, const TokenChunk& chunk) {
                 EXPECT_EQ(chunk.length, 3);
                 const Tensor own = chunk.Of(numbers);
                 EXPECT_EQ(own.shape(), Shape({1, 3}));
                 seen.push_back(own.ToVector<double>()[0]);
                 return Variable(own);
               });
  EXPECT_EQ(seen, std::vector<double>({0, 3, 6, 9}));
  EXPECT_EQ(y.value().ToVector<double>(), numbers.ToVector<double>());
  EXPECT_FALSE(y.requires_grad());
}

// The backward of a rank without tokens runs, because others may wait for it there.
TEST(ChunksTest, OfNoTokensHaveABackward) {
  Tape tape;
  const Variable x(Tensor::Empty({kBatch, 0, kWidth}, DType::kFloat64), true);
  bool ran = false;
  tape.OnBackward([&] { ran = true; });
  const Variable y = tape.Output(x.value(), {x});
  bool reached = false;
  tape.Record("exchange", {y}, [&] { reached = true; });
  const Variable loss =
      SumOfChunks(tape, {y}, {kBatch, 0, 3, 1, nullptr}, DeviceType::kCpu, ExactGrid::For(1, 1),
                  [](Tape& tape, const std::vector<Variable>& in, const TokenChunk&) {
                    return Total(tape, in[0]);
                  });
  EXPECT_EQ(loss.value().data<double>()[0], 0);
  EXPECT_EQ(tape.Backward(loss), absl::OkStatus());
  EXPECT_TRUE(ran && reached);
}

// A value that the second run of a recomputation does not read has no memory, but it has a
// gradient.
TEST(ChunksTest, LeaveOutAResultThatNobodyReads) {
  Tape tape(/*recording=*/true, ResultUse::kUnread);
  const Variable x(Random({kBatch, kLength, kWidth}, 1), true);
  const Variable y = InChunks(
      tape, {x}, {kBatch, kLength, 2, 1, nullptr}, {kWidth}, DType::kFloat64, DeviceType::kCpu,
      [](Tape& tape, const std::vector<Variable>& inputs, const TokenChunk&) {
        EXPECT_EQ(tape.result_use(), ResultUse::kUnread);
        return Multiply(tape, inputs[0], inputs[0]);
      },
      ResultUse::kUnread);
  EXPECT_TRUE(y.value().null());
  const Tensor dy = Random({kBatch, kLength, kWidth}, 5);
  EXPECT_EQ(tape.Backward({y}, {dy}), absl::OkStatus());
  const std::vector<double> dx = x.grad().ToVector<double>(), values = x.value().ToVector<double>(),
                            dys = dy.ToVector<double>();
  for (size_t i = 0; i < dx.size(); ++i) EXPECT_DOUBLE_EQ(dx[i], 2 * values[i] * dys[i]);
}

}  // namespace
}  // namespace burst
