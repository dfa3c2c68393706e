#include "burst/base/check.h"
#include "model/ops/ops.h"

namespace burst {

Variable SelectRows(Tape& tape, const Variable& x, const std::vector<RowRange>& ranges) {
  BURST_CHECK(x.value().is_contiguous());
  Shape shape = x.shape();
  shape[0] = 0;
  for (const RowRange& range : ranges) shape[0] += range.length;
  const Tensor value = Tensor::Empty(shape, x.value().dtype(), x.value().device());
  // Calls visit(range of x, the same range of y).
  const auto for_each_range = [ranges](const Tensor& all, const Tensor& selected,
                                       const auto& visit) {
    int64_t at = 0;
    for (const RowRange& range : ranges) {
      visit(all.Slice(0, range.begin, range.length), selected.Slice(0, at, range.length));
      at += range.length;
    }
  };
  for_each_range(x.value(), value, [](const Tensor& from, const Tensor& to) { to.CopyFrom(from); });
  if (!tape.NeedsGrad({x})) return Variable(value);

  // GEMMs accumulate into the gradient of y, as into a parameter's gradient.
  const Variable y(value, Tensor::Empty(shape, SumDType(value.dtype()), value.device()));
  y.ZeroGrad();
  tape.Record("select_rows", {y}, [=] {
    const Tensor& dx = x.MutableGrad();
    BURST_CHECK(dx.dtype() == y.grad().dtype()) << "not a parameter";
    for_each_range(dx, y.grad(), [](const Tensor& to, const Tensor& from) { to.Add(from); });
  });
  return y;
}

}  // namespace burst
