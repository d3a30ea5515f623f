// Computes the step with recomputes, and the bytes of a step under a plan.
#include "planning/recorded_step.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "device/errors.h"

namespace vdnn {

namespace {

void require(bool holds, const char* what, const std::string& expected) {
  if (!holds) throw InvalidArgument(what, expected, "inconsistent values");
}

struct Read {
  std::int32_t use;
  std::int32_t done;
  bool operator<(const Read& other) const { return std::make_pair(use, done) < std::make_pair(other.use, other.done); }
};

struct AddedRead {
  Read one;
  std::int32_t before;  // the added read of the same storage before this one, or -1
};

// Inserts the encodings and recomputes of the chosen lifetimes into the step. Every old point becomes some new points:
// first_of_ has the first of them, and point_of_ the one that is the old point itself.
//
// A search asks most often for the smallest budget alone, which needs the peaks of the new points and none of the rest.
enum class Wanted : std::uint8_t { Peaks, Model, Recording };

class Rewriting {
 public:
  Rewriting(const RecordedStep& step, std::vector<std::int32_t> chosen, Wanted wanted)
      : wanted_(wanted),
        points_(step.points()),
        lifetimes_(step.lifetimes()),
        chosen_(std::move(chosen)),
        is_missing_(lifetimes_.size(), 0),
        is_chosen_(lifetimes_.size(), 0),
        recomputed_at_(lifetimes_.size(), -1),
        encoded_at_(lifetimes_.size(), -1),
        encoding_numbers_(lifetimes_.size(), -1),
        ends_(lifetimes_.size()),
        first_added_(lifetimes_.size(), -1),
        first_encoded_(points_.kinds.size(), -1),
        next_encoded_(lifetimes_.size(), -1) {
    for (std::size_t index = 0; index < lifetimes_.size(); ++index) ends_[index] = lifetimes_[index].storage.end_point;
    std::sort(chosen_.begin(), chosen_.end());
    for (const std::int32_t index : chosen_) {
      require(index >= 0 && index < static_cast<std::int32_t>(lifetimes_.size()) &&
                  lifetimes_[index].recompute.known_point >= 0,
              "chosen", "lifetimes that can be recomputed");
      const RecordedLifetime& lifetime = lifetimes_[index];
      is_missing_[index] = is_chosen_[index] = 1;
      for (const std::int32_t source : lifetime.recompute.inputs) {
        ends_[source] = std::max(ends_[source], lifetime.storage.end_point);
      }
      if (lifetime.recompute.kept_bytes == 0) continue;
      encoding_numbers_[index] = static_cast<std::int32_t>(first_added_.size());
      first_added_.push_back(-1);
    }
    for (auto index = chosen_.rbegin(); index != chosen_.rend(); ++index) {
      if (encoding_numbers_[*index] < 0) continue;
      std::int32_t& first = first_encoded_[lifetimes_[*index].recompute.known_point];
      next_encoded_[*index] = first;
      first = *index;
    }
    const std::size_t most_points = points_.kinds.size() + 4 * chosen_.size();
    shape_.peak_bytes.reserve(most_points);
    first_of_.reserve(points_.kinds.size());
    point_of_.reserve(points_.kinds.size());
    if (wanted_ == Wanted::Peaks) return;
    shape_.kinds.reserve(most_points);
    shape_.storages_of_points.reserve(most_points);
    shape_.compute_ns.reserve(most_points);
    shape_.issue_ns.reserve(most_points);
    if (wanted_ == Wanted::Recording) {
      allocated_.reserve(most_points);
      recorded_.reserve(most_points);
      return;
    }
    shape_.storages.reserve(first_added_.size());
    shape_.gaps.reserve(2 * first_added_.size());
  }

  RecordedStep recording() {
    add_points();
    std::vector<RecordedLifetime> lifetimes;
    lifetimes.reserve(first_added_.size());
    each_storage([&](const StepStorage& storage, const std::vector<Read>& reads) {
      RecordedLifetime made{storage, {}, {}, {{}, -1, 0, 0, 0, 0, 0, 0, 0}};
      made.uses.reserve(reads.size());
      made.read.reserve(reads.size());
      for (const Read& one : reads) {
        made.uses.push_back(one.use);
        made.read.push_back(one.done);
      }
      const std::size_t index = lifetimes.size();
      if (index < lifetimes_.size()) {
        for (const std::int32_t save : lifetimes_[index].saves) made.saves.push_back(point_of_[save]);
        made.first_size = lifetimes_[index].first_size;
      } else {
        made.saves.push_back(storage.copy_point);
        made.first_size.push_back(storage.bytes);
      }
      lifetimes.push_back(std::move(made));
    });
    RecordedStep::Points points{std::move(shape_.compute_ns),
                                std::move(allocated_),
                                std::move(shape_.peak_bytes),
                                std::move(shape_.kinds),
                                std::move(shape_.storages_of_points),
                                std::move(shape_.issue_ns),
                                points_.synchronizes,
                                std::move(recorded_)};
    if (!points_.dimensions.empty()) {
      for (std::size_t point = 0; point < points.kinds.size(); ++point) {
        const std::int32_t recorded = points.recorded[point];
        const std::int32_t of_encoded = points.kinds[point] == StepPoint::Save ? 1 : -1;
        points.dimensions.push_back(recorded >= 0 ? points_.dimensions[recorded] : of_encoded);
      }
    }
    return {std::move(points), std::move(lifetimes)};
  }

  // Its gaps are in the order of the storages.
  StepModel::Shape model() {
    shape_.synchronizes = points_.synchronizes;
    add_points();
    each_storage([this](const StepStorage& storage, const std::vector<Read>& reads) {
      const auto index = static_cast<std::int32_t>(shape_.storages.size());
      shape_.storages.push_back(storage);
      each_gap(storage, reads, [&](std::int32_t use, std::int32_t first, std::int32_t last, std::int32_t release) {
        shape_.gaps.push_back({index, use, first, last, release});
      });
    });
    return std::move(shape_);
  }

  std::vector<std::int64_t> least_peaks() {
    add_points();
    const std::size_t points = shape_.peak_bytes.size();
    std::vector<std::int64_t> change(points + 1, 0);
    each_storage([&](const StepStorage& storage, const std::vector<Read>& reads) {
      each_gap(storage, reads, [&](std::int32_t, std::int32_t first, std::int32_t last, std::int32_t) {
        change[first] += storage.bytes;
        change[last + 1] -= storage.bytes;
      });
    });
    std::int64_t absent = 0;
    for (std::size_t interval = 0; interval < points; ++interval) {
      absent += change[interval];
      shape_.peak_bytes[interval] -= absent;
    }
    return std::move(shape_.peak_bytes);
  }

  // Sorts gaps by the order in which offloads are issued.
  static void sort_gaps(StepModel::Shape& shape) {
    const auto copy_point = [&shape](const StepGap& gap) { return shape.storages[gap.storage].copy_point; };
    std::stable_sort(shape.gaps.begin(), shape.gaps.end(),
                     [&](const StepGap& one, const StepGap& other) { return copy_point(one) < copy_point(other); });
  }

 private:
  void add_points() {
    for (std::size_t index = 0; index < points_.kinds.size(); ++index) {
      const std::int64_t allocated = points_.allocated_bytes[index];
      compute_ns_ = points_.compute_ns[index];
      issue_ns_ = points_.issue_ns[index];
      peak_ = points_.peak_bytes[index];
      first_of_.push_back(new_points());
      for (std::int32_t one = first_encoded_[index]; one >= 0; one = next_encoded_[one]) encode(one, allocated);
      const std::int32_t used = points_.lifetimes[index];
      if (points_.kinds[index] == StepPoint::Use && used >= 0 && is_missing_[used] != 0)
        recompute_with_inputs(used, allocated);
      point_of_.push_back(new_points());
      add_point(points_.kinds[index], used, allocated, static_cast<std::int32_t>(index));
    }
    count_bytes();
  }

  [[nodiscard]] std::int32_t new_points() const { return static_cast<std::int32_t>(shape_.peak_bytes.size()); }

  // `recorded`: the old point that it is, or -1.
  void add_point(StepPoint kind, std::int32_t used, std::int64_t allocated, std::int32_t recorded) {
    shape_.peak_bytes.push_back(peak_);
    peak_ = allocated;
    if (wanted_ == Wanted::Peaks) return;
    if (wanted_ == Wanted::Recording) {
      allocated_.push_back(allocated);
      recorded_.push_back(recorded);
    }
    shape_.kinds.push_back(kind);
    shape_.storages_of_points.push_back(used);
    shape_.compute_ns.push_back(compute_ns_);
    shape_.issue_ns.push_back(issue_ns_);
    compute_ns_ = issue_ns_ = 0;
  }

  // Recomputes its missing inputs first. Iterative, because a chain may be as long as the network is deep.
  void recompute_with_inputs(std::int32_t index, std::int64_t allocated) {
    waiting_.assign({{index, false}});
    while (!waiting_.empty()) {
      const auto [one, is_ready] = waiting_.back();
      waiting_.pop_back();
      if (is_missing_[one] == 0) continue;
      if (is_ready) {
        recompute(one, allocated);
        continue;
      }
      waiting_.emplace_back(one, true);
      const std::vector<std::int32_t>& inputs = lifetimes_[one].recompute.inputs;
      for (auto source = inputs.rbegin(); source != inputs.rend(); ++source) waiting_.emplace_back(*source, false);
    }
  }

  // The encoding that a codec keeps is saved at the point at which it is computed.
  void encode(std::int32_t index, std::int64_t allocated) {
    const StepRecompute& recompute = lifetimes_[index].recompute;
    compute_ns_ += recompute.discard_ns;
    issue_ns_ += recompute.discard_issue_ns;
    peak_ = std::max(peak_, allocated + std::max(recompute.kept_bytes, recompute.discard_bytes));
    encoded_at_[index] = new_points();
    add_point(StepPoint::Save, encoding_numbers_[index], allocated, -1);
  }

  [[nodiscard]] StepStorage encoding_of(std::int32_t index) const {
    const std::int32_t saved = encoded_at_[index];
    return {lifetimes_[index].recompute.kept_bytes, saved, saved, std::max(saved, first_of_[ends_[index]])};
  }

  void recompute(std::int32_t index, std::int64_t allocated) {
    const RecordedLifetime& lifetime = lifetimes_[index];
    for (const std::int32_t source : lifetime.recompute.inputs) read_again(source, allocated);
    if (encoding_numbers_[index] >= 0) read_again(encoding_numbers_[index], allocated);
    compute_ns_ += lifetime.recompute.compute_ns;
    issue_ns_ += lifetime.recompute.issue_ns;
    peak_ = std::max(peak_, allocated + lifetime.recompute.extra_bytes) - lifetime.storage.bytes;
    recomputed_at_[index] = new_points();
    is_missing_[index] = 0;
    for (auto read = added_.rbegin(); read != added_.rend() && read->one.done < 0; ++read)
      read->one.done = new_points();
  }

  // A recompute reads a storage at a new point. It has done so at the point behind its last input.
  void read_again(std::int32_t source, std::int64_t allocated) {
    added_.push_back({{new_points(), -1}, first_added_[source]});
    first_added_[source] = static_cast<std::int32_t>(added_.size()) - 1;
    add_point(StepPoint::Use, source, allocated, -1);
  }

  void count_bytes() {
    std::vector<std::int64_t> change(shape_.peak_bytes.size() + 1, 0);
    for (const std::int32_t index : chosen_) {
      const RecordedLifetime& lifetime = lifetimes_[index];
      const std::int32_t known = lifetime.recompute.known_point;
      const std::int32_t first = lifetime.absent(known, -1).first;
      std::int32_t begin = first < static_cast<std::int32_t>(first_of_.size()) ? first_of_[first] : new_points();
      if (encoded_at_[index] >= 0 && first == known + 1) begin = encoded_at_[index] + 1;
      const std::int32_t end =
          recomputed_at_[index] >= 0 ? recomputed_at_[index] : first_of_[lifetime.storage.end_point] + 1;
      if (begin < end) {
        change[begin] -= lifetime.storage.bytes;
        change[end] += lifetime.storage.bytes;
      }
      if (encoded_at_[index] < 0) continue;
      const StepStorage encoding = encoding_of(index);
      change[encoding.copy_point + 1] += encoding.bytes;
      change[encoding.end_point + 1] -= encoding.bytes;
    }
    for (std::size_t index = 0; index < lifetimes_.size(); ++index) {
      const StepStorage& storage = lifetimes_[index].storage;
      if (storage.end_point == ends_[index]) continue;
      change[first_of_[storage.end_point] + 1] += storage.bytes;
      change[first_of_[ends_[index]] + 1] -= storage.bytes;
    }
    std::int64_t more = 0;
    for (std::size_t point = 0; point < shape_.peak_bytes.size(); ++point) {
      more += change[point];
      shape_.peak_bytes[point] += more;
      if (wanted_ == Wanted::Recording) allocated_[point] += more + change[point + 1];
    }
    if (wanted_ != Wanted::Recording) return;
    for (const std::int32_t index : chosen_) {  // it is absent at the point before the interval of its recompute
      if (recomputed_at_[index] > 0) allocated_[recomputed_at_[index] - 1] -= lifetimes_[index].storage.bytes;
    }
  }

  // Calls `visit` with each storage of the new step and its reads in order: the lifetimes, and then the encodings.
  template <typename Visit>
  void each_storage(const Visit& visit) {
    for (std::size_t index = 0; index < lifetimes_.size(); ++index) {
      const RecordedLifetime& old = lifetimes_[index];
      const std::int32_t end = first_of_[ends_[index]];
      const StepStorage storage{old.storage.bytes, point_of_[old.storage.copy_point],
                                is_chosen_[index] != 0 ? end : first_of_[old.storage.free_point], end};
      reads_.clear();
      for (std::size_t use = 0; use < old.uses.size(); ++use) {
        reads_.push_back({point_of_[old.uses[use]], first_of_[old.read[use]]});
      }
      take_added(static_cast<std::int32_t>(index));
      visit(storage, reads_);
    }
    for (const std::int32_t index : chosen_) {
      if (encoding_numbers_[index] < 0) continue;
      reads_.clear();
      take_added(encoding_numbers_[index]);
      visit(encoding_of(index), reads_);
    }
  }

  void take_added(std::int32_t storage) {
    if (first_added_[storage] < 0) return;  // the others are in order
    for (std::int32_t added = first_added_[storage]; added >= 0; added = added_[added].before) {
      reads_.push_back(added_[added].one);
    }
    std::sort(reads_.begin(), reads_.end());
  }

  // Calls `visit` with the use, the first and the last interval and the release point of each gap of a storage.
  template <typename Visit>
  static void each_gap(const StepStorage& storage, const std::vector<Read>& reads, const Visit& visit) {
    const std::int32_t end = storage.end_point;
    std::int32_t release = storage.copy_point;
    std::int32_t held = std::max(release, storage.free_point);
    for (const Read& one : reads) {
      if (one.use > release) {
        const std::int32_t last = std::min(one.use, end);
        if (held < last) visit(one.use, held + 1, last, release);
        release = one.use;
      }
      held = std::max({held, one.use, one.done});
    }
    if (held < end) visit(-1, held + 1, end, release);
  }

  const Wanted wanted_;
  const RecordedStep::Points& points_;
  const std::vector<RecordedLifetime>& lifetimes_;
  std::vector<std::int32_t> chosen_;
  StepModel::Shape shape_;
  std::vector<std::int64_t> allocated_;  // bytes at the new points
  std::vector<std::int32_t> recorded_;   // the old point that a new one is, or -1
  std::int64_t compute_ns_ = 0;          // of the interval that the next new point ends
  std::int64_t issue_ns_ = 0;
  std::int64_t peak_ = 0;
  std::vector<std::int32_t> first_of_;
  std::vector<std::int32_t> point_of_;
  std::vector<char> is_missing_;  // chosen, and not recomputed yet
  std::vector<char> is_chosen_;
  std::vector<std::int32_t> recomputed_at_;     // the interval in which it is recomputed, or -1
  std::vector<std::int32_t> encoded_at_;        // the new point at which its encoding is saved, or -1
  std::vector<std::int32_t> encoding_numbers_;  // the index of its encoding, after the lifetimes, or -1
  std::vector<std::int32_t> ends_;              // old points; an input stays until the graphs of its users end
  std::vector<AddedRead> added_;                // by recomputes
  std::vector<std::int32_t> first_added_;       // by storage: the last of its added reads, or -1
  std::vector<Read> reads_;                     // of the storage that is visited
  std::vector<std::pair<std::int32_t, bool>> waiting_;
  std::vector<std::int32_t> first_encoded_;  // by old point: the first lifetime that a codec encodes before it, or -1
  std::vector<std::int32_t> next_encoded_;   // by lifetime: the next one that is encoded at that point, or -1
};

}  // namespace

RecordedStep::RecordedStep(Points points, std::vector<RecordedLifetime> lifetimes)
    : points_(std::move(points)), lifetimes_(std::move(lifetimes)) {
  const auto count = static_cast<std::int32_t>(points_.kinds.size());
  const std::size_t size = points_.kinds.size();
  require(size > 0 && points_.compute_ns.size() == size && points_.allocated_bytes.size() == size &&
              points_.peak_bytes.size() == size && points_.lifetimes.size() == size && points_.issue_ns.size() == size,
          "points",
          "at least one point, and a compute and an issue time, allocated bytes, a peak and a lifetime for each");
  const auto storages = static_cast<std::int32_t>(lifetimes_.size());
  for (const std::int32_t lifetime : points_.lifetimes) {
    require(lifetime >= -1 && lifetime < storages, "lifetimes of points", "indices of lifetimes, or -1");
  }
  const auto is_point = [&](std::int32_t point) { return point >= 0 && point < count; };
  for (const RecordedLifetime& one : lifetimes_) {
    require(one.storage.bytes >= 0 && is_point(one.storage.copy_point) && is_point(one.storage.free_point) &&
                is_point(one.storage.end_point) && one.uses.size() == one.read.size() &&
                std::all_of(one.saves.begin(), one.saves.end(), is_point) &&
                std::all_of(one.uses.begin(), one.uses.end(), is_point) &&
                std::all_of(one.read.begin(), one.read.end(), is_point),
            "lifetimes", "sizes of 0 or more, points of the step, and a read for each use");
    require(one.recompute.known_point < count && one.recompute.kept_bytes >= 0 && one.recompute.discard_bytes >= 0 &&
                std::all_of(
                    one.recompute.inputs.begin(), one.recompute.inputs.end(),
                    [&](std::int32_t source) { return source >= 0 && source < storages; }),
            "recomputes", "points and lifetimes of the step");
  }
}

std::int32_t RecordedLifetime::use_after(std::int32_t point) const {
  const auto use = std::find_if(uses.begin(), uses.end(), [point](std::int32_t one) { return one > point; });
  return use == uses.end() ? -1 : *use;
}

StepIntervals RecordedLifetime::absent(std::int32_t release_point, std::int32_t reload_point) const {
  // The memory is freed at the release, or in the interval in which the last other holder releases it: that interval
  // still counts as held. A storage that was used is held until its use has been read.
  std::int32_t held = std::max(release_point, storage.free_point);
  for (std::size_t use = 0; use < uses.size(); ++use) {
    if (uses[use] <= release_point) held = std::max(held, read[use]);
  }
  std::int32_t last = storage.end_point;
  const std::int32_t use = use_after(release_point);
  if (use >= 0) last = std::min(last, use);
  if (reload_point >= 0) last = std::min(last, reload_point);
  return {held + 1, last};
}

StepModel::Shape RecordedStep::with_recomputes(const std::vector<std::int32_t>& chosen) const {
  StepModel::Shape shape = Rewriting(*this, chosen, Wanted::Model).model();
  Rewriting::sort_gaps(shape);
  return shape;
}

StepModel::Shape RecordedStep::shape(std::int64_t copy_issue_ns) const {
  StepModel::Shape shape{points_.compute_ns, points_.peak_bytes, points_.kinds,       points_.lifetimes, {}, {},
                         points_.issue_ns,   copy_issue_ns,      points_.synchronizes};
  shape.storages.reserve(lifetimes_.size());
  for (const RecordedLifetime& one : lifetimes_) shape.storages.push_back(one.storage);
  return shape;
}

std::int64_t RecordedStep::most_bytes() const {
  return *std::max_element(points_.peak_bytes.begin(), points_.peak_bytes.end());
}

bool RecordedStep::has_host() const {
  return std::any_of(points_.issue_ns.begin(), points_.issue_ns.end(), [](std::int64_t ns) { return ns != 0; });
}

std::int64_t RecordedStep::least_bytes(const std::vector<std::int32_t>& chosen) const {
  const std::vector<std::int64_t> peaks = Rewriting(*this, chosen, Wanted::Peaks).least_peaks();
  return *std::max_element(peaks.begin(), peaks.end());
}

std::vector<std::int64_t> RecordedStep::least_peaks() const {
  return Rewriting(*this, {}, Wanted::Peaks).least_peaks();
}

RecordedStep RecordedStep::recomputed(const std::vector<std::int32_t>& chosen) const {
  return Rewriting(*this, chosen, Wanted::Recording).recording();
}

std::vector<std::int32_t> RecordedStep::candidates(bool by_issue) const {
  std::vector<std::pair<double, std::int32_t>> found;
  for (std::size_t index = 0; index < lifetimes_.size(); ++index) {
    const RecordedLifetime& one = lifetimes_[index];
    const StepRecompute& recompute = one.recompute;
    if (recompute.known_point < 0) continue;
    if (!one.uses.empty() && one.uses[0] <= recompute.known_point) continue;  // used before it could be discarded
    if (one.absent(recompute.known_point, -1).empty()) continue;
    const std::int64_t discard_issue_ns = recompute.kept_bytes == 0 ? 0 : recompute.discard_issue_ns;
    const std::int64_t cost_ns =
        by_issue ? recompute.issue_ns + discard_issue_ns : recompute.discard_ns + recompute.compute_ns;
    const std::int64_t saved_bytes = std::max<std::int64_t>(1, one.storage.bytes - recompute.kept_bytes);
    found.emplace_back(static_cast<double>(cost_ns) / static_cast<double>(saved_bytes), index);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::int32_t> order;
  order.reserve(found.size());
  for (const auto& [cost, index] : found) order.push_back(index);
  return order;
}

void RecordedStep::require_absences(const std::vector<PlannedAbsence>& absences) const {
  const auto lifetimes = static_cast<std::int32_t>(lifetimes_.size());
  const auto last = static_cast<std::int32_t>(points_.kinds.size()) - 1;
  for (const PlannedAbsence& one : absences) {
    require(one.lifetime >= 0 && one.lifetime < lifetimes && one.release_point >= 0 && one.release_point <= last &&
                one.reload_point >= -1 && one.reload_point <= last,
            "absences", "lifetimes and points of the step");
  }
}

std::vector<std::int64_t> RecordedStep::interval_bytes(const std::vector<PlannedAbsence>& absences) const {
  require_absences(absences);
  std::vector<std::int64_t> change(points_.kinds.size() + 1, 0);
  for (const PlannedAbsence& one : absences) {
    const RecordedLifetime& lifetime = lifetimes_[one.lifetime];
    const StepIntervals absent = lifetime.absent(one.release_point, one.reload_point);
    if (absent.empty()) continue;
    change[absent.first] -= lifetime.storage.bytes;
    change[absent.last + 1] += lifetime.storage.bytes;
  }
  std::vector<std::int64_t> peaks = points_.peak_bytes;
  std::int64_t more = 0;
  for (std::size_t interval = 0; interval < peaks.size(); ++interval) {
    more += change[interval];
    peaks[interval] += more;
  }
  return peaks;
}

std::vector<std::int64_t> RecordedStep::stored_bytes(const std::vector<PlannedAbsence>& absences,
                                                     const std::vector<bool>& counts) const {
  require_absences(absences);
  require(counts.size() == lifetimes_.size(), "counts", "a flag for each lifetime");
  std::vector<std::int64_t> stored(points_.kinds.size() + 1, 0);
  const auto add = [&stored](std::int32_t first, std::int32_t end, std::int64_t bytes) {
    stored[first] += bytes;
    stored[end] -= bytes;
  };
  for (std::size_t index = 0; index < lifetimes_.size(); ++index) {
    const RecordedLifetime& one = lifetimes_[index];
    require(!one.saves.empty(), "lifetimes", "a save of each lifetime");
    if (counts[index]) add(one.saves[0], one.storage.end_point, one.storage.bytes);
  }
  for (const PlannedAbsence& one : absences) {
    if (!counts[one.lifetime]) continue;
    const RecordedLifetime& lifetime = lifetimes_[one.lifetime];
    const std::int32_t back = lifetime.absent(one.release_point, one.reload_point).last;
    if (one.release_point < back) add(one.release_point, back, -lifetime.storage.bytes);
  }
  std::partial_sum(stored.begin(), stored.end(), stored.begin());
  stored.pop_back();
  return stored;
}

}  // namespace vdnn
