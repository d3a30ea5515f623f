// Declares every driver entry point with C linkage and default visibility, from the list that the loader resolves.
//
// The sources that define them include this, so a definition whose parameters differ from the list does not compile.
#pragma once

#include "device/cuda/driver_api.h"

namespace vdnn::driver {

#define VDNN_FAKE_DECLARE(symbol, parameters) \
  extern "C" __attribute__((visibility("default"))) Result symbol parameters;
VDNN_DRIVER_CALLS(VDNN_FAKE_DECLARE)
#undef VDNN_FAKE_DECLARE

}  // namespace vdnn::driver
