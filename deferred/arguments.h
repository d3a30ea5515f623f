// The arguments of an operation: as the caller passes them, and as the stream sees them when it runs the operation.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <vector>

#include "accelerator.h"

namespace vdnn::deferred {

inline constexpr int read_access = 0;
inline constexpr int write_access = 1;

// A tensor as a stream sees it: an address and a geometry. It does not keep the memory alive.
struct Reference {
  bool defined = false;
  bool on_device = false;
  void* data = nullptr;
  std::vector<std::int64_t> size;
  std::vector<std::int64_t> stride;
  at::ScalarType dtype = at::kFloat;
  bool conjugate = false;
  bool negative = false;
  at::Tensor host;  // a snapshot of a tensor on the CPU

  [[nodiscard]] at::Tensor on_cpu() const {
    if (!defined) return {};
    if (!on_device) return host;
    at::Tensor tensor = at::from_blob(data, size, stride, at::TensorOptions().dtype(dtype));
    if (conjugate) tensor = tensor.conj();
    if (negative) tensor = at::_neg_view(tensor);
    return tensor;
  }
};

[[nodiscard]] Reference reference_to(const at::Tensor& tensor);
// Reports to a checker how the current stream accesses the tensor's bytes.
void note(Accelerator& accelerator, const at::Tensor& tensor, int access, const char* label);

// The value with `change` applied to every tensor in it. Also used to visit all tensors.
using Change = std::function<at::Tensor(const at::Tensor&)>;
c10::IValue changed(const c10::IValue& value, const Change& change);
// Replaces a device of the accelerator by one of this type.
[[nodiscard]] c10::IValue with_device(const c10::IValue& value, c10::DeviceType device);
// A tensor of the same geometry without memory, for meta kernels.
[[nodiscard]] at::Tensor as_meta(const at::Tensor& tensor);

}  // namespace vdnn::deferred
