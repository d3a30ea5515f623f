// The one instance of the state, and the order in which a call's obstacles are told.
#include "fake_driver.h"

namespace vdnn::fake {

FakeDriver& fake_driver() {
  static auto* const state = new FakeDriver;
  return *state;
}

driver::Result admit(FakeDriver& state, const char* name, Needs needs) {
  state.calls.add(name);
  const driver::Result refusal = state.faults.at_call(name);
  if (refusal != driver::success) return refusal;
  if (needs == Needs::Nothing) return driver::success;
  if (!state.contexts.initialized()) return not_initialized;
  const bool healthy = needs == Needs::HealthyDriver || needs == Needs::HealthyContext;
  if (healthy && state.faults.sticky() != driver::success) return state.faults.sticky();
  const bool current = needs == Needs::Context || needs == Needs::HealthyContext;
  return current ? state.contexts.current_state() : driver::success;
}

}  // namespace vdnn::fake
