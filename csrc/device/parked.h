// Holds the state of objects that were destroyed without close(). Freeing that state needs the driver, which a
// destructor must not call. The next constructor of the same class frees it, and so does whoever is given the notice.
#pragma once

#include <atomic>
#include <memory>

#include "device/return_stack.h"

namespace vdnn {

// Called after state was parked, from any destructor: it must not block, throw or call a driver.
using ParkedNotice = void (*)() noexcept;

inline std::atomic<ParkedNotice> parked_notice{nullptr};

template <class State>
ReturnStack<State>& parked() {
  static auto* stack = new ReturnStack<State>;  // leaked: objects may be destroyed after static destructors ran
  return *stack;
}

template <class State>
void park(std::unique_ptr<State> state) noexcept {
  parked<State>().push(state.release());
  const ParkedNotice notice = parked_notice.load(std::memory_order_acquire);
  if (notice != nullptr) notice();
}

}  // namespace vdnn
