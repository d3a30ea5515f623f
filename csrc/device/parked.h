// Where the state of a thing goes that was dropped without close(): giving it back needs a driver, and a destructor
// must not call one. The next constructor of the same kind takes the parked ones and closes them.
#pragma once

#include "device/return_stack.h"

namespace vdnn {

template <class State>
ReturnStack<State>& parked() {
  static auto* stack = new ReturnStack<State>;  // leaked: things may be dropped after static destructors ran
  return *stack;
}

}  // namespace vdnn
