// The extension module vdnn._C: Python bindings of the native core.
//
// Calls that may block release the GIL before they take native locks, and no code acquires the GIL while it holds a
// native lock. Calls that cannot block keep the GIL. _C.pyi is the reviewed description of this module.
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() =
      "The native core of vdnn: devices, pinned memory, transfers, codecs, planning, hooks. Does not need torch.";
  vdnn::bind_errors(module);
  vdnn::bind_codec(module);
  vdnn::bind_device(module);
  vdnn::bind_sim_table(module);
  vdnn::bind_memory(module);
  vdnn::bind_transfer(module);
  vdnn::bind_parked(module);
  vdnn::bind_planning(module);
  vdnn::bind_training(module);
  vdnn::bind_hooks(module);
}
