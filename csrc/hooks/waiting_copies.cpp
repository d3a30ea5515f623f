// Copies that wait for their operation: of saves without a grad_fn, which a kernel may fill only after the save.
//
// See [Note: Copies wait for their operation] in deferred_copies.py.
#include <algorithm>
#include <new>

#include "hooks/gate_state.h"
#include "hooks/mover_state.h"

namespace vdnn::hooks {
namespace {

bool sequence_number(const Mover* mover, std::int64_t& number) {
  return as_number(Reference::stolen(PyObject_CallNoArgs(mover->parts[kSequenceNr])), number);
}

auto first_complete(std::vector<std::pair<LightStorage*, std::int64_t>>& waiting, std::int64_t now) {
  return std::find_if(waiting.begin(), waiting.end(), [&](const auto& one) { return one.second != now; });
}

// A waiting storage whose operation is over, which waits no more; or null.
LightStorage* take_complete(MoverState* state, std::int64_t now) {
  auto& waiting = state->waiting;
  const auto found = first_complete(waiting, now);
  if (found == waiting.end()) {
    return nullptr;
  }
  LightStorage* storage = found->first;
  waiting.erase(found);
  return storage;
}

}  // namespace

bool wait_for_operation(LightStorage* storage) {
  std::int64_t now = 0;
  if (!sequence_number(storage->mover, now)) {
    return false;
  }
  try {
    storage->mover->state->waiting.emplace_back(storage, now);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

void wait_no_more(const LightStorage* storage) {
  auto& waiting = storage->mover->state->waiting;
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), [&](const auto& one) { return one.first == storage; }),
                waiting.end());
}

bool submit_complete(const Gate* gate) {
  Mover* mover = gate->mover;
  if (!has_waiting(mover) || PyThread_get_thread_ident() != gate->save_thread) {
    return true;
  }
  std::int64_t now = 0;
  if (!sequence_number(mover, now)) {
    return false;
  }
  if (first_complete(mover->state->waiting, now) == mover->state->waiting.end()) {
    return true;  // as in a backward, which has no new numbers
  }
  const Locked locked(mover);
  if (!locked) {
    return false;
  }
  while (LightStorage* storage = take_complete(mover->state, now)) {
    const Held held(storage);
    const bool is_as_saved = version_of(mover, storage->witness.get()) == storage->version;
    if ((!is_as_saved || !may_move_here(mover) || !offload(storage)) && !(clear_error() && hand_over(storage))) {
      return false;
    }
  }
  return true;
}

}  // namespace vdnn::hooks
