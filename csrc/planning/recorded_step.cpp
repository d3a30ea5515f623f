// The step with its rebuilds: rebuilding.py tells how, gaps.py what gaps are.
#include "planning/recorded_step.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "device/errors.h"

namespace vdnn {

namespace {

void require(bool holds, const char* what, const std::string& expected) {
  if (!holds) throw InvalidArgument(what, expected, "something else");
}

struct Read {
  std::int32_t use;
  std::int32_t done;
  bool operator<(const Read& other) const { return std::make_pair(use, done) < std::make_pair(other.use, other.done); }
};

// Places are points of the new step. `first_of` a point of the old is what happens first at it now, `place_of` it where
// it is itself.
class Rewriting {
 public:
  Rewriting(const RecordedStep& step, std::vector<std::int32_t> chosen)
      : points_(step.points()),
        lifetimes_(step.lifetimes()),
        chosen_(std::move(chosen)),
        is_missing_(lifetimes_.size(), false),
        is_chosen_(lifetimes_.size(), false),
        back_(lifetimes_.size(), -1),
        left_(lifetimes_.size(), -1),
        numbers_(lifetimes_.size(), -1),
        ends_(lifetimes_.size()),
        read_anew_(lifetimes_.size()),
        given_up_(points_.kinds.size()) {
    for (std::size_t index = 0; index < lifetimes_.size(); ++index) ends_[index] = lifetimes_[index].storage.end_point;
    std::sort(chosen_.begin(), chosen_.end());
    for (const std::int32_t index : chosen_) {
      require(index >= 0 && index < static_cast<std::int32_t>(lifetimes_.size()) &&
                  lifetimes_[index].rebuild.known_point >= 0,
              "chosen", "lifetimes that can be rebuilt");
      const RecordedLifetime& lifetime = lifetimes_[index];
      is_missing_[index] = is_chosen_[index] = true;
      for (const std::int32_t source : lifetime.rebuild.inputs) {
        ends_[source] = std::max(ends_[source], lifetime.storage.end_point);
      }
      if (lifetime.rebuild.kept_bytes == 0) continue;
      given_up_[lifetime.rebuild.known_point].push_back(index);
      numbers_[index] = static_cast<std::int32_t>(read_anew_.size());
      read_anew_.emplace_back();
    }
  }

  RebuiltStep run() {
    for (std::size_t index = 0; index < points_.kinds.size(); ++index) {
      const std::int64_t allocated = points_.allocated_bytes[index];
      compute_ns_ = points_.compute_ns[index];
      peak_ = points_.peak_bytes[index];
      first_of_.push_back(places());
      for (const std::int32_t given : given_up_[index]) encode(given, allocated);
      const std::int32_t used = points_.lifetimes[index];
      if (points_.kinds[index] == StepPoint::Use && used >= 0 && is_missing_[used])
        rebuild_with_inputs(used, allocated);
      place_of_.push_back(places());
      place(points_.kinds[index], used, allocated);
    }
    count_bytes();
    for (std::size_t index = 0; index < lifetimes_.size(); ++index) add_lifetime(static_cast<std::int32_t>(index));
    for (const std::int32_t index : chosen_) {
      if (numbers_[index] >= 0) add_storage(left_of(index), read_anew_[numbers_[index]]);
    }
    sort_gaps();
    return std::move(rebuilt_);
  }

 private:
  [[nodiscard]] std::int32_t places() const { return static_cast<std::int32_t>(rebuilt_.shape.kinds.size()); }

  void place(StepPoint kind, std::int32_t used, std::int64_t allocated) {
    rebuilt_.shape.kinds.push_back(kind);
    rebuilt_.shape.storages_of_points.push_back(used);
    rebuilt_.shape.compute_ns.push_back(compute_ns_);
    rebuilt_.shape.peak_bytes.push_back(peak_);
    compute_ns_ = 0;
    peak_ = allocated;
  }

  // What it is made from and that is missing too comes before it. A chain may be as long as the network is deep.
  void rebuild_with_inputs(std::int32_t index, std::int64_t allocated) {
    std::vector<std::pair<std::int32_t, bool>> waiting{{index, false}};
    while (!waiting.empty()) {
      const auto [one, is_ready] = waiting.back();
      waiting.pop_back();
      if (!is_missing_[one]) continue;
      if (is_ready) {
        rebuild(one, allocated);
        continue;
      }
      waiting.emplace_back(one, true);
      const std::vector<std::int32_t>& inputs = lifetimes_[one].rebuild.inputs;
      for (auto source = inputs.rbegin(); source != inputs.rend(); ++source) waiting.emplace_back(*source, false);
    }
  }

  // What a codec leaves is saved where it is made.
  void encode(std::int32_t index, std::int64_t allocated) {
    const StepRebuild& rebuild = lifetimes_[index].rebuild;
    compute_ns_ += rebuild.giving_up_ns;
    peak_ = std::max(peak_, allocated + std::max(rebuild.kept_bytes, rebuild.giving_up_bytes));
    left_[index] = places();
    place(StepPoint::Save, numbers_[index], allocated);
  }

  [[nodiscard]] StepStorage left_of(std::int32_t index) const {
    const std::int32_t place = left_[index];
    return {lifetimes_[index].rebuild.kept_bytes, place, place, std::max(place, first_of_[ends_[index]])};
  }

  void rebuild(std::int32_t index, std::int64_t allocated) {
    const RecordedLifetime& lifetime = lifetimes_[index];
    const std::int32_t begin = places();
    std::vector<std::int32_t> inputs = lifetime.rebuild.inputs;
    if (numbers_[index] >= 0) inputs.push_back(numbers_[index]);
    for (const std::int32_t source : inputs) place(StepPoint::Use, source, allocated);
    compute_ns_ += lifetime.rebuild.compute_ns;
    peak_ = std::max(peak_, allocated + lifetime.rebuild.extra_bytes) - lifetime.storage.bytes;
    back_[index] = places();
    is_missing_[index] = false;
    std::int32_t use = begin;
    for (const std::int32_t source : inputs) read_anew_[source].push_back({use++, places()});
  }

  void count_bytes() {
    std::vector<std::int64_t> change(rebuilt_.shape.kinds.size() + 1, 0);
    for (const std::int32_t index : chosen_) {
      const RecordedLifetime& lifetime = lifetimes_[index];
      const std::int32_t known = lifetime.rebuild.known_point;
      std::int32_t held = std::max(known, lifetime.storage.free_point);
      for (std::size_t use = 0; use < lifetime.uses.size() && lifetime.uses[use] <= known; ++use) {
        held = std::max(held, lifetime.read[use]);
      }
      std::int32_t begin = held + 1 < static_cast<std::int32_t>(first_of_.size()) ? first_of_[held + 1] : places();
      if (left_[index] >= 0 && held == known) begin = left_[index] + 1;
      const std::int32_t end = back_[index] >= 0 ? back_[index] : first_of_[lifetime.storage.end_point] + 1;
      if (begin < end) {
        change[begin] -= lifetime.storage.bytes;
        change[end] += lifetime.storage.bytes;
      }
      if (left_[index] < 0) continue;
      const StepStorage left = left_of(index);
      change[left.copy_point + 1] += left.bytes;
      change[left.end_point + 1] -= left.bytes;
    }
    for (std::size_t index = 0; index < lifetimes_.size(); ++index) {
      const StepStorage& storage = lifetimes_[index].storage;
      if (storage.end_point == ends_[index]) continue;
      change[first_of_[storage.end_point] + 1] += storage.bytes;
      change[first_of_[ends_[index]] + 1] -= storage.bytes;
    }
    std::int64_t more = 0;
    for (std::size_t place = 0; place < rebuilt_.shape.peak_bytes.size(); ++place) {
      more += change[place];
      rebuilt_.shape.peak_bytes[place] += more;
    }
  }

  void add_lifetime(std::int32_t index) {
    const RecordedLifetime& old = lifetimes_[index];
    const std::int32_t end = first_of_[ends_[index]];
    const StepStorage storage{old.storage.bytes, place_of_[old.storage.copy_point],
                              is_chosen_[index] ? end : first_of_[old.storage.free_point], end};
    std::vector<Read> reads;
    reads.reserve(old.uses.size() + read_anew_[index].size());
    for (std::size_t use = 0; use < old.uses.size(); ++use) {
      reads.push_back({place_of_[old.uses[use]], first_of_[old.read[use]]});
    }
    reads.insert(reads.end(), read_anew_[index].begin(), read_anew_[index].end());
    std::sort(reads.begin(), reads.end());
    add_storage(storage, reads);
  }

  void add_storage(const StepStorage& storage, const std::vector<Read>& reads) {
    const auto index = static_cast<std::int32_t>(rebuilt_.shape.storages.size());
    const std::int32_t end = storage.end_point;
    rebuilt_.shape.storages.push_back(storage);
    std::int32_t release = storage.copy_point;
    std::int32_t held = std::max(release, storage.free_point);
    for (const Read& one : reads) {
      if (one.use > release) {
        const std::int32_t last = std::min(one.use, end);
        if (held < last) add_gap({index, one.use, held + 1, last}, release);
        release = one.use;
      }
      held = std::max({held, one.use, one.done});
    }
    if (held < end) add_gap({index, -1, held + 1, end}, release);
  }

  void add_gap(const StepGap& gap, std::int32_t release_point) {
    rebuilt_.shape.gaps.push_back(gap);
    rebuilt_.release_points.push_back(release_point);
  }

  // In the order in which copies out are issued.
  void sort_gaps() {
    std::vector<std::int32_t> order(rebuilt_.shape.gaps.size());
    std::iota(order.begin(), order.end(), 0);
    const auto copy_point = [this](std::int32_t gap) {
      return rebuilt_.shape.storages[rebuilt_.shape.gaps[gap].storage].copy_point;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t one, std::int32_t other) { return copy_point(one) < copy_point(other); });
    std::vector<StepGap> gaps;
    std::vector<std::int32_t> release_points;
    for (const std::int32_t gap : order) {
      gaps.push_back(rebuilt_.shape.gaps[gap]);
      release_points.push_back(rebuilt_.release_points[gap]);
    }
    rebuilt_.shape.gaps = std::move(gaps);
    rebuilt_.release_points = std::move(release_points);
  }

  const RecordedStep::Points& points_;
  const std::vector<RecordedLifetime>& lifetimes_;
  std::vector<std::int32_t> chosen_;
  RebuiltStep rebuilt_;
  std::int64_t compute_ns_ = 0;  // of the interval that the next place ends
  std::int64_t peak_ = 0;
  std::vector<std::int32_t> first_of_;
  std::vector<std::int32_t> place_of_;
  std::vector<bool> is_missing_;  // chosen, and not rebuilt yet
  std::vector<bool> is_chosen_;
  std::vector<std::int32_t> back_;     // the interval in which it is rebuilt, or -1
  std::vector<std::int32_t> left_;     // where what a codec leaves of it is saved, or -1
  std::vector<std::int32_t> numbers_;  // of that, behind the lifetimes
  std::vector<std::int32_t> ends_;  // in points of the old step: what others are made from stays as long as their graph
  std::vector<std::vector<Read>> read_anew_;
  std::vector<std::vector<std::int32_t>> given_up_;  // before a point of the old step, leaving something behind
};

}  // namespace

std::int64_t RebuiltStep::compute_ns() const {
  return std::accumulate(shape.compute_ns.begin(), shape.compute_ns.end(), std::int64_t{0});
}

std::int64_t RebuiltStep::peak_bytes() const {
  return *std::max_element(shape.peak_bytes.begin(), shape.peak_bytes.end());
}

std::int64_t RebuiltStep::least_bytes() const {
  std::vector<std::int64_t> change(shape.peak_bytes.size() + 1, 0);
  for (const StepGap& gap : shape.gaps) {
    change[gap.first] += shape.storages[gap.storage].bytes;
    change[gap.last + 1] -= shape.storages[gap.storage].bytes;
  }
  std::int64_t absent = 0;
  std::int64_t least = 0;
  for (std::size_t interval = 0; interval < shape.peak_bytes.size(); ++interval) {
    absent += change[interval];
    least = std::max(least, shape.peak_bytes[interval] - absent);
  }
  return least;
}

RecordedStep::RecordedStep(Points points, std::vector<RecordedLifetime> lifetimes)
    : points_(std::move(points)), lifetimes_(std::move(lifetimes)) {
  const auto count = static_cast<std::int32_t>(points_.kinds.size());
  const std::size_t size = points_.kinds.size();
  require(size > 0 && points_.compute_ns.size() == size && points_.allocated_bytes.size() == size &&
              points_.peak_bytes.size() == size && points_.lifetimes.size() == size,
          "points", "at least one, and one compute time, size, peak and lifetime for each");
  const auto storages = static_cast<std::int32_t>(lifetimes_.size());
  for (const std::int32_t lifetime : points_.lifetimes) {
    require(lifetime >= -1 && lifetime < storages, "lifetimes of points", "numbers of lifetimes, or -1");
  }
  const auto is_point = [&](std::int32_t point) { return point >= 0 && point < count; };
  for (const RecordedLifetime& one : lifetimes_) {
    require(one.storage.bytes > 0 && is_point(one.storage.copy_point) && is_point(one.storage.free_point) &&
                is_point(one.storage.end_point) && one.uses.size() == one.read.size() &&
                std::all_of(one.uses.begin(), one.uses.end(), is_point) &&
                std::all_of(one.read.begin(), one.read.end(), is_point),
            "lifetimes", "sizes above zero, and points of the step");
    require(one.rebuild.known_point < count && one.rebuild.kept_bytes >= 0 && one.rebuild.giving_up_bytes >= 0 &&
                std::all_of(
                    one.rebuild.inputs.begin(), one.rebuild.inputs.end(),
                    [&](std::int32_t source) { return source >= 0 && source < storages; }),
            "rebuilds", "points and lifetimes of the step");
  }
}

RebuiltStep RecordedStep::with_rebuilds(const std::vector<std::int32_t>& chosen) const {
  return Rewriting(*this, chosen).run();
}

}  // namespace vdnn
