// Implements the attention functions of burst.h.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/attention/check_tensors.h"
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
  if (IsTensorParallel(strategy)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "strategy: ", Name(strategy), " is a matter of a model's layers, not of attention"));
  }
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
  options.scores.max_logits = given.max_logits != 0;
  if (given.alibi_slopes != nullptr) {
    if (given.alibi_heads < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("alibi_heads: ", given.alibi_heads, " is no number of slopes"));
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
absl::StatusOr<Tensor> View(const char* name, const burst_tensor* tensor, int dims,
                            DeviceType device) {
  if (tensor == nullptr) return absl::InvalidArgumentError(absl::StrCat(name, " is null"));
  if (tensor->dims != dims) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has ", tensor->dims, " dimensions, expected ", dims));
  }
  const Shape shape(tensor->shape, tensor->shape + dims);
  Shape strides(tensor->strides, tensor->strides + dims);
  DType dtype;
  switch (tensor->dtype) {
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
      return absl::InvalidArgumentError(absl::StrCat(name, " has the dtype ",
                                                     static_cast<int>(tensor->dtype),
                                                     ", which is none of burst_dtype"));
  }
  int64_t elements = 1;
  for (int i = 0; i < dims; ++i) {
    if (shape[i] < 0 || strides[i] < 0) {
      return absl::InvalidArgumentError(absl::StrCat(name, " has shape ", ToString(shape),
                                                     " and strides ", ToString(strides),
                                                     ": none may be negative"));
    }
    elements *= shape[i];
  }
  for (int i = dims - 1; i >= 0; --i) {
    if (elements == 0 || shape[i] == 1) {
      strides[i] = i == dims - 1 ? 1 : strides[i + 1] * shape[i + 1];
    }
  }
  if (elements > 0 && tensor->data == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(name, " has no data"));
  }
  return Tensor::Borrow(tensor->data, shape, strides, dtype, device);
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

// Named views of a call's arguments. It keeps the first error.
class Views {
 public:
  explicit Views(DeviceType device) : device_(device) {}
  Tensor operator()(const char* name, const burst_tensor* tensor, int dims) {
    absl::StatusOr<Tensor> view = View(name, tensor, dims, device_);
    status.Update(view.status());
    return view.ok() ? *std::move(view) : Tensor();
  }
  absl::Status status;

 private:
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
      return absl::InvalidArgumentError("comm: made with another context");
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

burst_code burst_attention_set_dropout_seed(burst_attention* attention, uint64_t seed) {
  return Guard([&] {
    attention->value->attention->SetDropoutSeed(seed);
    return absl::OkStatus();
  });
}

burst_code burst_forward(burst_attention* attention, const burst_schedule* schedule,
                         const burst_tensor* q, const burst_tensor* k, const burst_tensor* v,
                         const burst_tensor* out, const burst_tensor* lse) {
  return Guard([&]() -> absl::Status {
    BURST_RETURN_IF_ERROR(burst::c::CheckNotFinished(attention->value->comm.get()));
    const burst::AttentionSchedule& tokens = *schedule->value->schedule;
    burst::c::Views view(attention->value->context->device);
    const Tensor queries = view("q", q, 4), keys = view("k", k, 4), values = view("v", v, 4);
    Tensor result = view("out", out, 4), sums = view("lse", lse, 3);
    BURST_RETURN_IF_ERROR(view.status);
    if (burst::c::IsCaptured(*attention->value->context)) return burst::c::Captured();
    Use use(attention->value->context.get(), /*queues=*/true);
    BURST_RETURN_IF_ERROR(burst::c::Collective(*attention->value, [&] {
      return attention->value->attention->Forward(tokens, queries, keys, values, &result, &sums,
                                                  /*saved=*/nullptr);
    }));
    use.End();
    return absl::OkStatus();
  });
}

burst_code burst_max_logits(const burst_attention* attention, const burst_tensor* max_logits) {
  return Guard([&]() -> absl::Status {
    const Tensor& given = attention->value->attention->max_logits();
    if (given.null()) {
      return absl::InvalidArgumentError(
          "max_logits: no burst_forward of an attention whose options ask for it");
    }
    burst::c::Views view(given.device());
    const Tensor result = view("max_logits", max_logits, 2);
    BURST_RETURN_IF_ERROR(view.status);
    BURST_RETURN_IF_ERROR(
        burst::CheckTensor("max_logits", result, given.shape(), given.dtype(), given.device()));
    result.CopyFrom(given);
    return absl::OkStatus();
  });
}

burst_code burst_backward(burst_attention* attention, const burst_schedule* schedule,
                          const burst_tensor* q, const burst_tensor* k, const burst_tensor* v,
                          const burst_tensor* out, const burst_tensor* lse,
                          const burst_tensor* dout, const burst_tensor* dlse,
                          const burst_tensor* dq, const burst_tensor* dk, const burst_tensor* dv) {
  return Guard([&]() -> absl::Status {
    BURST_RETURN_IF_ERROR(burst::c::CheckNotFinished(attention->value->comm.get()));
    const burst::AttentionSchedule& tokens = *schedule->value->schedule;
    burst::c::Views view(attention->value->context->device);
    const Tensor queries = view("q", q, 4), keys = view("k", k, 4), values = view("v", v, 4);
    const Tensor result = view("out", out, 4), sums = view("lse", lse, 3);
    const Tensor dresult = view("dout", dout, 4);
    const Tensor dsums = dlse == nullptr ? Tensor() : view("dlse", dlse, 3);
    Tensor dqueries = view("dq", dq, 4), dkeys = view("dk", dk, 4), dvalues = view("dv", dv, 4);
    BURST_RETURN_IF_ERROR(view.status);
    if (burst::c::IsCaptured(*attention->value->context)) return burst::c::Captured();
    Use use(attention->value->context.get(), /*queues=*/true);
    BURST_RETURN_IF_ERROR(burst::c::Collective(*attention->value, [&]() -> absl::Status {
      burst::SequenceParallelAttention::Saved saved;
      BURST_RETURN_IF_ERROR(attention->value->attention->Rebuild(tokens, queries, keys, values,
                                                                 result, sums, &saved));
      saved.dout = dresult;
      saved.dlse = dsums;
      return attention->value->attention->Backward(tokens, saved, &dqueries, &dkeys, &dvalues);
    }));
    use.End();
    return absl::OkStatus();
  });
}

}  // extern "C"
