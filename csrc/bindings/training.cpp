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
using Bounds = std::vector<std::int32_t>;

std::vector<TrainingMove> moves_of(const std::vector<MoveTuple>& tuples) {
  std::vector<TrainingMove> moves;
  moves.reserve(tuples.size());
  for (const auto& [bytes, task, bound, unit, takes_room, follows, feeds, writes] : tuples) {
    moves.push_back({bytes, task, bound, unit, -1, takes_room, follows, feeds, writes});
  }
  return moves;
}

TrainingRates rates_of(const RatesTuple& rates) {
  const auto& [to_device, to_host, duplex, host, cpu, latency_ns] = rates;
  return {to_device, to_host, duplex, host, cpu, latency_ns};
}

Bounds bounds_of(const std::vector<TrainingMove>& moves) {
  Bounds bounds;
  bounds.reserve(moves.size());
  for (const TrainingMove& move : moves) bounds.push_back(move.bound);
  return bounds;
}

TrainingCycle make_cycle(const std::vector<int>& kinds, std::vector<std::int64_t> durations_ns,
                         std::vector<std::int64_t> needed_bytes, const std::vector<MoveTuple>& outs,
                         const std::vector<MoveTuple>& ins, const std::vector<std::int32_t>& bring_back,
                         const std::vector<std::tuple<std::int32_t, std::int64_t>>& cpu_steps, std::int32_t units,
                         std::int32_t overlap, double room_share_of_steps, double room_share_of_passes, bool clips,
                         bool forward_waits_for_steps, bool delayed_update) {
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
  cycle.room_share_of_steps = room_share_of_steps;
  cycle.room_share_of_passes = room_share_of_passes;
  cycle.clips = clips;
  cycle.forward_waits_for_steps = forward_waits_for_steps;
  cycle.delayed_update = delayed_update;
  require_valid(cycle);
  return cycle;
}

double step_ns(const TrainingCycle& cycle, const RatesTuple& rates, std::int64_t budget_bytes) {
  const py::gil_scoped_release release;
  return training_step_ns(cycle, rates_of(rates), budget_bytes);
}

std::vector<std::tuple<int, std::int32_t, double, double>> spans(const TrainingCycle& cycle, const RatesTuple& rates,
                                                                 std::int64_t budget_bytes) {
  std::vector<TrainingSpan> found;
  (void)training_step_ns(cycle, rates_of(rates), budget_bytes, &found);
  std::vector<std::tuple<int, std::int32_t, double, double>> tuples;
  tuples.reserve(found.size());
  for (const TrainingSpan& span : found) {
    tuples.emplace_back(static_cast<int>(span.engine), span.index, span.begin_ns, span.end_ns);
  }
  return tuples;
}

std::tuple<std::vector<std::int64_t>, Bounds, Bounds> room(TrainingCycle cycle, const RatesTuple& rates,
                                                           std::int64_t budget_bytes) {
  std::vector<std::int64_t> held = give_training_room(cycle, rates_of(rates), budget_bytes);
  return {std::move(held), bounds_of(cycle.outs), bounds_of(cycle.ins)};
}

}  // namespace

void bind_training(py::module_& module) {
  using py::arg;
  py::class_<TrainingCycle>(module, "TrainingCycle")
      .def(py::init(&make_cycle), py::kw_only(), arg("kinds"), arg("durations_ns"), arg("needed_bytes"), arg("outs"),
           arg("ins"), arg("bring_back"), arg("cpu_steps"), arg("units"), arg("overlap"), arg("room_share_of_steps"),
           arg("room_share_of_passes"), arg("clips"), arg("forward_waits_for_steps"), arg("delayed_update"))
      .def("step_ns", &step_ns, arg("rates"), arg("budget_bytes"))
      .def("spans", &spans, arg("rates"), arg("budget_bytes"))
      .def("room", &room, arg("rates"), arg("budget_bytes"));
}

}  // namespace vdnn
