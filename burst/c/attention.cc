// Implements the attention functions of burst.h.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/attention/attention_call.h"
#include "burst/attention/strategy.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"
#include "burst/c/objects.h"
#include "burst/device/capture.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace c {
namespace {

absl::StatusOr<std::shared_ptr<Attention>> MakeAttention(std::shared_ptr<Context> context,
                                                         std::shared_ptr<Comm> comm,
                                                         const burst_attention_options& callers) {
  BURST_RETURN_IF_ERROR(CheckNotFinished(comm.get()));
  burst_attention_options given = {};
  BURST_RETURN_IF_ERROR(CopyStruct("burst_attention_options", callers, &given));
  BURST_ASSIGN_OR_RETURN(const Strategy strategy,
                         ForSetting("strategy", ParseStrategy(Or(given.strategy, "burst"))));
  BurstAttentionOptions options;
  BURST_ASSIGN_OR_RETURN(options.layout,
                         ForSetting("layout", ParseLayout(Or(given.layout, "zigzag"))));
  BURST_ASSIGN_OR_RETURN(
      options.backward, ForSetting("backward", ParseBackwardDirection(Or(given.backward, "auto"))));
  BURST_ASSIGN_OR_RETURN(
      options.ring_grad_dtype,
      ForSetting("ring_grad_dtype", ParseRingGradDType(Or(given.ring_grad_dtype, "fp32"))));
  options.softmax_scale = given.softmax_scale;
  options.deterministic = given.deterministic != 0;
  options.ranks_per_node = given.ranks_per_node;
  options.fp8_forward = given.fp8_forward != 0;
  options.scores.softcap = given.softcap;
  options.scores.dropout = given.dropout;
  if (given.alibi_slopes != nullptr) {
    if (given.alibi_heads < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "alibi_heads: must be at least 1 with alibi_slopes; got ", given.alibi_heads));
    }
    options.scores.alibi_slopes.assign(given.alibi_slopes, given.alibi_slopes + given.alibi_heads);
  }
  auto attention = std::make_shared<Attention>(std::move(context));
  attention->comm = std::move(comm);
  std::shared_ptr<AttentionRanks> ranks =
      attention->comm == nullptr ? nullptr : attention->comm->ranks;
  const bool alone = ranks == nullptr;
  if (alone) ranks = std::make_shared<AttentionRanks>(/*comm=*/nullptr);
  const Use use(attention->context.get());
  BURST_ASSIGN_OR_RETURN(
      attention->attention,
      CreateAttentionOver(strategy, options, given.group_size, std::move(ranks)));
  if (!alone) {
    auto& made = attention->comm->attentions;
    made.erase(std::remove_if(made.begin(), made.end(), [](const auto& a) { return a.expired(); }),
               made.end());
    made.push_back(attention);
  }
  return attention;
}

// Returns a view of the caller's tensor. Unused strides, of dimensions of one or of an empty
// tensor, become those of a contiguous tensor.
absl::StatusOr<Tensor> View(const char* name, const burst_tensor& tensor, int dims,
                            DeviceType device) {
  if (tensor.dims != dims) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": must have ", dims, " dimensions; got ", tensor.dims));
  }
  const Shape shape(tensor.shape, tensor.shape + dims);
  Shape strides(tensor.strides, tensor.strides + dims);
  DType dtype;
  switch (tensor.dtype) {
    case BURST_FLOAT32:
      dtype = DType::kFloat32;
      break;
    case BURST_FLOAT64:
      dtype = DType::kFloat64;
      break;
    case BURST_BFLOAT16:
      dtype = DType::kBFloat16;
      break;
    case BURST_FLOAT16:
      dtype = DType::kFloat16;
      break;
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          name, ": must have a dtype of burst_dtype; got ", static_cast<int>(tensor.dtype)));
  }
  int64_t elements = 1;
  for (int i = 0; i < dims; ++i) {
    if (shape[i] < 0 || strides[i] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": must not have a negative size or stride; got shape ",
                       ToString(shape), " and strides ", ToString(strides)));
    }
    elements *= shape[i];
  }
  for (int i = dims - 1; i >= 0; --i) {
    if (elements == 0 || shape[i] == 1) {
      strides[i] = i == dims - 1 ? 1 : strides[i + 1] * shape[i + 1];
    }
  }
  if (elements > 0 && tensor.data == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": must have data; got a null pointer"));
  }
  return Tensor::Borrow(tensor.data, shape, strides, dtype, device);
}

// Runs call() -> absl::Status, a collective. Once something was sent, the other ranks cannot go on
// without this one. So they get its error.
template <typename Call>
absl::Status Collective(const Attention& attention, Call&& call) {
  Communicator* const ranks =
      attention.comm == nullptr ? nullptr : attention.comm->communicator.get();
  if (ranks == nullptr) return call();
  const int64_t before =
      attention.attention->bytes_sent().forward + attention.attention->bytes_sent().backward;
  const auto has_sent = [&] {
    return attention.attention->bytes_sent().forward + attention.attention->bytes_sent().backward !=
           before;
  };
  try {
    const absl::Status status = call();
    if (!status.ok() && (has_sent() || !absl::IsInvalidArgument(status))) ranks->Abort(status);
    return status;
  } catch (const std::exception& error) {
    AbortFor(error, ranks);
    throw;
  }
}

// Converts a call's arguments to what the library takes. It keeps the first error.
class Arguments {
 public:
  explicit Arguments(DeviceType device) : device_(device) {}

  AttentionCall Call(const burst_call& callers) {
    const burst_call given = Copy("burst_call", callers);
    AttentionCall call;
    if (!status.ok()) return call;
    call.schedule = given.schedule->value->schedule.get();
    call.q = View("q", given.q, 4);
    call.k = View("k", given.k, 4);
    call.v = View("v", given.v, 4);
    call.sinks = ViewIfGiven("sinks", given.sinks, 1);
    call.dropout = {given.dropout_seed};
    call.wants_max_logits = given.wants_max_logits != 0;
    return call;
  }
  AttentionResult Result(const burst_result& callers, bool with_max_logits) {
    const burst_result given = Copy("burst_result", callers);
    AttentionResult result = {View("out", given.out, 4), View("lse", given.lse, 3), {}};
    if (with_max_logits) {
      result.max_logits = View("max_logits", given.max_logits, 2, DeviceType::kCpu);
    }
    return result;
  }
  // *dsinks becomes null if the caller does not want it.
  AttentionGradients Gradients(const burst_gradients& callers, Tensor* dsinks) {
    const burst_gradients given = Copy("burst_gradients", callers);
    *dsinks = ViewIfGiven("dsinks", given.dsinks, 1);
    return {View("dout", given.dout, 4), ViewIfGiven("dlse", given.dlse, 3),
            View("dq", given.dq, 4), View("dk", given.dk, 4), View("dv", given.dv, 4)};
  }
  absl::Status status;

 private:
  template <typename Struct>
  Struct Copy(const char* name, const Struct& callers) {
    Struct copy = {};
    status.Update(CopyStruct(name, callers, &copy));
    return copy;
  }
  Tensor View(const char* name, const burst_tensor& tensor, int dims) {
    return View(name, tensor, dims, device_);
  }
  Tensor View(const char* name, const burst_tensor& tensor, int dims, DeviceType device) {
    absl::StatusOr<Tensor> view = c::View(name, tensor, dims, device);
    status.Update(view.status());
    return view.ok() ? *std::move(view) : Tensor();
  }
  Tensor ViewIfGiven(const char* name, const burst_tensor& tensor, int dims) {
    return tensor.dims == 0 ? Tensor() : View(name, tensor, dims);
  }

  const DeviceType device_;
};

bool IsCaptured(Context& context) {
  if (context.gpu == nullptr) return false;
  const Use use(&context);
  return IsCurrentStreamCaptured();
}

}  // namespace
}  // namespace c
}  // namespace burst

using burst::Tensor;
using burst::c::Guard;
using burst::c::Use;

extern "C" {

burst_code burst_attention_create(burst_context* context, burst_comm* comm,
                                  const burst_attention_options* options,
                                  burst_attention** attention) {
  return Guard([&]() -> absl::Status {
    if (comm != nullptr && comm->value->context != context->value) {
      return absl::InvalidArgumentError("comm: must be made with the same context");
    }
    BURST_ASSIGN_OR_RETURN(
        auto made,
        burst::c::MakeAttention(context->value, comm == nullptr ? nullptr : comm->value, *options));
    *attention = new burst_attention{std::move(made)};
    return absl::OkStatus();
  });
}

void burst_attention_destroy(burst_attention* attention) {
  (void)Guard([&] {
    delete attention;
    return absl::OkStatus();
  });
}

burst_code burst_check(burst_attention* attention, const burst_call* call) {
  return Guard([&]() -> absl::Status {
    burst::c::Attention& own = *attention->value;
    BURST_RETURN_IF_ERROR(burst::c::CheckNotFinished(own.comm.get()));
    burst::c::Arguments arguments(own.context->device);
    const burst::AttentionCall given = arguments.Call(*call);
    BURST_RETURN_IF_ERROR(arguments.status);
    const Use use(own.context.get());
    return own.attention->Check(given);
  });
}

burst_code burst_forward(burst_attention* attention, const burst_call* call,
                         const burst_result* result) {
  return Guard([&]() -> absl::Status {
    burst::c::Attention& own = *attention->value;
    BURST_RETURN_IF_ERROR(burst::c::CheckNotFinished(own.comm.get()));
    burst::c::Arguments arguments(own.context->device);
    const burst::AttentionCall given = arguments.Call(*call);
    const burst::AttentionResult to = arguments.Result(*result, given.wants_max_logits);
    BURST_RETURN_IF_ERROR(arguments.status);
    if (burst::c::IsCaptured(*own.context)) return burst::c::Captured();
    Use use(own.context.get(), /*queues=*/true);
    BURST_RETURN_IF_ERROR(burst::c::Collective(own, [&] {
      burst::AttentionResult all = to;  // what else it has is freed while the context is in use
      return own.attention->Forward(given, &all);
    }));
    use.End();
    return absl::OkStatus();
  });
}

burst_code burst_backward(burst_attention* attention, const burst_call* call,
                          const burst_result* result, const burst_gradients* gradients) {
  return Guard([&]() -> absl::Status {
    burst::c::Attention& own = *attention->value;
    BURST_RETURN_IF_ERROR(burst::c::CheckNotFinished(own.comm.get()));
    burst::c::Arguments arguments(own.context->device);
    const burst::AttentionCall given = arguments.Call(*call);
    const burst::AttentionResult from = arguments.Result(*result, /*with_max_logits=*/false);
    Tensor dsinks;
    const burst::AttentionGradients to = arguments.Gradients(*gradients, &dsinks);
    BURST_RETURN_IF_ERROR(arguments.status);
    if (!dsinks.null() && dsinks.shape() != given.sinks.shape()) {
      return absl::InvalidArgumentError("dsinks: must be like sinks");
    }
    if (burst::c::IsCaptured(*own.context)) return burst::c::Captured();
    Use use(own.context.get(), /*queues=*/true);
    BURST_RETURN_IF_ERROR(burst::c::Collective(own, [&]() -> absl::Status {
      burst::AttentionGradients all = to;
      BURST_RETURN_IF_ERROR(own.attention->Backward(given, from, &all));
      if (!dsinks.null()) dsinks.CopyFrom(all.dsinks.View({-1}));
      return absl::OkStatus();
    }));
    use.End();
    return absl::OkStatus();
  });
}

}  // extern "C"
