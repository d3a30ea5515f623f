// Implements simulate().
#include "planning/step_timeline.h"

#include <algorithm>
#include <cstddef>
#include <tuple>

#include "planning/step_replay.h"

namespace vdnn {

namespace {

// A step that the host bounds is as the one before it after a few steps.
constexpr int most_steps = 16;

// Reloads of one point are issued in the order of their uses.
ScratchList<std::int32_t> in_order_of_uses(const RecordedStep& step, const std::vector<PlannedAbsence>& absences,
                                           Scratch& scratch) {
  const auto end = static_cast<std::int32_t>(step.points().kinds.size());
  std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t>> order;  // use, lifetime, index
  for (std::size_t index = 0; index < absences.size(); ++index) {
    const PlannedAbsence& one = absences[index];
    if (one.reload_point < 0) continue;
    const std::int32_t use = step.lifetimes()[one.lifetime].use_after(one.reload_point);
    order.emplace_back(use < 0 ? end : use, one.lifetime, static_cast<std::int32_t>(index));
  }
  std::sort(order.begin(), order.end());
  ScratchList<std::int32_t> indices(scratch.memory());
  indices.reserve(order.size());
  for (const auto& one : order) indices.push_back(std::get<2>(one));
  return indices;
}

// Allocated and peak bytes at every point.
void count_bytes(const RecordedStep& step, const std::vector<PlannedAbsence>& absences, std::vector<StepMark>& marks) {
  const std::size_t points = step.points().kinds.size();
  const std::vector<std::int64_t> peaks = step.interval_bytes(absences);
  std::vector<std::int64_t> absent(points + 1, 0);  // in the interval that ends at a point
  std::vector<std::int64_t> freed(points, 0);       // at the point, by releases, less what the plan reloads after them
  for (const PlannedAbsence& one : absences) {
    const RecordedLifetime& lifetime = step.lifetimes()[one.lifetime];
    const StepIntervals away = lifetime.absent(one.release_point, one.reload_point);
    if (away.empty()) continue;
    const std::int64_t bytes = lifetime.storage.bytes;
    absent[away.first] += bytes;
    absent[away.last + 1] -= bytes;
    if (away.first == one.release_point + 1) freed[one.release_point] += bytes;
    if (one.reload_point == away.last && away.last < lifetime.storage.end_point) freed[one.reload_point] -= bytes;
  }
  std::int64_t now = absent[0];
  for (std::size_t point = 0; point < points; ++point) {
    now += absent[point + 1];
    // No more than the next peak: what ends at the point, and was absent, is not there behind it. The last has no next
    // one: storages that are absent at the end of the step are not reloaded.
    const std::int64_t allocated =
        std::min(step.points().allocated_bytes[point] - now, peaks[std::min(point + 1, points - 1)]);
    marks[point].allocated_bytes = allocated;
    marks[point].peak_bytes = std::max({peaks[point], allocated, allocated + freed[point]});
  }
}

}  // namespace

std::int64_t StepTimeline::peak_bytes() const {
  std::int64_t most = 0;
  for (const StepMark& one : marks) most = std::max(most, one.peak_bytes);
  return most;
}

std::int64_t StepTimeline::host_stall_ns() const {
  std::int64_t sum = 0;
  for (const StepMark& one : marks) sum += one.host_stall_ns;
  return sum;
}

StepTimeline simulate(const RecordedStep& step, const std::vector<PlannedAbsence>& absences, const LinkModel& link,
                      std::int64_t copy_issue_ns) {
  step.require_absences(absences);
  const StepModel::Shape shape = step.shape(copy_issue_ns);
  Scratch scratch;
  ScratchList<ReplayedAbsence> replayed(scratch.memory());
  replayed.reserve(absences.size());
  for (const PlannedAbsence& one : absences) {
    replayed.push_back({one.lifetime, -1, one.release_point, one.reload_point});
  }
  const ScratchList<std::int32_t> by_use = in_order_of_uses(step, absences, scratch);
  const auto run = [&](ReplayedHost host) {
    Scratch of_run;
    StepTimeline timeline;
    timeline.marks.reserve(shape.kinds.size());
    timeline.copies.reserve(2 * absences.size());
    const auto [device_ns, host_ns] = replay_step(shape, link, host, replayed, by_use, of_run, nullptr, &timeline);
    timeline.step_ns = device_ns;
    timeline.host_ns = host_ns;
    return timeline;
  };
  StepTimeline timeline = run({shape.synchronizes, 0});
  if (!shape.synchronizes && timeline.host_ns > timeline.step_ns) {
    std::int64_t lead_ns = 0;
    timeline = run({true, 0});
    for (int count = 0; count < most_steps; ++count) {
      const std::int64_t later_ns = lead_ns + timeline.step_ns - timeline.host_ns;
      if (later_ns == lead_ns) break;
      lead_ns = later_ns;
      timeline = run({true, -lead_ns});
    }
    timeline.step_ns = timeline.host_ns;
  }
  count_bytes(step, absences, timeline.marks);
  return timeline;
}

}  // namespace vdnn
