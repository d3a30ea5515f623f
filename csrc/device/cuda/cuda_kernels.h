// The codec's device code on one GPU: loaded on first use, launched on any stream of the device.
//
// Not synchronized: the device's lock guards function() and unload(). The context must be current.
#pragma once

#include "codec/codec.h"
#include "device/cuda/cuda_context.h"

namespace vdnn {

class CudaKernels {
 public:
  // Throws KernelUnavailable in a build without device code.
  [[nodiscard]] driver::Function function(CudaContext& context, Kernel kernel);
  void unload(CudaContext& context);
  static void launch(CudaContext& context, driver::Function function, const KernelCall& call,
                     driver::StreamHandle stream);

 private:
  driver::Module module_ = nullptr;
  driver::Function functions_[kernel_count] = {};
};

}  // namespace vdnn
