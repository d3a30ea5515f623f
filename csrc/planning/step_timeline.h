// Predicts the timeline of a plan: replays the step point by point, with both copy engines and every stall.
//
// The replay follows the runtime's order of calls. At a point, in this order: copies to the host that may begin there
// are issued; a use waits for its reload, which is issued there if it was not prefetched; the plan's releases wait for
// their copies to the host; the plan's reloads are issued, the next used first.
//
// [Note: The host lane] The device runs nothing before the host has issued it. The host needs the issue time of a point
// for the operations since the previous one, recomputes included, and for each copy `copy_issue_ns`. At a point the
// compute stream continues when it has computed and the host has issued everything up to there; a copy begins no
// earlier than the host has issued it. If the program synchronizes, host and device begin each step together. If not,
// the host runs ahead, also into the next step, and keeps its lead. Steps then follow each other as fast as the slower
// of the two allows: the device, with a host that takes no time, or the host, which issues the step. A step that the
// device bounds is shown as it is once the host is far enough ahead; one that the host bounds, with the lead that one
// step leaves to the next.
//
// The same algorithm exists in readable but slow Python (tests/planning/reference/timeline.py); tests check that both
// agree on any recording.
#pragma once

#include <cstdint>
#include <vector>

#include "planning/recorded_step.h"
#include "planning/step_model.h"

namespace vdnn {

// The compute stream reached a point at `begin_ns`, stalled, and continued at `end_ns`. Before `begin_ns` it waited
// `host_stall_ns` for the host. `peak_bytes` is the most since the point before.
struct StepMark {
  std::int64_t begin_ns;
  std::int64_t end_ns;
  std::int64_t release_stall_ns;
  std::int64_t reload_stall_ns;
  std::int64_t host_stall_ns;
  std::int64_t allocated_bytes;
  std::int64_t peak_bytes;
};

struct StepCopy {
  bool is_to_host;
  std::int32_t lifetime;
  std::int64_t bytes;
  std::int64_t begin_ns;
  std::int64_t end_ns;
};

struct StepTimeline {
  std::int64_t step_ns = 0;
  std::int64_t host_ns = 0;  // in which the host issues the step
  std::vector<StepMark> marks = {};
  std::vector<StepCopy> copies = {};

  [[nodiscard]] std::int64_t peak_bytes() const;
  [[nodiscard]] std::int64_t host_stall_ns() const;
};

// `absences` are in the order of the lifetimes, those of one lifetime in the order of the step. Throws InvalidArgument
// if they are not of the step.
[[nodiscard]] StepTimeline simulate(const RecordedStep& step, const std::vector<PlannedAbsence>& absences,
                                    const LinkModel& link, std::int64_t copy_issue_ns);

}  // namespace vdnn
