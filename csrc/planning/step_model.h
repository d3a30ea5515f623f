// One recorded step as the search for a plan uses it: points, storages, and the gaps in which storages may be absent.
//
// The same algorithms exist in readable but slow Python (schedule.py and timeline.py in tests/planning/reference);
// tests check that both agree on any recording. The search runs this version thousands of times.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "device/sim/virtual_clock.h"
#include "planning/scratch.h"

namespace vdnn {

enum class StepPoint : std::uint8_t { Save, Use, End };

struct StepStorage {
  std::int64_t bytes;
  std::int32_t copy_point;
  std::int32_t free_point;
  std::int32_t end_point;
};

// The storage may be absent from interval `first` to interval `last`, both inclusive, if it is released at
// `release_point`. `use` is -1 if no use follows.
struct StepGap {
  std::int32_t storage;
  std::int32_t use;
  std::int32_t first;
  std::int32_t last;
  std::int32_t release_point;
};

// The absence of a storage within one gap. `reload_point` is -1 if the reload is issued only at the use.
struct StepAbsence {
  std::int32_t gap;
  std::int32_t release_point;
  std::int32_t reload_point;
};

// The compute stream waited for a copy. The first `count_before` entries of `before` are the gaps whose copies the
// engine ran just before that copy, the latest first. The array avoids an allocation: a step has a thousand stalls, and
// a search ten thousand steps.
struct StepStall {
  std::int32_t gap;  // -1 if the graph of the storage ended with the copy in flight
  bool is_reload;
  std::int64_t ns;
  std::array<std::int32_t, 6> before;
  std::size_t count_before;
};

struct StepOutcome {
  std::int64_t step_ns;
  std::int64_t host_ns;  // in which the host issues the step
  std::vector<StepAbsence> absences;
  std::vector<StepStall> stalls;  // in the order of the step
};

// How schedule() turns a choice of gaps into absences.
struct ScheduleOptions {
  bool in_order = false;        // no reload is issued before a reload that is needed earlier
  bool furthest_first = false;  // release the storage with the furthest use first, not the one that was copied first
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
    std::vector<StepGap> gaps;  // in the order in which offloads are issued
    // See [Note: The host lane] in step_timeline.h. `issue_ns` has one entry per point, or none: the host takes no
    // time.
    std::vector<std::int64_t> issue_ns = {};
    std::int64_t copy_issue_ns = 0;
    bool synchronizes = false;

    [[nodiscard]] std::int64_t bytes_of(std::int32_t gap) const { return storages[gaps[gap].storage].bytes; }
    // The step when nothing is offloaded.
    [[nodiscard]] std::int64_t kept_ns() const;
    [[nodiscard]] std::int64_t most_bytes() const;   // the peak when nothing is offloaded
    [[nodiscard]] std::int64_t least_bytes() const;  // the peak when everything is offloaded that can be
    // No plan that meets the budget has a shorter step: the bytes of an interval that are over the budget have been
    // copied to the host before it, and those that are used later are copied back behind it.
    [[nodiscard]] std::int64_t shortest_ns(const LinkModel& link, std::int64_t budget_bytes) const;
  };

  // Throws InvalidArgument if indices or sizes are inconsistent.
  StepModel(Shape shape, const LinkModel& link);

  // Releases storages as late and reloads them as early as the budget allows; nullopt if the budget cannot be met.
  // `may_leave` has a flag for each gap.
  [[nodiscard]] std::optional<std::vector<StepAbsence>> schedule(const std::string& may_leave,
                                                                 std::int64_t budget_bytes,
                                                                 const std::vector<MoreRoom>& more_room,
                                                                 ScheduleOptions options) const;
  // A choice of gaps with no gap to spare: beginning with all gaps, leaves out each gap of `order` with which every
  // interval still meets the budget. Returns a flag for each gap.
  [[nodiscard]] std::string cover(const std::vector<std::int32_t>& order, std::int64_t budget_bytes) const;
  // Replays the step in virtual time. `absences` may be in any order, with at most one per gap.
  [[nodiscard]] StepOutcome replay(const std::vector<StepAbsence>& absences) const;
  [[nodiscard]] std::int64_t peak_bytes(const std::vector<StepAbsence>& absences) const;

  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] const LinkModel& link() const { return link_; }
  [[nodiscard]] std::size_t points() const { return shape_.kinds.size(); }
  [[nodiscard]] std::size_t gaps() const { return shape_.gaps.size(); }

 private:
  [[nodiscard]] std::optional<ScratchList<StepAbsence>> release_late(const std::string& may_leave,
                                                                     std::int64_t budget_bytes,
                                                                     const std::vector<MoreRoom>& more_room,
                                                                     bool furthest_first, Scratch& scratch) const;
  [[nodiscard]] std::vector<StepAbsence> reload_early(const ScratchList<StepAbsence>& released,
                                                      std::int64_t budget_bytes, bool in_order, Scratch& scratch) const;
  [[nodiscard]] std::int64_t bytes_of(std::int32_t gap) const { return shape_.bytes_of(gap); }
  // The room under the budget in every interval. `change`: by how much more is absent from an interval on.
  [[nodiscard]] ScratchList<std::int64_t> room_of(const ScratchList<std::int64_t>& change, std::int64_t budget_bytes,
                                                  Scratch& scratch) const;
  void require_gap(const StepAbsence& absence) const;
  // The intervals of a gap between the release and the reload: [first, second).
  [[nodiscard]] std::pair<std::int32_t, std::int32_t> away(const StepAbsence& absence) const;

  const Shape shape_;
  const LinkModel link_;
  std::vector<std::int32_t> gaps_by_first_;  // indices of gaps
  std::vector<std::int32_t> gaps_by_last_;
  std::vector<std::int32_t> ranks_from_furthest_;  // per gap: its rank, where 0 is the gap whose use is furthest
  std::vector<std::int32_t> gaps_from_furthest_;   // the inverse of ranks_from_furthest_
  std::vector<std::int32_t> gaps_by_storage_;
  std::vector<std::int32_t> gaps_by_use_;  // gaps without a use last; gaps with the same use by storage
};

}  // namespace vdnn
