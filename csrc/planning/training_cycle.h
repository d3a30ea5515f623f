// One cycle of a whole training as the search for a plan simulates it: tasks, copies, and steps on the CPU.
//
// The same algorithms exist in readable but slow Python (vdnn/planning/training/room.py and simulate_cycle.py), which
// also say what each task holds and when each copy runs; tests check that both agree. The search runs this version
// hundreds of times.
#pragma once

#include <cstdint>
#include <vector>

namespace vdnn {

enum class TrainingTask : std::uint8_t { Forward, Backward, Step };

// A copy to the host after `task`, or to the device for it. `bound`: the release of a copy to the host, as early as it
// can be; the earliest issue of one to the device. `brings_back`: the index of the copy to the host of the same bytes,
// -1 for none.
struct TrainingMove {
  std::int64_t bytes;
  std::int32_t task;
  std::int32_t bound;
  std::int32_t unit;
  std::int32_t brings_back;
  bool takes_room;
  bool follows_step;
  bool feeds_step;
  bool writes_parameters;
};

struct CpuStep {
  std::int32_t unit;
  std::int64_t bytes;
};

// Rates are in bytes per nanosecond.
struct TrainingRates {
  double to_device;
  double to_host;
  double duplex;
  double host;
  double cpu;
  double latency_ns;
};

struct TrainingCycle {
  std::vector<TrainingTask> kinds;
  std::vector<std::int64_t> durations_ns;
  std::vector<std::int64_t> needed_bytes;
  std::vector<TrainingMove> outs;  // by task
  std::vector<TrainingMove> ins;   // by task
  std::vector<CpuStep> cpu_steps;
  std::int32_t units = 0;
  std::int32_t overlap = 1;
  double linger = 0;
  double linger_saves = 0;
  bool clips = true;
  bool waits = false;
  bool stale = false;
};

// The time of a step once step follows step evenly. Throws InvalidArgument if indices are out of range, and
// std::runtime_error if copies and tasks wait for each other.
[[nodiscard]] double training_step_ns(TrainingCycle cycle, const TrainingRates& rates, std::int64_t budget_bytes);

// Sets the bounds of all copies under the budget, and sorts the copies to the device by their issue.
void give_training_room(TrainingCycle& cycle, const TrainingRates& rates, std::int64_t budget_bytes);

}  // namespace vdnn
