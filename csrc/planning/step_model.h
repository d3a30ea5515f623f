// One recorded step as the search for a plan sees it: points, storages, and the gaps in which they may be away.
//
// vdnn/planning has the same algorithms in Python (schedule.py, simulate.py), readable and slow; tests hold that both
// agree on any recording. Here are those that the search runs thousands of times.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "device/sim/virtual_clock.h"

namespace vdnn {

enum class StepPoint : std::uint8_t { Save, Use, End };

struct StepStorage {
  std::int64_t bytes;
  std::int32_t copy_point;
  std::int32_t free_point;
  std::int32_t end_point;
};

// Away from interval `first` to interval `last`, both included, at most. `use` is -1 if it is not used again.
struct StepGap {
  std::int32_t storage;
  std::int32_t use;
  std::int32_t first;
  std::int32_t last;
};

// Of one gap. `reload_point` is -1 if the copy back is issued only when it is used.
struct StepAbsence {
  std::int32_t gap;
  std::int32_t release_point;
  std::int32_t reload_point;
};

// The compute stream stood still for a copy. The first so many of `before` are gaps whose copies the engine did just
// before that one, the last first. They are held in place: a step has a thousand stalls, and a search ten thousand
// steps.
struct StepStall {
  std::int32_t gap;  // -1: of a storage whose graph ended with a copy in flight
  bool is_reload;
  std::int64_t ns;
  std::array<std::int32_t, 6> before;
  std::size_t count_before;
};

struct StepOutcome {
  std::int64_t step_ns;
  std::vector<StepAbsence> absences;
  std::vector<StepStall> stalls;  // in the order of the step
};

// How a schedule is made of a choice.
struct ScheduleOptions {
  bool in_order = false;        // no copy back is issued before one that is needed earlier
  bool furthest_first = false;  // what is used last goes first, instead of what was copied first
};

struct MoreRoom {
  std::int32_t interval;
  std::int64_t bytes;
};

class StepModel {
 public:
  struct Shape {
    std::vector<std::int64_t> compute_ns;
    std::vector<std::int64_t> peak_bytes;
    std::vector<StepPoint> kinds;
    std::vector<std::int32_t> storages_of_points;  // -1 for none
    std::vector<StepStorage> storages;
    std::vector<StepGap> gaps;  // in the order in which copies out are issued
  };

  // Throws InvalidArgument if indices or sizes do not fit together.
  StepModel(Shape shape, const LinkModel& link);

  // Gives up late, brings back early; nothing if the budget cannot be met. `may_leave` has a flag for each gap.
  [[nodiscard]] std::optional<std::vector<StepAbsence>> schedule(const std::string& may_leave,
                                                                 std::int64_t budget_bytes,
                                                                 const std::vector<MoreRoom>& more_room,
                                                                 ScheduleOptions options) const;
  // The step in time. Absences in any order, of one gap at most one.
  [[nodiscard]] StepOutcome replay(const std::vector<StepAbsence>& absences) const;
  [[nodiscard]] std::int64_t peak_bytes(const std::vector<StepAbsence>& absences) const;

  [[nodiscard]] std::size_t points() const { return shape_.kinds.size(); }
  [[nodiscard]] std::size_t gaps() const { return shape_.gaps.size(); }

 private:
  [[nodiscard]] std::optional<std::vector<StepAbsence>> release_late(const std::string& may_leave,
                                                                     std::int64_t budget_bytes,
                                                                     const std::vector<MoreRoom>& more_room,
                                                                     bool furthest_first) const;
  [[nodiscard]] std::vector<StepAbsence> reload_early(const std::vector<StepAbsence>& released,
                                                      std::int64_t budget_bytes, bool in_order) const;
  [[nodiscard]] std::int64_t bytes_of(std::int32_t gap) const;
  void require_gap(const StepAbsence& absence) const;
  // Intervals of a gap that lie between a release and a reload: [first, second).
  [[nodiscard]] std::pair<std::int32_t, std::int32_t> away(const StepAbsence& absence) const;

  const Shape shape_;
  const LinkModel link_;
  std::vector<std::int32_t> gaps_by_first_;  // indices of gaps
  std::vector<std::int32_t> gaps_by_last_;
  std::vector<std::int32_t> places_from_furthest_;  // of each gap: 0 is that of the gap whose use comes last
  std::vector<std::int32_t> gaps_from_furthest_;    // the gap at each place
  std::vector<std::int32_t> gaps_by_storage_;
  std::vector<std::int32_t> gaps_by_use_;  // those of no further use last; of one use by storage
};

}  // namespace vdnn
