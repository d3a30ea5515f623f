// Implements SizeCurve and resized().
#include "planning/resized_step.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "device/errors.h"

namespace vdnn {

namespace {

using Steps = std::vector<std::reference_wrapper<const RecordedStep>>;
using Sizes = std::vector<std::int64_t>;

constexpr double rounding = 0.01;  // bytes are rounded to blocks of an allocator
constexpr double nothing = 1e-3;   // less than a byte: the error of floating-point numbers

std::int64_t up(double value) {
  return static_cast<std::int64_t>(std::ceil(value - nothing));
}

double product(const Sizes& sizes) {
  double found = 1;
  for (const std::int64_t size : sizes) found *= static_cast<double>(size);
  return found;
}

bool save_alike(const RecordedStep& one, const RecordedStep& other) {
  const RecordedStep::Points& points = one.points();
  const RecordedStep::Points& others = other.points();
  return points.kinds == others.kinds && points.lifetimes == others.lifetimes &&
         points.dimensions == others.dimensions &&
         std::equal(one.lifetimes().begin(), one.lifetimes().end(), other.lifetimes().begin(), other.lifetimes().end(),
                    [](const RecordedLifetime& mine, const RecordedLifetime& theirs) {
                      return mine.saves == theirs.saves && mine.uses == theirs.uses;
                    });
}

// The bytes of the lifetimes that exist at each point with everything kept.
Sizes live_bytes(const std::vector<RecordedLifetime>& lifetimes, std::size_t points) {
  Sizes live(points + 1, 0);
  for (const RecordedLifetime& one : lifetimes) {
    live[one.saves.at(0)] += one.storage.bytes;
    live[one.storage.end_point] -= one.storage.bytes;
  }
  for (std::size_t point = 1; point <= points; ++point) live[point] += live[point - 1];
  live.pop_back();
  return live;
}

Amounts amounts_of(const Steps& steps, std::size_t count,
                   const std::function<std::int64_t(const RecordedStep&, std::size_t)>& number) {
  Amounts amounts;
  amounts.reserve(steps.size());
  for (const RecordedStep& step : steps) {
    Sizes of_step(count);
    for (std::size_t index = 0; index < count; ++index) of_step[index] = number(step, index);
    amounts.push_back(std::move(of_step));
  }
  return amounts;
}

Sizes resized_bytes(const Steps& steps, const SizeCurve& curve) {
  const std::size_t count = steps[0].get().lifetimes().size();
  std::vector<std::vector<const Sizes*>> sizes;
  for (const RecordedStep& step : steps) {
    std::vector<const Sizes*> of_step;
    of_step.reserve(count);
    for (const RecordedLifetime& one : step.lifetimes()) of_step.push_back(&one.first_size);
    sizes.push_back(std::move(of_step));
  }
  return curve.stored(sizes, amounts_of(steps, count, [](const RecordedStep& step, std::size_t index) {
                        return step.lifetimes()[index].storage.bytes;
                      }));
}

// A recompute remains if it has the same recipe in all steps.
void resize_recomputes(const Steps& steps, const SizeCurve& curve, std::vector<RecordedLifetime>& lifetimes) {
  std::vector<std::size_t> alike;
  for (std::size_t index = 0; index < lifetimes.size(); ++index) {
    const StepRecompute& last = lifetimes[index].recompute;
    const bool is_alike = std::all_of(steps.begin(), steps.end(), [&](const RecordedStep& step) {
      const StepRecompute& one = step.lifetimes()[index].recompute;
      return one.known_point >= 0 && one.operation == last.operation && one.inputs == last.inputs;
    });
    if (is_alike) {
      alike.push_back(index);
    } else {
      lifetimes[index].recompute = {{}, -1, 0, 0, 0, 0, 0, 0, 0};
    }
  }
  for (const auto member : {&StepRecompute::compute_ns, &StepRecompute::extra_bytes, &StepRecompute::kept_bytes,
                            &StepRecompute::discard_ns, &StepRecompute::discard_bytes}) {
    const Sizes made = curve.values(amounts_of(steps, alike.size(), [&](const RecordedStep& step, std::size_t index) {
      return step.lifetimes()[alike[index]].recompute.*member;
    }));
    for (std::size_t index = 0; index < alike.size(); ++index) lifetimes[alike[index]].recompute.*member = made[index];
  }
}

}  // namespace

// Where the values do not change, most often zeros, the curve does not either. Those from three sizes stay within the
// bounds of those from two, because times are measured.
std::vector<std::int64_t> SizeCurve::values(const Amounts& amounts) const {
  if (amounts.size() != shares.size() || amounts.size() < 2 || amounts.size() > 3) {
    throw InvalidArgument("amounts", "numbers of " + std::to_string(shares.size()) + " steps",
                          std::to_string(amounts.size()));
  }
  const auto& lowers = amounts.at(pair[0]);
  const auto& uppers = amounts.at(pair[1]);
  std::vector<std::int64_t> found = uppers;
  for (std::size_t index = 0; index < found.size(); ++index) {
    const std::int64_t lower = lowers.at(index);
    const std::int64_t upper = uppers[index];
    const bool may_change = !is_above || upper >= lower;
    const double change = may_change ? static_cast<double>(upper - lower) : 0;
    const double line = static_cast<double>(upper) + change * along_line;
    const double square = static_cast<double>(upper) + change * with_square;
    const double most = line > square ? line : square;
    if (amounts.size() == 2) {
      if (change != 0) found[index] = up(most);
      continue;
    }
    const std::int64_t one = amounts[0].at(index);
    const std::int64_t two = amounts[1].at(index);
    const std::int64_t three = amounts[2].at(index);
    if (one == two && two == three) continue;
    double exact = shares[0] * static_cast<double>(one) + shares[1] * static_cast<double>(two) +
                   shares[2] * static_cast<double>(three);
    const double least = is_above ? line : static_cast<double>(std::min(lower, upper));
    exact = exact < least ? least : exact;
    found[index] = up(exact > most ? most : exact);
  }
  return found;
}

std::vector<std::int64_t> SizeCurve::stored(const std::vector<std::vector<const std::vector<std::int64_t>*>>& sizes,
                                            const Amounts& amounts) const {
  std::vector<std::int64_t> found = values(amounts);
  const std::size_t last = amounts.size() - 1;
  for (std::size_t index = 0; index < found.size(); ++index) {
    const auto last_bytes = static_cast<double>(amounts[last][index]);
    const double last_elements = product(*sizes[last][index]);
    bool is_product = true;
    for (std::size_t step = 0; step <= last; ++step) {
      const double elements = product(*sizes[step][index]);
      const double expected = static_cast<double>(amounts[step][index]) * last_elements / elements;
      is_product = is_product && elements != 0 && sizes[step][index]->size() == sizes[last][index]->size() &&
                   std::abs(expected - last_bytes) <= rounding * last_bytes;
    }
    if (!is_product) continue;
    double wanted = 1;
    for (std::size_t dimension = 0; dimension < sizes[last][index]->size(); ++dimension) {
      const std::int64_t lower = (*sizes[pair[0]][index])[dimension];
      const std::int64_t upper = (*sizes[pair[1]][index])[dimension];
      wanted *= static_cast<double>(upper) + static_cast<double>(upper - lower) * along_line;
    }
    found[index] = up(last_bytes / last_elements * wanted);
  }
  return found;
}

std::optional<RecordedStep> resized(const std::vector<std::reference_wrapper<const RecordedStep>>& steps,
                                    const std::vector<std::int64_t>& more_bytes, const SizeCurve& curve,
                                    const std::vector<std::int64_t>& first) {
  if (steps.empty() || more_bytes.size() != steps.size()) {
    throw InvalidArgument("more_bytes", "a number for each of the recorded steps", std::to_string(more_bytes.size()));
  }
  const RecordedStep& last = steps.back();
  for (const RecordedStep& step : steps) {
    if (!save_alike(step, last)) return std::nullopt;
  }
  std::vector<RecordedLifetime> lifetimes = last.lifetimes();
  const Sizes bytes = resized_bytes(steps, curve);
  for (std::size_t index = 0; index < lifetimes.size(); ++index) lifetimes[index].storage.bytes = bytes[index];
  resize_recomputes(steps, curve, lifetimes);
  RecordedStep::Points points = last.points();
  const std::size_t count = points.kinds.size();
  Amounts compute_ns;
  Amounts allocated;  // without the lifetimes
  Amounts peaks;
  for (std::size_t index = 0; index < steps.size(); ++index) {
    const RecordedStep::Points& of_step = steps[index].get().points();
    compute_ns.push_back(of_step.compute_ns);
    allocated.push_back(of_step.allocated_bytes);
    peaks.push_back(of_step.peak_bytes);
    const Sizes live = live_bytes(steps[index].get().lifetimes(), count);
    for (std::size_t point = 0; point < count; ++point) {
      allocated.back()[point] += more_bytes[index] - live[point];
      peaks.back()[point] += more_bytes[index] - live[point];
    }
  }
  points.compute_ns = curve.values(compute_ns);
  points.allocated_bytes = curve.values(allocated);
  points.peak_bytes = curve.values(peaks);
  const Sizes live = live_bytes(lifetimes, count);
  std::int64_t before = 0;
  for (std::size_t point = 0; point < count; ++point) {
    points.allocated_bytes[point] += live[point];
    // Plans would else fit where they are searched for, but not where they are simulated.
    points.peak_bytes[point] =
        std::max({points.peak_bytes[point] + live[point], points.allocated_bytes[point], before});
    before = points.allocated_bytes[point];
  }
  for (std::size_t point = 0; point < count; ++point) {
    if (points.dimensions[point] < 0) continue;
    const std::int32_t lifetime = points.lifetimes[point];
    if (lifetime >= 0) lifetimes[lifetime].first_size = first;
    break;
  }
  return RecordedStep(std::move(points), std::move(lifetimes));
}

}  // namespace vdnn
