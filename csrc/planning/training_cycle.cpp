// The clock of a whole training.
#include "planning/training_cycle.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>

#include "device/errors.h"

namespace vdnn {

namespace {

constexpr std::int64_t cycles = 12;
constexpr double even_ns = 1.0;
constexpr double even = 1e-7;
constexpr auto in = static_cast<std::size_t>(TrainingEngine::ToDevice);
constexpr auto out = static_cast<std::size_t>(TrainingEngine::ToHost);
constexpr auto cpu = static_cast<std::size_t>(TrainingEngine::Cpu);

// True if the last two cycles took equally long.
bool is_even(const std::vector<double>& ends) {
  const std::size_t size = ends.size();
  if (size < 3) return false;
  const double last = ends[size - 1] - ends[size - 2];
  const double before = ends[size - 2] - ends[size - 3];
  return std::abs(last - before) <= std::max(even_ns, even * last);
}

void require(bool is_met, const char* argument, const char* expected) {
  if (!is_met) throw InvalidArgument(argument, expected, "another one");
}

// Three engines do one thing at a time: copies to the device, copies to the host, and steps on the CPU.
class Clock {
 public:
  Clock(const TrainingCycle& cycle, const TrainingRates& rates, std::vector<TrainingSpan>* spans)
      : cycle_(cycle),
        rates_(rates),
        spans_(spans),
        count_(static_cast<std::int64_t>(cycle.kinds.size())),
        alone_{rates.to_device, rates.to_host, std::min(rates.cpu, rates.host)},
        completed_(cycle.outs.size(), 0),
        feeding_(cycle.units, 0),
        stepped_outs_(cycle.units, 0),
        step_outs_(cycle.units, 0),
        cpu_done_(cycle.units, 0),
        on_cpu_(cycle.units, false) {
    for (const TrainingMove& move : cycle.ins) {
      sizes_[in].push_back(static_cast<double>(move.bytes) + rates.latency_ns * alone_[in]);
    }
    for (const TrainingMove& move : cycle.outs) {
      sizes_[out].push_back(static_cast<double>(move.bytes) + rates.latency_ns * alone_[out]);
      step_outs_[move.unit] += move.writes_parameters ? 1 : 0;
    }
    for (const CpuStep& step : cycle.cpu_steps) {
      sizes_[cpu].push_back(static_cast<double>(step.bytes));
      on_cpu_[step.unit] = true;
    }
    for (std::int64_t task = 0; task < count_; ++task) {
      if (cycle.kinds[task] == TrainingTask::Backward) last_backward_ = task;
    }
    steps_first_ = cycle.kinds.front() == TrainingTask::Step;
    count_pending();
  }

  double run() {
    double now = 0;
    double compute_begin = 0;
    double compute_end = -1;
    std::int64_t entered = 0;
    std::int64_t done = 0;
    bool ended = false;
    std::vector<double> ends;
    while (true) {
      bool changed = false;
      while (true) {  // all that can begin now
        if (entered == done && entered < count_ * cycles && pending_outs_[entered] == 0) ++entered;
        if (compute_end < 0 && entered == done + 1 && pending_ins_[done] == 0) {
          compute_begin = now;
          compute_end = now + static_cast<double>(cycle_.durations_ns[done % count_]);
        }
        const bool begun = begin(entered, done, now);
        changed = changed || begun;
        if (compute_end < 0 || compute_end > now) {
          if (!begun) break;
          continue;
        }
        note_span(TrainingEngine::Compute, done % count_, compute_begin, now);
        compute_end = -1;
        ++done;
        if (done % count_ == 0) {
          ends.push_back(now);
          if (done == count_ * cycles || is_even(ends)) {
            keep_spans_of_the_last_cycle(ends);
            return step_of(ends);
          }
        }
      }
      if (changed || ended) share();
      double step = compute_end >= 0 ? compute_end - now : -1;
      bool is_task = step >= 0;
      for (std::size_t engine = 0; engine < 3; ++engine) {
        if (busy_[engine] && (step < 0 || left_[engine] < step * rate_[engine])) {
          step = std::max(0.0, left_[engine] / rate_[engine]);
          is_task = false;
        }
      }
      if (step < 0) {
        throw std::runtime_error("training_step_ns: expected something that runs, got tasks and copies that wait");
      }
      now = is_task ? compute_end : now + step;
      ended = false;
      for (std::size_t engine = 0; engine < 3; ++engine) {
        if (!busy_[engine]) continue;
        left_[engine] -= rate_[engine] * step;
        if (left_[engine] <= 1e-6) {
          end(engine, now);
          ended = true;
        }
      }
    }
  }

 private:
  // Cycles of different times may come in turn: then the mean of them.
  static double step_of(const std::vector<double>& ends) {
    const std::size_t counted = is_even(ends) ? 1 : ends.size() - 4;
    return (ends.back() - ends[ends.size() - 1 - counted]) / static_cast<double>(counted);
  }

  // For each task of all cycles, the copies that have to be done before it begins.
  void count_pending() {
    pending_ins_.assign(count_ * cycles, 0);
    pending_outs_.assign(count_ * (cycles + 2), 0);
    for (std::int64_t turn = 0; turn < cycles; ++turn) {
      for (const TrainingMove& move : cycle_.ins) ++pending_ins_[turn * count_ + move.task];
      for (const TrainingMove& move : cycle_.outs) ++pending_outs_[turn * count_ + move.bound];
    }
  }

  bool begin(std::int64_t entered, std::int64_t done, double now) {
    bool begun = false;
    for (std::size_t engine = 0; engine < 3; ++engine) {
      if (!sizes_[engine].empty() && !busy_[engine] && turn_[engine] < cycles && may_begin(engine, entered, done)) {
        left_[engine] = sizes_[engine][position_[engine]];
        busy_[engine] = begun = true;
        began_[engine] = now;
      }
    }
    return begun;
  }

  [[nodiscard]] bool may_begin(std::size_t engine, std::int64_t entered, std::int64_t done) const {
    const std::int64_t turn = turn_[engine];
    const std::int64_t first = turn * count_;
    if (engine == out) return done > first + cycle_.outs[position_[out]].task;
    if (engine == cpu) {
      const bool is_ready = !cycle_.clips || done > first + last_backward_;
      return is_ready && feeding_[cycle_.cpu_steps[position_[cpu]].unit] > turn;
    }
    const TrainingMove& move = cycle_.ins[position_[in]];
    if (entered <= first + move.bound) return false;
    if (move.brings_back >= 0) {
      const bool is_earlier = cycle_.outs[move.brings_back].task < move.task;
      if (completed_[move.brings_back] < turn + (is_earlier ? 1 : 0)) return false;
    }
    return !move.follows_step || has_stepped(move.unit, turn);
  }

  // True if the parameters of the step before are whole.
  [[nodiscard]] bool has_stepped(std::int32_t unit, std::int64_t turn) const {
    if (!on_cpu_[unit]) return stepped_outs_[unit] >= step_outs_[unit] * (turn + (steps_first_ ? 1 : 0));
    if (cycle_.delayed_update) --turn;
    if (!cycle_.forward_waits_for_steps) return cpu_done_[unit] >= turn;
    return std::all_of(cycle_.cpu_steps.begin(), cycle_.cpu_steps.end(),
                       [&](const CpuStep& step) { return cpu_done_[step.unit] >= turn; });
  }

  void end(std::size_t engine, double now) {
    const std::int64_t turn = turn_[engine];
    const std::size_t position = position_[engine];
    note_span(static_cast<TrainingEngine>(engine), static_cast<std::int64_t>(position), began_[engine], now);
    busy_[engine] = false;
    if (++position_[engine] == sizes_[engine].size()) {
      position_[engine] = 0;
      ++turn_[engine];
    }
    if (engine == cpu) {
      ++cpu_done_[cycle_.cpu_steps[position].unit];
    } else if (engine == out) {
      const TrainingMove& move = cycle_.outs[position];
      --pending_outs_[turn * count_ + move.bound];
      ++completed_[position];
      feeding_[move.unit] += move.feeds_step ? 1 : 0;
      stepped_outs_[move.unit] += move.writes_parameters ? 1 : 0;
    } else {
      --pending_ins_[turn * count_ + cycle_.ins[position].task];
    }
  }

  void note_span(TrainingEngine engine, std::int64_t index, double begin_ns, double end_ns) {
    if (spans_ != nullptr) spans_->push_back({engine, static_cast<std::int32_t>(index), begin_ns, end_ns});
  }

  void keep_spans_of_the_last_cycle(const std::vector<double>& ends) {
    if (spans_ == nullptr) return;
    const double begin_ns = ends[ends.size() - 2];
    const auto is_earlier = [begin_ns](const TrainingSpan& span) { return span.end_ns <= begin_ns; };
    spans_->erase(std::remove_if(spans_->begin(), spans_->end(), is_earlier), spans_->end());
    for (TrainingSpan& span : *spans_) {
      span.begin_ns -= begin_ns;
      span.end_ns -= begin_ns;
    }
  }

  // Sets the rates of what runs now.
  void share() {
    for (std::size_t engine = 0; engine < 3; ++engine) rate_[engine] = busy_[engine] ? alone_[engine] : 0.0;
    if (busy_[in] && busy_[out] && rate_[in] + rate_[out] > rates_.duplex) {
      const double factor = rates_.duplex / (rate_[in] + rate_[out]);
      rate_[in] *= factor;
      rate_[out] *= factor;
    }
    const double traffic = rate_[in] + rate_[out] + rate_[cpu];
    if (traffic > rates_.host) {
      for (double& rate : rate_) rate *= rates_.host / traffic;
    }
  }

  const TrainingCycle& cycle_;
  const TrainingRates& rates_;
  std::vector<TrainingSpan>* spans_;  // null: not wanted
  const std::int64_t count_;
  const std::array<double, 3> alone_;
  std::array<std::vector<double>, 3> sizes_;
  std::array<std::size_t, 3> position_{};
  std::array<std::int64_t, 3> turn_{};
  std::array<double, 3> left_{};
  std::array<double, 3> rate_{};
  std::array<double, 3> began_{};
  std::array<bool, 3> busy_{};
  std::vector<std::int32_t> pending_ins_;
  std::vector<std::int32_t> pending_outs_;
  std::vector<std::int64_t> completed_;     // of each copy to the host
  std::vector<std::int64_t> feeding_;       // copies to the host that a step on the CPU waits for, done so far
  std::vector<std::int64_t> stepped_outs_;  // copies of stepped parameters to the host, done so far
  std::vector<std::int64_t> step_outs_;     // those of one cycle
  std::vector<std::int64_t> cpu_done_;
  std::vector<bool> on_cpu_;
  std::int64_t last_backward_ = 0;
  bool steps_first_ = false;
};

}  // namespace

void require_valid(const TrainingCycle& cycle) {
  const auto count = static_cast<std::int64_t>(cycle.kinds.size());
  require(
      count > 0 && cycle.durations_ns.size() == cycle.kinds.size() && cycle.needed_bytes.size() == cycle.kinds.size(),
      "tasks", "a kind, a duration and needed bytes for each of at least one task");
  const auto outs = static_cast<std::int64_t>(cycle.outs.size());
  for (const std::vector<TrainingMove>* moves : {&cycle.outs, &cycle.ins}) {
    for (const TrainingMove& move : *moves) {
      require(move.task >= 0 && move.task < count && move.unit >= 0 && move.unit < cycle.units && move.bytes >= 0 &&
                  move.brings_back >= -1 && move.brings_back < outs && std::abs(move.bound) <= 2 * count,
              "moves", "tasks, units and copies of this cycle");
    }
  }
  for (const CpuStep& step : cycle.cpu_steps) {
    require(step.unit >= 0 && step.unit < cycle.units && step.bytes >= 0, "cpu_steps", "units of this cycle");
  }
}

double training_step_ns(TrainingCycle cycle, const TrainingRates& rates, std::int64_t budget_bytes,
                        std::vector<TrainingSpan>* spans) {
  give_training_room(cycle, rates, budget_bytes);
  sort_by_issue(cycle.ins);
  return Clock(cycle, rates, spans).run();
}

}  // namespace vdnn
