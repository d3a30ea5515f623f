// Replays a step in virtual time: for a search its time and stalls, for the prediction of a plan also its timeline.
//
// See step_timeline.h for the order of what is done at a point, and for [Note: The host lane].
#pragma once

#include <cstdint>
#include <vector>

#include "planning/scratch.h"
#include "planning/step_model.h"
#include "planning/step_timeline.h"

namespace vdnn {

// An absence that is replayed. `gap` names it in stalls.
struct ReplayedAbsence {
  std::int32_t storage;
  std::int32_t gap;
  std::int32_t release_point;
  std::int32_t reload_point;
};

// The host issues the step from `now_ns` on, which is negative if it is ahead of the device. The device waits for it if
// `is_waited_for`.
struct ReplayedHost {
  bool is_waited_for;
  std::int64_t now_ns;
};

struct ReplayedTimes {
  std::int64_t device_ns;
  std::int64_t host_ns;  // in which the host issues the step
};

// `absences` are sorted by storage and point; `by_use` has the indices of those that are reloaded in the order in which
// reloads of one point are issued. Adds to `stalls` and `timeline`, if they are asked for: marks without bytes, and
// copies.
ReplayedTimes replay_step(const StepModel::Shape& shape, const LinkModel& link, ReplayedHost host,
                          const ScratchList<ReplayedAbsence>& absences, const ScratchList<std::int32_t>& by_use,
                          Scratch& scratch, std::vector<StepStall>* stalls, StepTimeline* timeline);

}  // namespace vdnn
