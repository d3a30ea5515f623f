// When the copies of a cycle take and give back their memory. See [Note: Order of choice] in training_cycle.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "planning/training_cycle.h"

namespace vdnn {

namespace {

std::size_t in_cycle(std::int64_t task, std::size_t count) {
  const auto size = static_cast<std::int64_t>(count);
  return static_cast<std::size_t>(((task % size) + size) % size);
}

// From near 0 for the first task of a phase to 1 for the last.
std::vector<double> places_in_phases(const std::vector<TrainingTask>& kinds) {
  const auto first_step = std::find(kinds.begin(), kinds.end(), TrainingTask::Step);
  const bool is_alone =
      kinds.back() == TrainingTask::Step &&
      std::all_of(first_step, kinds.end(), [](TrainingTask kind) { return kind == TrainingTask::Step; });
  std::vector<std::size_t> phases(kinds.size(), 0);
  for (std::size_t index = 1; index < kinds.size(); ++index) {
    const TrainingTask before = kinds[index - 1];
    const TrainingTask kind = kinds[index];
    const bool turns = (before == TrainingTask::Forward && kind == TrainingTask::Backward) ||
                       (before == TrainingTask::Backward && kind == TrainingTask::Forward) ||
                       (before == TrainingTask::Backward && kind == TrainingTask::Step && is_alone);
    phases[index] = phases[index - 1] + (turns ? 1 : 0);
  }
  std::vector<std::size_t> sizes(phases.back() + 1, 0);
  for (const std::size_t phase : phases) ++sizes[phase];
  std::vector<std::size_t> seen(sizes.size(), 0);
  std::vector<double> places;
  places.reserve(phases.size());
  for (const std::size_t phase : phases) {
    places.push_back(static_cast<double>(++seen[phase]) / static_cast<double>(sizes[phase]));
  }
  return places;
}

// For each copy to the host, the tasks that its share of the room allows.
std::vector<std::int64_t> tasks_in_room_shares(const TrainingCycle& cycle, std::int64_t budget_bytes) {
  std::vector<std::int64_t> found(cycle.outs.size(), 0);
  if (cycle.room_share_of_steps == 0 && cycle.room_share_of_passes == 0) return found;
  const std::size_t count = cycle.kinds.size();
  std::vector<std::int64_t> left(count, 0);
  for (const TrainingMove& move : cycle.outs) left[move.task] += move.bytes;
  const std::vector<double> share = places_in_phases(cycle.kinds);
  for (std::size_t index = 0; index < found.size(); ++index) {
    const std::int32_t task = cycle.outs[index].task;
    const bool is_step = cycle.kinds[task] == TrainingTask::Step;
    const double room_share = is_step ? cycle.room_share_of_steps : cycle.room_share_of_passes;
    const double room = room_share * share[task] * static_cast<double>(budget_bytes - cycle.needed_bytes[task]);
    std::size_t tasks = 0;
    auto waiting = static_cast<double>(left[task]);
    while (waiting <= room && tasks < count - 1) {
      ++tasks;
      waiting += static_cast<double>(left[(task + tasks) % count]);
    }
    found[index] = static_cast<std::int64_t>(tasks);
  }
  return found;
}

// As Python's divmod() of floats.
double floor_division(double value, double divisor, double& rest) {
  rest = std::fmod(value, divisor);
  double quotient = (value - rest) / divisor;
  if (rest < 0) {
    rest += divisor;
    quotient -= 1;
  }
  const double floor = std::floor(quotient);
  return quotient - floor > 0.5 ? floor + 1 : floor;
}

// For each copy to the device, the last task at which it can begin so that no task waits, if tasks never wait.
std::vector<std::int64_t> latest_tasks(const TrainingCycle& cycle, const TrainingRates& rates) {
  std::vector<double> begins;
  begins.reserve(cycle.durations_ns.size());
  double now = 0;
  for (const std::int64_t duration : cycle.durations_ns) {
    begins.push_back(now);
    now += static_cast<double>(duration);
  }
  double rate = rates.to_device;
  if (rates.to_host + rate > rates.duplex && !cycle.outs.empty()) rate = rates.duplex / 2;
  rate = std::min(rate, rates.host / 2);
  std::vector<double> busy;
  busy.reserve(cycle.ins.size());
  double sum = 0;
  for (const TrainingMove& move : cycle.ins) {
    busy.push_back(static_cast<double>(move.bytes) / rate + rates.latency_ns);
    sum += busy.back();
  }
  const double period = std::max({now, sum, 1.0});
  double following = std::numeric_limits<double>::infinity();
  std::vector<std::int64_t> found(cycle.ins.size(), 0);
  for (int pass = 0; pass < 2; ++pass) {  // the second time with what the next cycle needs first
    for (std::size_t index = cycle.ins.size(); index-- > 0;) {
      following = std::min(following, begins[cycle.ins[index].task]) - busy[index];
      double rest = 0;
      const double turns = floor_division(following, period, rest);
      const auto above = std::upper_bound(begins.begin(), begins.end(), std::min(rest, now));
      found[index] =
          (above - begins.begin()) - 1 + static_cast<std::int64_t>(turns) * static_cast<std::int64_t>(begins.size());
    }
    following += period;
  }
  return found;
}

void lengthen(TrainingMove& move, std::vector<std::int64_t>& held, std::int64_t budget_bytes, std::int64_t tasks) {
  const auto count = static_cast<std::int64_t>(held.size());
  for (std::int64_t done = 0; done < tasks; ++done) {
    std::int64_t& there = held[move.bound % count];
    if (move.bound - move.task >= count || there + move.bytes > budget_bytes) break;
    there += move.bytes;
    ++move.bound;
  }
}

}  // namespace

std::vector<std::int64_t> give_training_room(TrainingCycle& cycle, const TrainingRates& rates,
                                             std::int64_t budget_bytes) {
  const std::size_t count = cycle.kinds.size();
  std::vector<std::int64_t> held = cycle.needed_bytes;
  const std::vector<std::int64_t> tasks = tasks_in_room_shares(cycle, budget_bytes);
  for (std::size_t index = 0; index < cycle.outs.size(); ++index) {
    lengthen(cycle.outs[index], held, budget_bytes, std::max<std::int64_t>(tasks[index], cycle.overlap));
  }
  const std::vector<std::int64_t> latest = latest_tasks(cycle, rates);
  for (std::size_t index = 0; index < cycle.ins.size(); ++index) {
    TrainingMove& move = cycle.ins[index];
    std::int64_t issue = move.task;
    const std::int64_t first = std::max({latest[index], static_cast<std::int64_t>(move.bound),
                                         static_cast<std::int64_t>(move.task) - static_cast<std::int64_t>(count) + 1});
    while (issue > first && (!move.takes_room || held[in_cycle(issue - 1, count)] + move.bytes <= budget_bytes)) {
      --issue;
      if (move.takes_room) held[in_cycle(issue, count)] += move.bytes;
    }
    move.bound = static_cast<std::int32_t>(issue);
  }
  for (TrainingMove& move : cycle.outs) lengthen(move, held, budget_bytes, static_cast<std::int64_t>(count));
  return held;
}

void sort_by_issue(std::vector<TrainingMove>& ins) {
  std::stable_sort(ins.begin(), ins.end(), [](const TrainingMove& one, const TrainingMove& other) {
    return one.bound != other.bound ? one.bound < other.bound : one.task < other.task;
  });
}

}  // namespace vdnn
