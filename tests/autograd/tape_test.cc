// Tests the tape. ops_test tests the ops' gradients.

#include "burst/autograd/tape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace burst {
namespace {

Tensor Scalar(double value) { return Tensor::FromVector<double>({value}, {1}); }

double Value(const Tensor& tensor) { return tensor.data<double>()[0]; }

// z = x y.
Variable Multiply(Tape& tape, const Variable& x, const Variable& y) {
  const Variable z = tape.Output(Scalar(Value(x.value()) * Value(y.value())), {x, y});
  if (!tape.NeedsGrad({x, y})) return z;
  tape.Record("multiply", {z}, [=] {  // dx += dz y, dy += dz x
    x.AddGrad(Scalar(Value(z.grad()) * Value(y.value())));
    y.AddGrad(Scalar(Value(z.grad()) * Value(x.value())));
  });
  return z;
}

// z = x + y. Both inputs get the very same gradient tensor.
Variable Plus(Tape& tape, const Variable& x, const Variable& y) {
  const Variable z = tape.Output(Scalar(Value(x.value()) + Value(y.value())), {x, y});
  if (!tape.NeedsGrad({x, y})) return z;
  tape.Record("plus", {z}, [=] {
    x.AddGrad(z.grad());
    y.AddGrad(z.grad());
  });
  return z;
}

TEST(TapeTest, ChainRule) {
  Tape tape;
  const Variable x(Scalar(3), true), y(Scalar(5), true);
  const Variable loss = Multiply(tape, Multiply(tape, x, y), x);  // x^2 y
  EXPECT_EQ(Value(loss.value()), 45);
  ASSERT_TRUE(tape.Backward(loss).ok());
  EXPECT_EQ(Value(x.grad()), 30);
  EXPECT_EQ(Value(y.grad()), 9);
  EXPECT_EQ(tape.num_nodes(), 0);
}

TEST(TapeTest, SharedGradientsAreNotOverwritten) {
  // a gets one contribution from Plus (shared with b) and one from Multiply; b must not see it.
  Tape tape;
  const Variable a(Scalar(2), true), b(Scalar(7), true);
  const Variable product = Multiply(tape, a, a);
  const Variable loss = Plus(tape, Plus(tape, a, b), product);  // a + b + a^2
  ASSERT_TRUE(tape.Backward(loss).ok());
  EXPECT_EQ(Value(a.grad()), 5);
  EXPECT_EQ(Value(b.grad()), 1);
  EXPECT_EQ(Value(loss.grad()), 1);
}

TEST(TapeTest, ParametersAccumulateOverTapes) {
  const Tensor grad = Scalar(0);
  const Variable weight(Scalar(4), grad);
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    Tape tape;
    ASSERT_TRUE(tape.Backward(Multiply(tape, weight, Variable(Scalar(2)))).ok());
  }
  EXPECT_EQ(Value(grad), 6);
}

TEST(TapeTest, ZeroGradIsSeenByReadersAndOverwrittenByTheFirstContribution) {
  const Tensor buffer = Tensor::FromVector<double>({7, 7}, {2});
  const Variable parameter(Tensor::FromVector<double>({1, 2}, {2}), buffer);
  parameter.ZeroGrad();
  parameter.AddGrad(Tensor::FromVector<double>({1, 2}, {2}));
  EXPECT_EQ(buffer.ToVector<double>(), (std::vector<double>{1, 2}));
  parameter.ZeroGrad();
  EXPECT_EQ(parameter.grad().ToVector<double>(), (std::vector<double>{0, 0}));

  parameter.MutableGrad().Fill(3);
  bool add = false;
  parameter.GradToWrite(&add);
  EXPECT_TRUE(add);
  parameter.ZeroGrad();
  EXPECT_EQ(parameter.GradToWrite(&add).raw_data(), buffer.raw_data());
  EXPECT_FALSE(add);
  parameter.GradToWrite(&add);
  EXPECT_TRUE(add);
}

TEST(TapeTest, NothingIsRecordedWithoutNeed) {
  Tape recording, inference(false);
  const Variable constant(Scalar(1)), weight(Scalar(2), true);
  EXPECT_FALSE(Multiply(recording, constant, constant).requires_grad());
  EXPECT_FALSE(Multiply(inference, weight, weight).requires_grad());
  EXPECT_EQ(recording.num_nodes() + inference.num_nodes(), 0);
}

TEST(TapeTest, BranchesWithoutGradientAreSkipped) {
  Tape tape;
  const Variable x(Scalar(3), true), y(Scalar(5), true);
  const Variable used = Multiply(tape, x, x);
  Multiply(tape, y, y);  // not part of the loss
  ASSERT_TRUE(tape.Backward(used).ok());
  EXPECT_TRUE(y.grad().null());
}

TEST(TapeTest, GivenOutputGradients) {
  Tape tape;
  const Variable x(Scalar(3), true);
  const Variable a = Multiply(tape, x, x), b = Multiply(tape, a, x);
  ASSERT_TRUE(tape.Backward({a, b}, {Scalar(10), Scalar(100)}).ok());
  EXPECT_EQ(Value(x.grad()), 10 * 2 * 3 + 100 * 3 * 9);
}

TEST(TapeTest, AWatcherSeesValuesThenTheirGradients) {
  Tape tape;
  std::vector<std::string> seen;
  tape.Watch([&](const char* op, const Tensor& tensor) {
    seen.push_back(std::string(op) + " " + std::to_string(tensor.ToVector<double>()[0]));
  });
  const Variable x(Tensor::FromVector<double>({3}, {1}), true);
  const Variable y = Multiply(tape, x, x);
  const Variable z = Plus(tape, y, y);
  ASSERT_TRUE(tape.Backward(z).ok());
  EXPECT_THAT(seen, testing::ElementsAre("multiply 9.000000", "plus 18.000000", "plus 1.000000",
                                         "multiply 2.000000"));
}

// ---- RecomputeInBackward.

// Returns y = w^2 x + x, and counts its runs.
TapeFunction Counted(const Variable& weight, int* runs) {
  return [weight, runs](Tape& tape, const Variable& x) {
    ++*runs;
    return Plus(tape, Multiply(tape, weight, Multiply(tape, weight, x)), x);
  };
}

TEST(RecomputeTest, RunsTwiceAndHasTheGradients) {
  Tape tape;
  const Tensor weight_grad = Scalar(100);  // accumulated into
  const Variable x(Scalar(3), true), weight(Scalar(5), weight_grad);
  int runs = 0;
  const Variable y = RecomputeInBackward(tape, x, Counted(weight, &runs));
  EXPECT_EQ(Value(y.value()), 78);
  EXPECT_EQ(tape.num_nodes(), 1);
  EXPECT_EQ(runs, 1);
  const Variable loss = Plus(tape, Multiply(tape, y, y), x);  // x has users after the function
  ASSERT_TRUE(tape.Backward(loss).ok());
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(Value(x.grad()), 2 * 78 * 26 + 1);
  EXPECT_EQ(Value(weight_grad), 100 + 2 * 78 * (2 * 5 * 3));
}

TEST(RecomputeTest, Nests) {
  Tape tape;
  const Variable x(Scalar(3), true), weight(Scalar(5), true);
  int runs = 0;
  const Variable y = RecomputeInBackward(tape, x, [&](Tape& tape, const Variable& x) {
    const Variable half = RecomputeInBackward(tape, x, Counted(weight, &runs));
    return RecomputeInBackward(tape, half, Counted(weight, &runs));
  });
  ASSERT_TRUE(tape.Backward(y).ok());
  EXPECT_EQ(Value(y.value()), 26 * 26 * 3);
  EXPECT_EQ(Value(x.grad()), 26 * 26);
  EXPECT_EQ(Value(weight.grad()), 2 * 26 * 10 * 3);
  EXPECT_EQ(runs, 6);  // forward, again for the outer node, and for each of the inner ones
}

TEST(RecomputeTest, RunsOnceWhereNoGradientIsWanted) {
  int runs = 0;
  const Variable x(Scalar(3)), weight(Scalar(5), true);
  Tape inference(false);
  EXPECT_EQ(Value(RecomputeInBackward(inference, x, Counted(weight, &runs)).value()), 78);
  Tape tape;
  const Variable constant = RecomputeInBackward(tape, x, Counted(Variable(Scalar(5)), &runs));
  EXPECT_FALSE(constant.requires_grad());
  EXPECT_EQ(runs, 2);
  // The input has no gradient, and the parameters have one.
  ASSERT_TRUE(tape.Backward(RecomputeInBackward(tape, x, Counted(weight, &runs))).ok());
  EXPECT_EQ(Value(weight.grad()), 2 * 5 * 3);
  EXPECT_TRUE(x.grad().null());
}

// A watcher that rounds what it sees changes a recomputation as it does everything else.
TEST(RecomputeTest, AWatcherSeesBothRuns) {
  const auto gradient = [](bool recompute, std::vector<std::string>* seen) {
    Tape tape;
    tape.Watch([seen](const char* op, const Tensor& tensor) {
      seen->push_back(op);
      tensor.data<double>()[0] = static_cast<float>(tensor.data<double>()[0]);
    });
    const Variable x(Scalar(0.1), true);
    const TapeFunction square = [](Tape& tape, const Variable& x) { return Multiply(tape, x, x); };
    const Variable y = recompute ? RecomputeInBackward(tape, x, square) : square(tape, x);
    EXPECT_TRUE(tape.Backward(Multiply(tape, y, y)).ok());
    return Value(x.grad());
  };
  std::vector<std::string> seen, unused;
  EXPECT_EQ(gradient(true, &seen), gradient(false, &unused));
  EXPECT_THAT(seen, testing::ElementsAre("multiply", "recompute", "multiply", "multiply",
                                         "recompute", "multiply", "multiply"));
}

// Returns y = w x + x for each row [1, n, 2], where w is one number. It records the numbers of
// rows.
TapeFunction RowsTimes(const Variable& weight, std::vector<int64_t>* sizes, int* unread) {
  return [=](Tape& tape, const Variable& x) {
    sizes->push_back(x.value().dim(1));
    *unread += tape.result_use() == ResultUse::kUnread;
    const Variable y = tape.Output(x.value().Clone(), {x, weight});
    y.value().Scale(1 + Value(weight.value()));
    if (tape.NeedsGrad({x, weight})) {
      tape.Record("rows_times", {y}, [=] {
        const Tensor dx = y.grad().Clone(), dy = y.grad().Clone();
        dx.Scale(1 + Value(weight.value()));
        x.AddGrad(dx);
        double sum = 0;
        for (int64_t i = 0; i < dy.numel(); ++i)
          sum += dy.data<double>()[i] * x.value().data<double>()[i];
        weight.AddGrad(Scalar(sum));
      });
    }
    return y;
  };
}

TEST(RecomputeTest, ChunksHaveTheGradientsOfTheWhole) {
  const std::vector<double> values = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
                            up = {1, 0, 2, 1, 1, 3, 1, 0, 2, 2};
  for (const int64_t chunk : {1, 2, 3, 5, 7}) {
    for (const ResultUse use : {ResultUse::kRead, ResultUse::kUnread}) {
      const bool unread = use == ResultUse::kUnread;
      Tape tape;
      const Variable x(Tensor::FromVector<double>(values, {1, 5, 2}), true),
          weight(Scalar(3), true);
      std::vector<int64_t> sizes;
      int unread_runs = 0;
      const Variable y =
          RecomputeInChunks(tape, x, chunk, RowsTimes(weight, &sizes, &unread_runs), use);
      const int64_t chunks = (5 + chunk - 1) / chunk;
      EXPECT_EQ(y.value().null(), unread);
      EXPECT_EQ(y.shape(), x.shape());
      ASSERT_EQ(sizes.size(), unread ? 0 : chunks);
      EXPECT_EQ(unread_runs, 0);
      for (int64_t i = 0; !unread && i < 10; ++i)
        EXPECT_EQ(y.value().data<double>()[i], 4 * values[i]);
      EXPECT_EQ(tape.num_nodes(), 1);
      ASSERT_TRUE(tape.Backward({y}, {Tensor::FromVector<double>(up, {1, 5, 2})}).ok());
      EXPECT_EQ(unread_runs, chunks) << "the second runs alone";
      EXPECT_EQ(sizes.back(), 5 - (chunks - 1) * chunk);
      double dweight = 0;
      for (int64_t i = 0; i < 10; ++i) {
        EXPECT_EQ(x.grad().data<double>()[i], 4 * up[i]);
        dweight += up[i] * values[i];
      }
      EXPECT_EQ(Value(weight.grad()), dweight);
    }
  }
}

// y = [w x, 2 w x], where each half has a function.
TEST(RecomputeTest, PartsHaveTheGradientsOfTheWhole) {
  for (const bool known : {false, true}) {
    Tape tape;
    const Variable x(Tensor::FromVector<double>({1, 2, 3}, {3, 1}), true), weight(Scalar(3), true);
    std::vector<int> runs(2);
    std::vector<TapeFunction> parts;
    for (int i = 0; i < 2; ++i) {
      parts.push_back([=, &runs](Tape& tape, const Variable& x) {
        ++runs[i];
        const Variable y = tape.Output(x.value().Clone(), {x, weight});
        y.value().Scale((i + 1) * Value(weight.value()));
        if (!tape.NeedsGrad({x, weight})) return y;
        tape.Record("part", {y}, [=] {
          const Tensor dx = y.grad().Clone();
          double sum = 0;
          for (int64_t row = 0; row < 3; ++row) {
            sum += (i + 1) * dx.data<double>()[row] * x.value().data<double>()[row];
          }
          dx.Scale((i + 1) * Value(weight.value()));
          x.AddGrad(dx);
          weight.AddGrad(Scalar(sum));
        });
        return y;
      });
    }
    const std::vector<double> values = {3, 6, 6, 12, 9, 18}, up = {1, 10, 2, 20, 3, 30};
    const Tensor before = known ? Tensor::FromVector<double>(values, {3, 2}) : Tensor();
    const Variable y = RecomputeInParts(tape, x, parts, /*axis=*/1, {3, 2}, before);
    EXPECT_EQ(y.value().ToVector<double>(), values);
    EXPECT_THAT(runs, testing::Each(known ? 0 : 1));
    EXPECT_EQ(tape.num_nodes(), 1);
    ASSERT_TRUE(tape.Backward({y}, {Tensor::FromVector<double>(up, {3, 2})}).ok());
    EXPECT_THAT(runs, testing::Each(known ? 1 : 2));
    EXPECT_EQ(x.grad().ToVector<double>(), (std::vector<double>{63, 126, 189}));
    EXPECT_EQ(Value(weight.grad()), 1 * 21 + 2 * 42 + 3 * 63);

    Tape inference(/*recording=*/false);
    const Variable z = RecomputeInParts(inference, x, parts, /*axis=*/1, {3, 2});
    EXPECT_EQ(z.value().ToVector<double>(), values);
    EXPECT_FALSE(z.requires_grad());
    EXPECT_EQ(inference.num_nodes(), 0);
  }
}

TEST(RecomputeTest, ChunksOfNothingAndWithoutGradients) {
  std::vector<int64_t> sizes;
  int unread = 0;
  const Variable weight(Scalar(3), true);
  Tape tape;
  const Variable none(Tensor::Zeros({2, 0, 2}, DType::kFloat64), true);
  const Variable y = RecomputeInChunks(tape, none, 4, RowsTimes(weight, &sizes, &unread));
  ASSERT_TRUE(tape.Backward({y}, {Tensor::Zeros({2, 0, 2}, DType::kFloat64)}).ok());
  EXPECT_TRUE(sizes.empty());
  Tape inference(false);
  const Variable x(Tensor::FromVector<double>({1, 2, 3, 4, 5, 6}, {3, 1, 2}));
  const Variable z = RecomputeInChunks(inference, x, 2, RowsTimes(weight, &sizes, &unread));
  EXPECT_EQ(z.value().ToVector<double>(), (std::vector<double>{4, 8, 12, 16, 20, 24}));
  EXPECT_EQ(sizes, (std::vector<int64_t>{2, 1}));
  EXPECT_FALSE(z.requires_grad());
}

TEST(RecomputeTest, FailuresAreTheTapes) {
  for (const int failing_run : {1, 2}) {
    Tape tape;
    int runs = 0;
    const Variable x(Scalar(3), true);
    const Variable y = RecomputeInBackward(tape, x, [&](Tape& tape, const Variable& x) {
      if (++runs == failing_run) tape.Fail(absl::UnavailableError("rank 1 left"));
      return Multiply(tape, x, x);
    });
    EXPECT_EQ(tape.status().ok(), failing_run == 2);
    EXPECT_EQ(tape.Backward(y), absl::UnavailableError("rank 1 left"));
    EXPECT_TRUE(x.grad().null());
  }
}

TEST(TapeTest, FailureStopsTheBackward) {
  Tape tape;
  const Variable x(Scalar(3), true);
  const Variable before = Multiply(tape, x, x);
  const Variable failing = tape.Output(before.value(), {before});
  tape.Record("failing", {failing}, [&] { tape.Fail(absl::UnavailableError("rank 1 left")); });
  const absl::Status status = tape.Backward(failing);
  EXPECT_EQ(status, absl::UnavailableError("rank 1 left"));
  EXPECT_TRUE(x.grad().null());
}

}  // namespace
}  // namespace burst
