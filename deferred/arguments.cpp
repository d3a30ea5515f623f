// Takes tensors out of arguments, and puts others in.
#include "arguments.h"

namespace vdnn::deferred {

Reference reference_to(const at::Tensor& tensor) {
  Reference reference;
  reference.defined = tensor.defined();
  if (!reference.defined) return reference;
  reference.on_device = tensor.is_privateuseone();
  if (!reference.on_device) {
    TORCH_CHECK(tensor.is_cpu(), "the deferred accelerator got a tensor on ", tensor.device());
    reference.host = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      reference.host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return reference;
  }
  reference.data = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  reference.size = tensor.sizes().vec();
  reference.stride = tensor.strides().vec();
  reference.dtype = tensor.scalar_type();
  reference.conjugate = tensor.is_conj();
  reference.negative = tensor.is_neg();
  return reference;
}

void note(Accelerator& accelerator, const at::Tensor& tensor, int access, const char* label) {
  if (!tensor.defined() || !tensor.is_privateuseone() || tensor.numel() == 0) return;
  std::int64_t reach = 1;
  for (std::int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
    reach += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  }
  const auto& table = accelerator.table();
  table.note(table.device, reinterpret_cast<std::uintptr_t>(tensor.data_ptr()), reach * tensor.element_size(), access,
             accelerator.native(Accelerator::current_stream()), label);
}

c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(change(tensor));
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor.has_value() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return tensors;
  }
  return value;
}

c10::IValue with_device(const c10::IValue& value, c10::DeviceType device) {
  if (value.isDevice() && value.toDevice().is_privateuseone()) return c10::Device(device);
  return value;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  // Zero-dimensional CPU tensors may be combined with tensors of any device, and their value is known at once.
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  at::Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.is_conj()) meta = meta.conj();
  if (tensor.is_neg()) meta = at::_neg_view(meta);
  return meta;
}

}  // namespace vdnn::deferred
