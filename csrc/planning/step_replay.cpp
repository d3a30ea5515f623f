// Computes the time and the peak of a step under a plan.
#include "planning/step_replay.h"

#include <algorithm>
#include <string>
#include <utility>

#include "device/errors.h"

namespace vdnn {

namespace {

constexpr std::uint32_t compute = 0;
constexpr std::uint32_t to_host = 1;
constexpr std::uint32_t to_device = 2;
// What is done at a point: the first of each list, -1 for an empty one. An item has the next one of its list.
struct AtPoint {
  std::int32_t copies = -1;    // storages
  std::int32_t ends = -1;      // storages
  std::int32_t releases = -1;  // absences
  std::int32_t reloads = -1;   // absences
};

struct Moved {
  std::int32_t gap = -1;        // the current gap, or the last one
  std::int32_t next_copy = -1;  // the next storage of its list; the same of those that end
  std::int32_t next_end = -1;
  bool is_copied = false;
  bool is_waited_for = false;
  bool is_released = false;
  bool is_reloading = false;  // or already reloaded
  bool is_back = false;
  std::int64_t copied_ns = 0;
  std::int64_t reload_ns = 0;
  std::size_t positions[2] = {0, 0};  // in the order of offloads, and of reloads (the last one)
};

class Replay {
 public:
  Replay(const StepModel::Shape& shape, const LinkModel& link, ReplayedHost host,
         const ScratchList<ReplayedAbsence>& absences, Scratch& scratch, std::vector<StepStall>* stalls,
         StepTimeline* timeline)
      : shape_(shape),
        clock_(link),
        host_(host),
        host_ns_(host.now_ns),
        absences_(absences),
        moved_(scratch.list<Moved>(shape.storages.size(), {})),
        at_(scratch.list<AtPoint>(shape.kinds.size(), {})),
        order_{ScratchList<std::int32_t>(scratch.memory()), ScratchList<std::int32_t>(scratch.memory())},
        stalls_(stalls),
        timeline_(timeline) {
    for (int stream = 0; stream < 3; ++stream) clock_.add_stream();
    for (ScratchList<std::int32_t>& order : order_) order.reserve(absences.size());
  }

  ReplayedTimes run(const ScratchList<std::int32_t>& by_use, Scratch& scratch) {
    const std::size_t points = shape_.kinds.size();
    ScratchList<std::int32_t> next_release = scratch.list<std::int32_t>(absences_.size(), -1);
    ScratchList<std::int32_t> next_reload = next_release;
    const auto put = [](std::int32_t& first, std::int32_t& next, std::int32_t item) {
      next = first;
      first = item;
    };
    // Each item goes in front of those that are there.
    for (std::size_t index = absences_.size(); index-- > 0;) {
      const std::int32_t storage = absences_[index].storage;
      put(at_[absences_[index].release_point].releases, next_release[index], static_cast<std::int32_t>(index));
      if (index > 0 && absences_[index - 1].storage == storage) continue;
      Moved& moved = moved_[storage];
      moved.gap = absences_[index].gap;
      put(at_[shape_.storages[storage].copy_point].copies, moved.next_copy, storage);
      if (shape_.storages[storage].end_point < static_cast<std::int32_t>(points)) {
        put(at_[shape_.storages[storage].end_point].ends, moved.next_end, storage);
      }
    }
    // Of the reloads at one point, the one that is used first is issued first.
    for (auto index = by_use.rbegin(); index != by_use.rend(); ++index) {
      if (absences_[*index].reload_point < 0) continue;
      put(at_[absences_[*index].reload_point].reloads, next_reload[*index], *index);
    }
    for (std::size_t point = 0; point < points; ++point) {
      point_ = static_cast<std::int32_t>(point);
      clock_.advance(compute, shape_.compute_ns[point]);
      if (!shape_.issue_ns.empty()) host_ns_ += shape_.issue_ns[point];
      const std::int64_t computed_ns = clock_.now_ns(compute);
      if (host_.is_waited_for) clock_.wait_until(compute, host_ns_);
      const std::int64_t begin_ns = clock_.now_ns(compute);
      reload_stall_ns_ = 0;
      do_at(point, next_release, next_reload);
      if (timeline_ == nullptr) continue;
      const std::int64_t end_ns = clock_.now_ns(compute);
      timeline_->marks.push_back(
          {begin_ns, end_ns, end_ns - begin_ns - reload_stall_ns_, reload_stall_ns_, begin_ns - computed_ns, 0, 0});
    }
    return {clock_.now_ns(compute), host_ns_ - host_.now_ns};
  }

 private:
  void do_at(std::size_t point, const ScratchList<std::int32_t>& next_release,
             const ScratchList<std::int32_t>& next_reload) {
    const AtPoint& here = at_[point];
    for (std::int32_t one = here.ends; one >= 0; one = moved_[one].next_end) ended(one);
    if (shape_.kinds[point] == StepPoint::End) return;
    for (std::int32_t one = here.copies; one >= 0; one = moved_[one].next_copy) copy_out(one);
    if (shape_.kinds[point] == StepPoint::Use && shape_.storages_of_points[point] >= 0) {
      use(shape_.storages_of_points[point]);
    }
    for (std::int32_t one = here.releases; one >= 0; one = next_release[one]) release(absences_[one]);
    for (std::int32_t one = here.reloads; one >= 0; one = next_reload[one]) reload_early(absences_[one].storage);
  }

  [[nodiscard]] bool is_on_device(std::int32_t storage) const {
    return !moved_[storage].is_released || point_ < shape_.storages[storage].free_point;
  }

  // In VirtualClock, waiting for a record of the compute stream is waiting for its current time.
  std::int64_t copy(std::uint32_t stream, std::int32_t storage, std::int64_t ready_ns) {
    host_ns_ += shape_.copy_issue_ns;
    clock_.wait_until(stream, host_.is_waited_for ? std::max(ready_ns, host_ns_) : ready_ns);
    const std::int64_t begin_ns = clock_.now_ns(stream);
    const auto direction = stream == to_host ? CopyDirection::DeviceToHost : CopyDirection::HostToDevice;
    clock_.copy(stream, static_cast<std::uint64_t>(shape_.storages[storage].bytes), direction);
    if (timeline_ != nullptr) {
      const std::int64_t bytes = shape_.storages[storage].bytes;
      timeline_->copies.push_back({stream == to_host, storage, bytes, begin_ns, clock_.now_ns(stream)});
    }
    ScratchList<std::int32_t>& order = order_[stream - to_host];
    moved_[storage].positions[stream - to_host] = order.size();
    order.push_back(moved_[storage].gap);
    return clock_.now_ns(stream);
  }

  void copy_out(std::int32_t storage) {
    moved_[storage].copied_ns = copy(to_host, storage, clock_.now_ns(compute));
    moved_[storage].is_copied = true;
  }

  void copy_back(std::int32_t storage) {
    Moved& moved = moved_[storage];
    moved.reload_ns = copy(to_device, storage, std::max(clock_.now_ns(compute), moved.copied_ns));
    moved.is_reloading = true;
  }

  // A stall for a storage whose graph has ended names no gap.
  void wait(std::int64_t time_ns, const Moved& moved, bool is_reload, bool has_ended) {
    const std::int64_t stalled_ns = time_ns - clock_.now_ns(compute);
    if (stalled_ns <= 0) return;
    clock_.wait_until(compute, time_ns);
    if (stalls_ == nullptr) return;
    StepStall stall{has_ended ? -1 : moved.gap, is_reload, stalled_ns, {}, 0};
    if (!has_ended) {
      const ScratchList<std::int32_t>& order = order_[is_reload ? 1 : 0];
      const std::size_t position = moved.positions[is_reload ? 1 : 0];
      stall.count_before = std::min(position, stall.before.size());
      for (std::size_t one = 0; one < stall.count_before; ++one) stall.before[one] = order[position - 1 - one];
    }
    stalls_->push_back(stall);
  }

  void wait_for_copy_out(Moved& moved, bool has_ended) {
    if (!moved.is_copied || moved.is_waited_for) return;
    wait(moved.copied_ns, moved, false, has_ended);
    moved.is_waited_for = true;
  }

  void release(const ReplayedAbsence& absence) {
    Moved& moved = moved_[absence.storage];
    moved.gap = absence.gap;
    if (moved.is_back) moved.is_reloading = moved.is_back = false;
    if (!moved.is_copied || moved.is_released) return;
    wait_for_copy_out(moved, false);
    moved.is_released = true;
  }

  void reload_early(std::int32_t storage) {
    if (!is_on_device(storage) && !moved_[storage].is_reloading) copy_back(storage);
  }

  void use(std::int32_t storage) {
    Moved& moved = moved_[storage];
    if (is_on_device(storage)) return;
    if (!moved.is_reloading) copy_back(storage);
    if (moved.is_back) return;
    moved.is_back = true;
    reload_stall_ns_ = std::max<std::int64_t>(0, moved.reload_ns - clock_.now_ns(compute));
    wait(moved.reload_ns, moved, true, false);
  }

  void ended(std::int32_t storage) {
    Moved& moved = moved_[storage];
    wait_for_copy_out(moved, true);
    if (moved.is_reloading && !moved.is_back) wait(moved.reload_ns, moved, true, true);
  }

  const StepModel::Shape& shape_;
  VirtualClock clock_;
  const ReplayedHost host_;
  std::int64_t host_ns_;  // when the host has issued all so far
  const ScratchList<ReplayedAbsence>& absences_;
  ScratchList<Moved> moved_;
  ScratchList<AtPoint> at_;
  std::int32_t point_ = 0;
  std::int64_t reload_stall_ns_ = 0;    // of the use at this point
  ScratchList<std::int32_t> order_[2];  // gaps in the order of offloads and of reloads
  std::vector<StepStall>* const stalls_;
  StepTimeline* const timeline_;
};

}  // namespace

ReplayedTimes replay_step(const StepModel::Shape& shape, const LinkModel& link, ReplayedHost host,
                          const ScratchList<ReplayedAbsence>& absences, const ScratchList<std::int32_t>& by_use,
                          Scratch& scratch, std::vector<StepStall>* stalls, StepTimeline* timeline) {
  return Replay(shape, link, host, absences, scratch, stalls, timeline).run(by_use, scratch);
}

void StepModel::require_gap(const StepAbsence& absence) const {
  const auto last = static_cast<std::int32_t>(points()) - 1;
  if (absence.gap < 0 || absence.gap >= static_cast<std::int32_t>(gaps()) || absence.release_point < 0 ||
      absence.release_point > last || absence.reload_point > last) {
    throw InvalidArgument("absences", "gaps and points of the step", std::to_string(absence.gap));
  }
}

StepOutcome StepModel::replay(const std::vector<StepAbsence>& absences) const {
  Scratch scratch;
  ScratchList<std::int32_t> absence_of_gap =
      scratch.list<std::int32_t>(gaps(), -1);  // per gap: the index of its absence, or -1
  for (std::size_t index = 0; index < absences.size(); ++index) {
    require_gap(absences[index]);
    absence_of_gap[absences[index].gap] = static_cast<std::int32_t>(index);
  }
  StepOutcome outcome{};
  outcome.absences.reserve(absences.size());
  ScratchList<ReplayedAbsence> by_storage(scratch.memory());
  by_storage.reserve(absences.size());
  for (const std::int32_t gap : gaps_by_storage_) {
    if (absence_of_gap[gap] < 0) continue;
    const StepAbsence& one = absences[absence_of_gap[gap]];
    outcome.absences.push_back(one);
    by_storage.push_back({shape_.gaps[gap].storage, gap, one.release_point, one.reload_point});
    absence_of_gap[gap] = static_cast<std::int32_t>(by_storage.size()) - 1;
  }
  ScratchList<std::int32_t> by_use(scratch.memory());
  by_use.reserve(by_storage.size());
  for (const std::int32_t gap : gaps_by_use_) {
    if (absence_of_gap[gap] >= 0) by_use.push_back(absence_of_gap[gap]);
  }
  const auto [device_ns, host_ns] =
      replay_step(shape_, link_, {shape_.synchronizes, 0}, by_storage, by_use, scratch, &outcome.stalls, nullptr);
  // With both synchronized, the last point is not reached before the host has issued the step.
  outcome.step_ns = std::max(device_ns, host_ns);
  outcome.host_ns = host_ns;
  return outcome;
}

std::pair<std::int32_t, std::int32_t> StepModel::away(const StepAbsence& absence) const {
  const StepGap& gap = shape_.gaps[absence.gap];
  const std::int32_t last = absence.reload_point < 0 ? gap.last : std::min(absence.reload_point, gap.last);
  return {std::max(absence.release_point + 1, gap.first), last + 1};
}

std::int64_t StepModel::peak_bytes(const std::vector<StepAbsence>& absences) const {
  std::vector<std::int64_t> change(points() + 1, 0);
  for (const StepAbsence& absence : absences) {
    require_gap(absence);
    const auto [first, end] = away(absence);
    if (first >= end) continue;
    change[first] += bytes_of(absence.gap);
    change[end] -= bytes_of(absence.gap);
  }
  std::int64_t absent = 0;
  std::int64_t peak = 0;
  for (std::size_t interval = 0; interval < points(); ++interval) {
    absent += change[interval];
    peak = std::max(peak, shape_.peak_bytes[interval] - absent);
  }
  return peak;
}

}  // namespace vdnn
