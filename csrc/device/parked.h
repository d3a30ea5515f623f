// Holds the state of objects that were destroyed without close(). Freeing that state needs the driver, which a
// destructor must not call, so the next constructor of the same class takes the parked state and frees it.
#pragma once

#include "device/return_stack.h"

namespace vdnn {

template <class State>
ReturnStack<State>& parked() {
  static auto* stack = new ReturnStack<State>;  // leaked: objects may be destroyed after static destructors ran
  return *stack;
}

}  // namespace vdnn
