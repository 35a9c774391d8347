// The op on a CPU: tensors become a call of the kernel. Registered with torch's dispatcher, so that a call needs no
// Python, and compiled against torch's stable interface, which is small and stays what it is.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <optional>
#include <string>

#include "call.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

std::atomic<const Kernel*> bfloat16_kernel, float_kernel;  // by what activations are multiplied as

// Where a name stands among those that an enumeration has, in its order.
template <typename Enumeration, size_t n>
Enumeration named(const char* const (&names)[n], const std::string& name) {
  for (size_t i = 0; i < n; ++i)
    if (name == names[i]) return static_cast<Enumeration>(i);
  STD_TORCH_CHECK(false, "fp4_inductor::moe_cpu knows no ", name);
}

Tensor contiguous_as(const Tensor& given, ScalarType dtype) {
  const Tensor found = given.scalar_type() == dtype ? given : torch::stable::to(given, dtype);
  return found.is_contiguous() ? found : torch::stable::contiguous(found);
}

float value(const MaybeTensor& given, double literal) {
  if (!given) return static_cast<float>(literal);
  const Tensor found = contiguous_as(*given, ScalarType::Double);
  return static_cast<float>(*static_cast<const double*>(found.const_data_ptr()));
}

// ``torch::stable::empty`` goes through the dispatcher, which after a layer that went through the caches takes 20 us.
template <size_t n>
Tensor empty(const int64_t (&sizes)[n], int32_t dtype) {
  int64_t strides[n];
  for (int64_t i = n - 1, stride = 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(n, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

Weight weight(const Tensor& codes, const Tensor& scales, const MaybeTensor& factors, const MaybeTensor& bias) {
  auto bytes = [](const Tensor& tensor) { return static_cast<const uint8_t*>(tensor.const_data_ptr()); };
  auto floats = [](const MaybeTensor& tensor) {
    return tensor ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
  };
  return {bytes(codes), bytes(scales), floats(factors), floats(bias)};
}

// Shapes and dtypes as in ``Call`` and ``Weight``; hidden may be float16, too, ids any integers, weights any floats.
Tensor moe(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, MaybeTensor w13_global,
           MaybeTensor w13_bias, Tensor w2, Tensor w2_scale, MaybeTensor w2_global, MaybeTensor w2_bias,
           MaybeTensor alpha_input, MaybeTensor beta_input, MaybeTensor limit_input, MaybeTensor up_limit_input,
           std::string activation, bool gated, double alpha, double beta, std::optional<double> limit,
           std::optional<double> up_limit, std::string bound, std::string /*w13_order*/, std::string /*weight_format*/,
           int64_t /*block_size*/, std::string scale_encoding, std::string /*table*/, ScalarType out_dtype) {
  const bool in_bfloat16 = hidden.scalar_type() == ScalarType::BFloat16;
  const bool out_bfloat16 = out_dtype == ScalarType::BFloat16;
  const Tensor given = contiguous_as(hidden, in_bfloat16 ? ScalarType::BFloat16 : ScalarType::Float);
  const Tensor ids = contiguous_as(topk_ids, ScalarType::Long);
  const Tensor weights = contiguous_as(topk_weights, ScalarType::Float);
  const int64_t num_tokens = hidden.size(0), hidden_size = hidden.size(1);
  const int32_t made_dtype = out_bfloat16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
  const Tensor out = empty({num_tokens, hidden_size}, made_dtype);

  Call call{};
  call.w13 = weight(w13, w13_scale, w13_global, w13_bias);
  call.w2 = weight(w2, w2_scale, w2_global, w2_bias);
  call.hidden = given.const_data_ptr();
  call.ids = static_cast<const int64_t*>(ids.const_data_ptr());
  call.weights = static_cast<const float*>(weights.const_data_ptr());
  call.out = out.mutable_data_ptr();
  call.num_tokens = num_tokens;
  call.top_k = topk_ids.size(1);
  call.num_experts = w2.size(0);
  call.hidden_size = hidden_size;
  call.intermediate_size = w2.size(2) * 8;
  call.scale_kind = named<ScaleKind>({"e8m0", "e4m3"}, scale_encoding);
  call.hidden_is_bfloat16 = in_bfloat16;
  call.out_is_bfloat16 = out_bfloat16;
  call.num_threads = static_cast<int32_t>(torch::stable::get_num_threads());
  Activation& act = call.activation;
  act.kind = named<Kind>({"silu", "gelu", "gelu_tanh", "relu", "relu2"}, activation);
  act.bound = named<Bound>({"clamp", "clamp_activated", "softcap"}, bound);
  act.gated = gated;
  act.alpha = value(alpha_input, alpha);
  act.beta = value(beta_input, beta);
  act.limit = value(limit_input, limit.value_or(std::numeric_limits<double>::infinity()));
  act.up_limit = up_limit || up_limit_input ? value(up_limit_input, up_limit.value_or(0)) : act.limit;

  const Kernel* kernel = in_bfloat16 ? bfloat16_kernel : float_kernel;
  const Tensor scratch = empty({kernel->scratch_bytes(call)}, aoti_torch_dtype_uint8());
  call.scratch = scratch.mutable_data_ptr();
  kernel->run(call);
  return out_bfloat16 || out_dtype == ScalarType::Float ? out : torch::stable::to(out, out_dtype);
}

}  // namespace

// Lets calls of the op on a CPU come here, and run these kernels from now on. 0 is success.
extern "C" int32_t fp4_install(const Kernel* for_bfloat16, const Kernel* for_float) {
  static std::once_flag once;
  static AOTITorchError error = AOTI_TORCH_SUCCESS;
  bfloat16_kernel = for_bfloat16;
  float_kernel = for_float;
  std::call_once(once, [] {
    TorchLibraryHandle library;  // never deleted, for that would take back what it registered
    error = aoti_torch_library_init_impl("fp4_inductor", "CPU", __FILE__, __LINE__, &library);
    if (error == AOTI_TORCH_SUCCESS) error = torch_library_impl(library, "moe_cpu", TORCH_BOX(&moe), TORCH_ABI_VERSION);
  });
  return error;
}
