// Simulates the cycle of a whole training until step follows step evenly: tasks, copies, and steps on the CPU.
//
// Tasks run one after another on the device. Each copy engine does its copies in order, and so do the cores with their
// steps. Copies of both directions share the link, and all of them share the host's memory with the steps on the CPU:
// where their rates add up to more than there is, each gets its part. The host is far enough ahead of the device.
//
// [Note: Order of choice] A copy to the host first gets `overlap` tasks, or the tasks that its share of the room allows
// (`room_share_of_steps` or `room_share_of_passes`), more the later its task is in its phase: early copies of a phase
// are done at once, and late ones are spread over the tasks behind it. Then the copies to the device, in the order of
// their needs, begin as late as they can if nothing else holds them up, or later where there is no room. The room that
// is left goes to the copies to the host.
//
// The same algorithms exist in Python (tests/planning/reference/training_room.py and training_cycle.py); tests check
// that both agree.
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
  double room_share_of_steps = 0;
  double room_share_of_passes = 0;
  bool clips = true;
  bool forward_waits_for_steps = false;
  bool delayed_update = false;
};

enum class TrainingEngine : std::uint8_t { ToDevice, ToHost, Cpu, Compute };

// One copy, step on the CPU or task of the last cycle, by its index. Times are from the start of that cycle.
struct TrainingSpan {
  TrainingEngine engine;
  std::int32_t index;
  double begin_ns;
  double end_ns;
};

// Throws InvalidArgument if indices are out of range.
void require_valid(const TrainingCycle& cycle);

// Sets the bounds of all copies under the budget. Returns the bytes on the device at each task.
std::vector<std::int64_t> give_training_room(TrainingCycle& cycle, const TrainingRates& rates,
                                             std::int64_t budget_bytes);

// Sorts the copies to the device by their issue: the order in which they are simulated.
void sort_by_issue(std::vector<TrainingMove>& ins);

// The time of a step once step follows step evenly, for a valid cycle. Throws std::runtime_error if copies and tasks
// wait for each other. If `spans` is not null, the spans of the last cycle are appended to it. Their indices of copies
// to the device are those of the order of issue.
[[nodiscard]] double training_step_ns(TrainingCycle cycle, const TrainingRates& rates, std::int64_t budget_bytes,
                                      std::vector<TrainingSpan>* spans = nullptr);

}  // namespace vdnn
