// The extension module vdnn._C: the native core as Python sees it.
//
// Calls that may block release the GIL first and take native locks after; no native lock is held while the GIL is
// taken. Calls that cannot block keep the GIL. _C.pyi is the reviewed description of what is here.
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The native core of vdnn: devices, pinned memory, transfers, codecs, planning. Needs no torch.";
  vdnn::bind_errors(module);
  vdnn::bind_codec(module);
  vdnn::bind_device(module);
  vdnn::bind_sim_table(module);
  vdnn::bind_memory(module);
  vdnn::bind_transfer(module);
  vdnn::bind_planning(module);
}
