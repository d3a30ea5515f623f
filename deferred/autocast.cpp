// torch.autocast on this device: it casts the same operations as on the CPU, in the same way.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "accelerator.h"
#include "arguments.h"

namespace vdnn::deferred {

namespace {

constexpr const char* lower_precision[] = {"conv1d",
                                           "conv1d.padding",
                                           "conv2d",
                                           "conv2d.padding",
                                           "conv3d",
                                           "conv3d.padding",
                                           "_convolution.deprecated",
                                           "conv_tbc",
                                           "conv_transpose1d",
                                           "conv_transpose2d.input",
                                           "conv_transpose3d.input",
                                           "linear",
                                           "matmul",
                                           "mm",
                                           "bmm",
                                           "addmm",
                                           "_addmm_activation",
                                           "addbmm",
                                           "baddbmm",
                                           "linalg_vecdot",
                                           "prelu",
                                           "mkldnn_rnn_layer",
                                           "scaled_dot_product_attention",
                                           "_native_multi_head_attention"};

constexpr const char* promoted[] = {"stack", "cat", "index_copy"};

constexpr const char* single_precision[] = {"avg_pool3d",
                                            "adaptive_avg_pool3d",
                                            "adaptive_max_pool3d",
                                            "max_pool3d",
                                            "max_unpool2d",
                                            "max_unpool3d",
                                            "fractional_max_pool2d",
                                            "fractional_max_pool3d",
                                            "reflection_pad1d",
                                            "reflection_pad2d",
                                            "replication_pad1d",
                                            "replication_pad2d",
                                            "replication_pad3d",
                                            "grid_sampler",
                                            "grid_sampler_2d",
                                            "grid_sampler_3d",
                                            "_grid_sampler_2d_cpu_fallback",
                                            "binary_cross_entropy",
                                            "binary_cross_entropy_with_logits",
                                            "mse_loss",
                                            "cosine_embedding_loss",
                                            "nll_loss",
                                            "nll_loss2d",
                                            "hinge_embedding_loss",
                                            "poisson_nll_loss",
                                            "smooth_l1_loss",
                                            "cross_entropy_loss",
                                            "l1_loss",
                                            "huber_loss",
                                            "margin_ranking_loss",
                                            "soft_margin_loss",
                                            "triplet_margin_loss",
                                            "multi_margin_loss",
                                            "multilabel_margin_loss",
                                            "multilabel_margin_loss_forward",
                                            "ctc_loss.IntList",
                                            "ctc_loss.Tensor",
                                            "kl_div",
                                            "polar",
                                            "view_as_complex",
                                            "prod",
                                            "prod.dim_int",

                                            "quantile",
                                            "quantile.scalar",
                                            "nanquantile",
                                            "nanquantile.scalar",
                                            "stft",
                                            "stft.center",
                                            "cdist",
                                            "trace",
                                            "cholesky",
                                            "cholesky_inverse",
                                            "cholesky_solve",
                                            "inverse",
                                            "lu_solve",
                                            "orgqr",
                                            "ormqr",
                                            "pinverse",
                                            "fft_fft",
                                            "fft_ifft",
                                            "fft_fft2",
                                            "fft_ifft2",
                                            "fft_fftn",
                                            "fft_ifftn",
                                            "fft_rfft",
                                            "fft_irfft",
                                            "fft_rfft2",
                                            "fft_irfft2",
                                            "fft_rfftn",
                                            "fft_irfftn",
                                            "fft_hfft",
                                            "fft_ihfft",
                                            "linalg_cond",
                                            "linalg_cond.p_str",
                                            "linalg_matrix_rank",
                                            "linalg_matrix_rank.tol_tensor",
                                            "linalg_matrix_rank.atol_rtol_tensor",
                                            "linalg_matrix_rank.atol_rtol_float",
                                            "linalg_solve",
                                            "linalg_cholesky",
                                            "linalg_cholesky_ex",
                                            "linalg_svd",
                                            "linalg_svdvals",
                                            "linalg_eig",
                                            "linalg_eigvals",
                                            "linalg_eigh",
                                            "linalg_eigvalsh",
                                            "linalg_inv",
                                            "linalg_inv_ex",
                                            "linalg_qr",
                                            "linalg_lstsq",
                                            "linalg_householder_product",
                                            "linalg_tensorinv",
                                            "linalg_tensorsolve",
                                            "fake_quantize_per_tensor_affine",
                                            "geqrf",
                                            "_lu_with_info",
                                            "qr",
                                            "svd",
                                            "triangular_solve"};

// The dtype to cast an operation's arguments to, chosen from the arguments.
using Choose = at::ScalarType (*)(const c10::IValue* begin, const c10::IValue* end);

at::ScalarType lower(const c10::IValue* /*begin*/, const c10::IValue* /*end*/) {
  return at::autocast::get_autocast_dtype(device_type);
}

at::ScalarType single(const c10::IValue* /*begin*/, const c10::IValue* /*end*/) {
  return at::kFloat;
}

at::ScalarType widest(const c10::IValue* begin, const c10::IValue* end) {
  at::ScalarType found = at::autocast::get_autocast_dtype(device_type);
  for (const c10::IValue* argument = begin; argument != end; ++argument) {
    changed(*argument, [&](const at::Tensor& tensor) {
      if (tensor.defined()) found = at::autocast::prioritize(found, tensor, device_type);
      return tensor;
    });
  }
  return found;
}

template <Choose choose>
void cast_and_call(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  const std::size_t count = operation.schema().arguments().size();
  c10::IValue* begin = stack->data() + stack->size() - count;
  const at::ScalarType type = choose(begin, begin + count);
  for (c10::IValue* argument = begin; argument != begin + count; ++argument) {
    *argument = changed(*argument, [&](const at::Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(type, tensor, device_type) : tensor;
    });
  }
  operation.callBoxed(*stack);
}

}  // namespace

}  // namespace vdnn::deferred

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  using namespace vdnn::deferred;
  const auto implement = [&](const auto& names, auto kernel) {
    for (const char* name : names) library.impl(name, torch::CppFunction(kernel()));
  };
  implement(lower_precision, [] { return torch::CppFunction::makeFromBoxedFunction<&cast_and_call<&lower>>(); });
  implement(promoted, [] { return torch::CppFunction::makeFromBoxedFunction<&cast_and_call<&widest>>(); });
  implement(single_precision, [] { return torch::CppFunction::makeFromBoxedFunction<&cast_and_call<&single>>(); });
}
