// Loads and launches the embedded device code.
#include "device/cuda/cuda_kernels.h"

#include "codec/launch_geometry.h"
#include "device/errors.h"

namespace vdnn {

driver::Function CudaKernels::function(CudaContext& context, Kernel kernel) {
  if (module_ == nullptr) {
    if (embedded_device_code() == nullptr) {
      throw KernelUnavailable(kernel_symbol(kernel), device_code_missing_reason());
    }
    context.check(context.driver().cuModuleLoadData(&module_, embedded_device_code()), "cuModuleLoadData");
  }
  driver::Function& function = functions_[static_cast<std::size_t>(kernel)];
  if (function == nullptr) {
    context.check(context.driver().cuModuleGetFunction(&function, module_, kernel_symbol(kernel)),
                  "cuModuleGetFunction");
  }
  return function;
}

void CudaKernels::unload(CudaContext& context) {
  if (module_ == nullptr) return;
  context.check_released(context.driver().cuModuleUnload(module_), "cuModuleUnload");
  module_ = nullptr;
}

void CudaKernels::launch(CudaContext& context, driver::Function function, const KernelCall& call,
                         driver::StreamHandle stream) {
  const DriverLibrary& driver = context.driver();
  if (call.kernel == Kernel::ContentHash) {
    // The kernel's blocks add to the target.
    context.check(driver.cuMemsetD8Async(call.target, 0, target_bytes(call), stream), "cuMemsetD8Async",
                  target_bytes(call));
  }
  const LaunchGeometry geometry = launch_geometry(call);
  KernelCall argument = call;
  void* parameters[] = {&argument};
  context.check(
      driver.cuLaunchKernel(function, geometry.blocks, 1, 1, geometry.threads, 1, 1, 0, stream, parameters, nullptr),
      "cuLaunchKernel", source_bytes(call));
}

}  // namespace vdnn
