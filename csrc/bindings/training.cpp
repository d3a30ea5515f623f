// Python binding of the simulation of whole trainings, built from lists.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "device/errors.h"
#include "planning/training_cycle.h"

namespace py = pybind11;

namespace vdnn {
namespace {

// Bytes, task, bound, unit, and flags: takes room, follows a step, feeds a step, writes parameters.
using MoveTuple = std::tuple<std::int64_t, std::int32_t, std::int32_t, std::int32_t, bool, bool, bool, bool>;
using RatesTuple = std::tuple<double, double, double, double, double, double>;

std::vector<TrainingMove> moves_of(const std::vector<MoveTuple>& tuples) {
  std::vector<TrainingMove> moves;
  moves.reserve(tuples.size());
  for (const auto& [bytes, task, bound, unit, takes_room, follows, feeds, writes] : tuples) {
    moves.push_back({bytes, task, bound, unit, -1, takes_room, follows, feeds, writes});
  }
  return moves;
}

double step_ns(const std::vector<int>& kinds, std::vector<std::int64_t> durations_ns,
               std::vector<std::int64_t> needed_bytes, const std::vector<MoveTuple>& outs,
               const std::vector<MoveTuple>& ins, const std::vector<std::int32_t>& bring_back,
               const std::vector<std::tuple<std::int32_t, std::int64_t>>& cpu_steps, std::int32_t units,
               std::int32_t overlap, double linger, double linger_saves, bool clips, bool waits, bool stale,
               const RatesTuple& rates, std::int64_t budget_bytes) {
  const py::gil_scoped_release release;
  TrainingCycle cycle;
  for (const int kind : kinds) cycle.kinds.push_back(static_cast<TrainingTask>(kind));
  cycle.durations_ns = std::move(durations_ns);
  cycle.needed_bytes = std::move(needed_bytes);
  cycle.outs = moves_of(outs);
  cycle.ins = moves_of(ins);
  if (bring_back.size() != ins.size()) {
    throw InvalidArgument("bring_back", "one for each of " + std::to_string(ins.size()) + " copies to the device",
                          std::to_string(bring_back.size()));
  }
  for (std::size_t index = 0; index < ins.size(); ++index) cycle.ins[index].brings_back = bring_back[index];
  for (const auto& [unit, bytes] : cpu_steps) cycle.cpu_steps.push_back({unit, bytes});
  cycle.units = units;
  cycle.overlap = overlap;
  cycle.linger = linger;
  cycle.linger_saves = linger_saves;
  cycle.clips = clips;
  cycle.waits = waits;
  cycle.stale = stale;
  const auto& [to_device, to_host, duplex, host, cpu, latency_ns] = rates;
  return training_step_ns(std::move(cycle), {to_device, to_host, duplex, host, cpu, latency_ns}, budget_bytes);
}

}  // namespace

void bind_training(py::module_& module) {
  using py::arg;
  module.def("training_step_ns", &step_ns, py::kw_only(), arg("kinds"), arg("durations_ns"), arg("needed_bytes"),
             arg("outs"), arg("ins"), arg("bring_back"), arg("cpu_steps"), arg("units"), arg("overlap"), arg("linger"),
             arg("linger_saves"), arg("clips"), arg("waits"), arg("stale"), arg("rates"), arg("budget_bytes"));
}

}  // namespace vdnn
