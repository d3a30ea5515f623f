// Decides when to release and when to reload, for a choice of gaps. schedule.py in the tests explains the algorithm.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "device/errors.h"
#include "planning/room_tree.h"
#include "planning/step_model.h"

namespace vdnn {

namespace {

void require(bool holds, const char* what, const std::string& expected) {
  if (!holds) throw InvalidArgument(what, expected, "inconsistent values");
}

// A priority queue of ranks, the lowest first: one bit per rank, and the index of the first word that may have a bit
// set. Gaps arrive mostly in order, so that index rarely decreases, and this is faster than a heap.
class WaitingRanks {
 public:
  WaitingRanks(std::size_t ranks, Scratch& scratch)
      : words_(scratch.list<std::uint64_t>(ranks / word_bits + 1, 0)), first_(words_.size() - 1) {}

  void push(std::int32_t rank) {
    const std::size_t word = static_cast<std::size_t>(rank) / word_bits;
    words_[word] |= std::uint64_t{1} << (static_cast<std::size_t>(rank) % word_bits);
    first_ = std::min(first_, word);
  }
  [[nodiscard]] bool empty() {
    while (words_[first_] == 0 && first_ + 1 < words_.size()) ++first_;
    return words_[first_] == 0;
  }
  // Requires that the queue is not empty.
  [[nodiscard]] std::int32_t lowest() const {
    return static_cast<std::int32_t>(first_ * word_bits) + __builtin_ctzll(words_[first_]);
  }
  void pop() { words_[first_] &= words_[first_] - 1; }

 private:
  static constexpr std::size_t word_bits = 64;
  ScratchList<std::uint64_t> words_;
  std::size_t first_;
};

}  // namespace

std::int64_t StepModel::Shape::kept_ns() const {
  std::int64_t host = 0;
  std::int64_t device = 0;
  for (std::size_t point = 0; point < compute_ns.size(); ++point) {
    if (!issue_ns.empty()) host += issue_ns[point];
    device += compute_ns[point];
    if (synchronizes) device = std::max(device, host);
  }
  return std::max(device, host);
}

std::int64_t StepModel::Shape::most_bytes() const {
  return *std::max_element(peak_bytes.begin(), peak_bytes.end());
}

std::int64_t StepModel::Shape::least_bytes() const {
  std::vector<std::int64_t> change(peak_bytes.size() + 1, 0);
  for (const StepGap& gap : gaps) {
    change[gap.first] += storages[gap.storage].bytes;
    change[gap.last + 1] -= storages[gap.storage].bytes;
  }
  std::int64_t absent = 0;
  std::int64_t least = 0;
  for (std::size_t interval = 0; interval < peak_bytes.size(); ++interval) {
    absent += change[interval];
    least = std::max(least, peak_bytes[interval] - absent);
  }
  return least;
}

std::int64_t StepModel::Shape::shortest_ns(const LinkModel& link, std::int64_t budget_bytes) const {
  std::int64_t shortest = kept_ns();
  std::vector<std::int64_t> unused(peak_bytes.size() + 1, 0);  // may be absent, and is not used again: change in bytes
  std::int32_t first_copy = 0;
  for (const StepGap& gap : gaps) {
    first_copy =
        &gap == gaps.data() ? storages[gap.storage].copy_point : std::min(first_copy, storages[gap.storage].copy_point);
    if (gap.use >= 0) continue;
    unused[gap.first] += storages[gap.storage].bytes;
    unused[gap.last + 1] -= storages[gap.storage].bytes;
  }
  const auto copied_ns = [](std::int64_t bytes, double bytes_per_s) {  // rounded down: a copy takes no less
    return static_cast<std::int64_t>(static_cast<double>(std::max<std::int64_t>(bytes, 0)) / bytes_per_s * 1e9);
  };
  const std::int64_t computed = std::accumulate(compute_ns.begin(), compute_ns.end(), std::int64_t{0});
  const std::int64_t begin =
      std::accumulate(compute_ns.begin(), compute_ns.begin() + first_copy + 1, std::int64_t{0});  // of the first copy
  std::int64_t before = 0;  // computed before the interval
  std::int64_t left = 0;    // bytes that are not used again
  for (std::size_t interval = 0; interval < peak_bytes.size(); ++interval) {
    left += unused[interval];
    const std::int64_t over = peak_bytes[interval] - budget_bytes;
    if (over > 0) {
      const std::int64_t behind = computed - before - compute_ns[interval];
      const std::int64_t reached =
          std::max(before, begin + copied_ns(over, link.to_host_bytes_per_s)) + compute_ns[interval];
      shortest = std::max(shortest, reached + std::max(behind, copied_ns(over - left, link.to_device_bytes_per_s)));
    }
    before += compute_ns[interval];
  }
  return shortest;
}

StepModel::StepModel(Shape shape, const LinkModel& link) : shape_(std::move(shape)), link_(link) {
  const std::size_t points = shape_.kinds.size();
  require(points > 0, "kinds", "at least one point");
  require(shape_.compute_ns.size() == points && shape_.peak_bytes.size() == points &&
              shape_.storages_of_points.size() == points,
          "points", "a compute time, a peak, a kind and a storage for each");
  require(shape_.issue_ns.empty() || shape_.issue_ns.size() == points, "issue_ns", "a time for each point, or none");
  require(shape_.copy_issue_ns >= 0, "copy_issue_ns", "0 or more");
  const auto last = static_cast<std::int32_t>(points) - 1;
  const auto storages = static_cast<std::int32_t>(shape_.storages.size());
  for (const std::int32_t storage : shape_.storages_of_points) {
    require(storage >= -1 && storage < storages, "storages_of_points", "indices of storages, or -1");
  }
  for (const StepStorage& storage : shape_.storages) {
    require(storage.bytes > 0 && storage.copy_point >= 0 && storage.copy_point <= last && storage.free_point >= 0 &&
                storage.end_point >= 0,
            "storages", "positive sizes, and points of the step");
  }
  for (const StepGap& gap : shape_.gaps) {
    require(gap.storage >= 0 && gap.storage < storages && gap.use >= -1 && gap.use <= last && gap.first > 0 &&
                gap.first <= gap.last && gap.last <= last && gap.release_point >= 0 && gap.release_point < gap.first,
            "gaps", "storages, uses, intervals and release points of the step");
  }
  gaps_by_first_.resize(gaps());
  std::iota(gaps_by_first_.begin(), gaps_by_first_.end(), 0);
  gaps_by_last_ = gaps_by_first_;
  const auto by = [this](auto member) {
    return [this, member](std::int32_t one, std::int32_t other) {
      return shape_.gaps[one].*member < shape_.gaps[other].*member;
    };
  };
  std::stable_sort(gaps_by_first_.begin(), gaps_by_first_.end(), by(&StepGap::first));
  std::stable_sort(gaps_by_last_.begin(), gaps_by_last_.end(), by(&StepGap::last));
  gaps_by_storage_ = gaps_by_first_;
  std::iota(gaps_by_storage_.begin(), gaps_by_storage_.end(), 0);
  std::stable_sort(gaps_by_storage_.begin(), gaps_by_storage_.end(), by(&StepGap::storage));
  gaps_from_furthest_.resize(gaps());
  std::iota(gaps_from_furthest_.begin(), gaps_from_furthest_.end(), 0);
  // As an unsigned number, a use of -1 (none) is the largest.
  const auto use = [this](std::int32_t gap) { return static_cast<std::uint32_t>(shape_.gaps[gap].use); };
  std::stable_sort(gaps_from_furthest_.begin(), gaps_from_furthest_.end(),
                   [&](std::int32_t one, std::int32_t other) { return use(one) > use(other); });
  gaps_by_use_ = gaps_by_storage_;
  std::stable_sort(gaps_by_use_.begin(), gaps_by_use_.end(),
                   [&](std::int32_t one, std::int32_t other) { return use(one) < use(other); });
  ranks_from_furthest_.resize(gaps());
  for (std::size_t rank = 0; rank < gaps(); ++rank) {
    ranks_from_furthest_[gaps_from_furthest_[rank]] = static_cast<std::int32_t>(rank);
  }
}

ScratchList<std::int64_t> StepModel::room_of(const ScratchList<std::int64_t>& change, std::int64_t budget_bytes,
                                             Scratch& scratch) const {
  ScratchList<std::int64_t> room = scratch.list<std::int64_t>(points(), 0);
  std::int64_t absent = 0;
  for (std::size_t interval = 0; interval < points(); ++interval) {
    absent += change[interval];
    room[interval] = budget_bytes - shape_.peak_bytes[interval] + absent;
  }
  return room;
}

std::optional<std::vector<StepAbsence>> StepModel::schedule(const std::string& may_leave, std::int64_t budget_bytes,
                                                            const std::vector<MoreRoom>& more_room,
                                                            ScheduleOptions options) const {
  require(may_leave.size() == gaps(), "may_leave", "a flag for each gap");
  Scratch scratch;
  const auto released = release_late(may_leave, budget_bytes, more_room, options.furthest_first, scratch);
  if (!released.has_value()) return std::nullopt;
  return reload_early(*released, budget_bytes, options.in_order, scratch);
}

std::string StepModel::cover(const std::vector<std::int32_t>& order, std::int64_t budget_bytes) const {
  Scratch scratch;
  ScratchList<std::int64_t> change = scratch.list<std::int64_t>(points() + 1, 0);
  for (std::size_t index = 0; index < gaps(); ++index) {
    const auto gap = static_cast<std::int32_t>(index);
    change[shape_.gaps[gap].first] += bytes_of(gap);
    change[shape_.gaps[gap].last + 1] -= bytes_of(gap);
  }
  RoomTree tree(room_of(change, budget_bytes, scratch));
  std::string may_leave(gaps(), '\1');
  for (const std::int32_t index : order) {
    require(index >= 0 && index < static_cast<std::int32_t>(gaps()), "order", "indices of gaps");
    const StepGap& gap = shape_.gaps[index];
    if (may_leave[index] == 0 || tree.last_below(gap.last + 1, bytes_of(index)) >= gap.first) continue;
    tree.add(gap.first, gap.last + 1, -bytes_of(index));
    may_leave[index] = 0;
  }
  return may_leave;
}

std::optional<ScratchList<StepAbsence>> StepModel::release_late(const std::string& may_leave, std::int64_t budget_bytes,
                                                                const std::vector<MoreRoom>& more_room,
                                                                bool furthest_first, Scratch& scratch) const {
  ScratchList<std::int64_t> more = scratch.list<std::int64_t>(points(), 0);
  for (const MoreRoom& one : more_room) {
    require(one.interval >= 0 && one.interval < static_cast<std::int32_t>(points()), "more_room",
            "intervals of the step");
    more[one.interval] = std::max(more[one.interval], one.bytes);
  }
  ScratchList<StepAbsence> released(scratch.memory());
  released.reserve(gaps());
  ScratchList<std::int64_t> back = scratch.list<std::int64_t>(points() + 1, 0);
  // The rank of a gap is its index (the order of offloads), or its position by the furthest use.
  WaitingRanks waiting(gaps(), scratch);
  const auto gap_at = [&](std::int32_t rank) { return furthest_first ? gaps_from_furthest_[rank] : rank; };
  std::size_t next = 0;
  std::int64_t absent = 0;
  for (std::int32_t interval = 0; interval < static_cast<std::int32_t>(points()); ++interval) {
    absent -= back[interval];
    for (; next < gaps() && shape_.gaps[gaps_by_first_[next]].first <= interval; ++next) {
      if (may_leave[gaps_by_first_[next]] != 0) {
        const std::int32_t gap = gaps_by_first_[next];
        waiting.push(furthest_first ? ranks_from_furthest_[gap] : gap);
      }
    }
    const std::int64_t missing = shape_.peak_bytes[interval] - budget_bytes;
    const std::int64_t wanted = missing + more[interval];
    while (absent < wanted) {
      while (!waiting.empty() && shape_.gaps[gap_at(waiting.lowest())].last < interval) waiting.pop();
      if (waiting.empty()) {
        if (absent < missing) return std::nullopt;
        break;
      }
      const std::int32_t gap = gap_at(waiting.lowest());
      waiting.pop();
      released.push_back({gap, interval - 1, -1});
      absent += bytes_of(gap);
      back[shape_.gaps[gap].last + 1] += bytes_of(gap);
    }
  }
  return released;
}

std::vector<StepAbsence> StepModel::reload_early(const ScratchList<StepAbsence>& released, std::int64_t budget_bytes,
                                                 bool in_order, Scratch& scratch) const {
  ScratchList<std::int32_t> release_points = scratch.list<std::int32_t>(gaps(), -1);
  ScratchList<std::int64_t> change = scratch.list<std::int64_t>(points() + 1, 0);
  for (const StepAbsence& absence : released) {
    release_points[absence.gap] = absence.release_point;
    change[absence.release_point + 1] += bytes_of(absence.gap);
    change[shape_.gaps[absence.gap].last + 1] -= bytes_of(absence.gap);
  }
  RoomTree tree(room_of(change, budget_bytes, scratch));
  std::vector<StepAbsence> absences;
  absences.reserve(released.size());
  std::int32_t earliest = -1;
  for (const std::int32_t index : gaps_by_last_) {
    if (release_points[index] < 0) continue;
    const StepGap& gap = shape_.gaps[index];
    const std::int32_t release_point = release_points[index];
    if (gap.use < 0) {
      absences.push_back({index, release_point, -1});
      continue;
    }
    std::int32_t blocked = std::max(tree.last_below(gap.last + 1, bytes_of(index)), release_point);
    if (in_order) blocked = earliest = std::max(blocked, std::min(earliest, gap.last));
    tree.add(blocked + 1, gap.last + 1, -bytes_of(index));
    if (blocked == release_point) continue;  // there is room for it during the whole gap
    absences.push_back({index, release_point, blocked == gap.use ? -1 : blocked});
  }
  return absences;
}

}  // namespace vdnn
