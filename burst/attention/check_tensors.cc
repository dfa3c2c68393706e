#include "burst/attention/check_tensors.h"

#include "absl/strings/str_cat.h"

namespace burst {

absl::Status CheckTensor(const char* name, const Tensor& tensor, const Shape& shape, DType dtype,
                         DeviceType device) {
  if (tensor.null()) return absl::InvalidArgumentError(absl::StrCat(name, ": must not be null"));
  if (tensor.shape() == shape && tensor.dtype() == dtype && tensor.device() == device &&
      (tensor.stride(-1) == 1 || tensor.dim(-1) <= 1)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      name, ": must be a ", Name(dtype), " tensor ", ToString(shape), " on ", Name(device),
      " with innermost stride 1; got ", Name(tensor.dtype()), " ", ToString(tensor.shape()), " on ",
      Name(tensor.device()), " with innermost stride ", tensor.stride(-1)));
}

}  // namespace burst
