// Registers the accelerator's operations: all of torch's, deferred; the CPU's kernels for those that torch expects an
// accelerator to implement; and reads and copies by the host, which wait.
#include <ATen/ATen.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_cpu_dispatch.h>
#include <torch/library.h>

#include "accelerator.h"
#include "arguments.h"
#include "deferred_call.h"

namespace vdnn::deferred {

namespace {

void defer(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  make_deferred_call(operation, *stack);
}

// Operations with a kernel for the CPU and a composite one for all other devices. The composite kernel would take
// precedence over the fallback, and adds in another order.
void defer_what_is_made_of_others(torch::Library& library) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto operation = c10::Dispatcher::singleton().findOp(name);
    if (!operation.has_value() || !operation->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (operation->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
        operation->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        operation->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) {
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&defer>());
    }
  }
}

// --- Operations for which torch expects a kernel of every accelerator: the CPU's, deferred.

void defer_instead(const char* name, torch::jit::Stack& stack, std::optional<at::MemoryFormat> format) {
  const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  make_deferred_call(operation, stack, format);
}

// oneDNN's results are channels_last if the input or the weight is.
std::optional<at::MemoryFormat> format_of(const at::Tensor& input, const at::Tensor& weight) {
  const auto is_last = [](const at::Tensor& tensor) {
    return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  };
  if (input.dim() == 4 && (is_last(input) || is_last(weight))) return at::MemoryFormat::ChannelsLast;
  return std::nullopt;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  torch::jit::Stack stack{input,
                          weight,
                          bias,
                          C10_AS_INTARRAYREF_SLOW(stride),
                          C10_AS_INTARRAYREF_SLOW(padding),
                          C10_AS_INTARRAYREF_SLOW(dilation),
                          transposed,
                          C10_AS_INTARRAYREF_SLOW(output_padding),
                          groups.guard_int(__FILE__, __LINE__)};
  defer_instead("aten::convolution", stack, format_of(input, weight));
  return stack.at(0).toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  torch::jit::Stack stack{gradient,
                          input,
                          weight,
                          std::vector<std::int64_t>{gradient.size(1)},
                          C10_AS_INTARRAYREF_SLOW(stride),
                          C10_AS_INTARRAYREF_SLOW(padding),
                          C10_AS_INTARRAYREF_SLOW(dilation),
                          transposed,
                          C10_AS_INTARRAYREF_SLOW(output_padding),
                          groups.guard_int(__FILE__, __LINE__),
                          c10::List<bool>({wanted[0], wanted[1], wanted[2]})};
  defer_instead("aten::convolution_backward", stack, format_of(input, weight));
  return {stack.at(0).toTensor(), stack.at(1).toTensor(), stack.at(2).toTensor()};
}

// The attention kernel to use: the CPU's fused one if it supports the arguments.
std::int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                              std::optional<double> scale, bool grouped) {
  return at::cpu::_fused_sdp_choice(query, key, value, mask, dropout, is_causal, scale, grouped);
}

// --- Copies between devices, and reads by the host.

void wait_for(const at::Tensor& tensor, const char* label) {
  auto& accelerator = *Accelerator::running();
  accelerator.say_origin();
  note(accelerator, tensor, read_access, label);
  accelerator.drain(Accelerator::current_stream());
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool /*non_blocking*/) {
  if (target.is_cpu()) {
    wait_for(source, "copy to the host");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(reference_to(source).on_cpu());
    return target;
  }
  // A copy from the host takes a snapshot, as a GPU stages pageable memory. On the device it is an operation.
  static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  torch::jit::Stack stack{target, source, false};
  make_deferred_call(operation, stack);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  wait_for(tensor, "read by the host");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return reference_to(tensor).on_cpu().item();
}

// As for CUDA: `parameter.data` may change between a tensor of the CPU and one of the accelerator.
bool has_compatible_shallow_copy_type(const at::Tensor& tensor, const at::Tensor& source) {
  const auto is_ours = [](const at::Tensor& one) { return one.is_cpu() || one.is_privateuseone(); };
  return is_ours(tensor) && is_ours(source) && tensor.layout() == source.layout();
}

}  // namespace

}  // namespace vdnn::deferred

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &vdnn::deferred::choose_attention)
}  // namespace at::native

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&vdnn::deferred::defer>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using namespace vdnn::deferred;
  defer_what_is_made_of_others(library);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

// Conjugate and negative views reach this unresolved, as they reach copy_. Resolving one would copy it, which calls
// this again.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
