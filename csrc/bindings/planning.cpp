// StepModel for the planner: built from lists, asked with a flag for each gap.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "planning/step_model.h"

namespace py = pybind11;

namespace vdnn {
namespace {

using AbsenceTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t>;
using RoomTuple = std::tuple<std::int32_t, std::int64_t>;

std::vector<StepAbsence> from_tuples(const std::vector<AbsenceTuple>& tuples) {
  std::vector<StepAbsence> absences;
  absences.reserve(tuples.size());
  for (const auto& [gap, release_point, reload_point] : tuples) absences.push_back({gap, release_point, reload_point});
  return absences;
}

std::unique_ptr<StepModel> make_model(
    std::vector<std::int64_t> compute_ns, std::vector<std::int64_t> peak_bytes, const std::vector<int>& kinds,
    std::vector<std::int32_t> storages_of_points,
    const std::vector<std::tuple<std::int64_t, std::int32_t, std::int32_t, std::int32_t>>& storages,
    const std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>>& gaps,
    const LinkModel& link) {
  StepModel::Shape shape;
  shape.compute_ns = std::move(compute_ns);
  shape.peak_bytes = std::move(peak_bytes);
  for (const int kind : kinds) shape.kinds.push_back(static_cast<StepPoint>(kind));
  shape.storages_of_points = std::move(storages_of_points);
  for (const auto& [bytes, copy_point, free_point, end_point] : storages) {
    shape.storages.push_back({bytes, copy_point, free_point, end_point});
  }
  for (const auto& [storage, use, first, last] : gaps) shape.gaps.push_back({storage, use, first, last});
  return std::make_unique<StepModel>(std::move(shape), link);
}

std::optional<StepOutcome> evaluate(const StepModel& model, const py::bytes& may_leave_bytes, std::int64_t budget_bytes,
                                    const std::vector<RoomTuple>& more_room, bool in_order, bool furthest_first) {
  const auto may_leave = static_cast<std::string>(may_leave_bytes);
  const py::gil_scoped_release release;
  std::vector<MoreRoom> more;
  more.reserve(more_room.size());
  for (const auto& [interval, bytes] : more_room) more.push_back({interval, bytes});
  auto absences = model.schedule(may_leave, budget_bytes, more, {in_order, furthest_first});
  if (!absences.has_value()) return std::nullopt;
  return model.replay(std::move(*absences));
}

std::vector<AbsenceTuple> absences_of(const StepOutcome& outcome) {
  std::vector<AbsenceTuple> tuples;
  tuples.reserve(outcome.absences.size());
  for (const StepAbsence& one : outcome.absences) tuples.emplace_back(one.gap, one.release_point, one.reload_point);
  return tuples;
}

std::vector<std::tuple<std::int32_t, bool, std::int64_t, std::vector<std::int32_t>>> stalls_of(
    const StepOutcome& outcome) {
  std::vector<std::tuple<std::int32_t, bool, std::int64_t, std::vector<std::int32_t>>> tuples;
  tuples.reserve(outcome.stalls.size());
  for (const StepStall& one : outcome.stalls) tuples.emplace_back(one.gap, one.is_reload, one.ns, one.before);
  return tuples;
}

}  // namespace

void bind_planning(py::module_& module) {
  using py::arg;
  py::class_<StepOutcome>(module, "StepOutcome")
      .def_readonly("step_ns", &StepOutcome::step_ns)
      .def_property_readonly("absences", &absences_of)
      .def_property_readonly("stalls", &stalls_of);
  py::class_<StepModel>(module, "StepModel")
      .def(py::init(&make_model), py::kw_only(), arg("compute_ns"), arg("peak_bytes"), arg("kinds"),
           arg("storages_of_points"), arg("storages"), arg("gaps"), arg("link"))
      .def("evaluate", &evaluate, arg("may_leave"), arg("budget_bytes"), arg("more_room") = std::vector<RoomTuple>(),
           arg("in_order") = false, arg("furthest_first") = false)
      .def(
          "replay",
          [](const StepModel& model, const std::vector<AbsenceTuple>& absences) {
            return model.replay(from_tuples(absences));
          },
          arg("absences"))
      .def(
          "peak_bytes",
          [](const StepModel& model, const std::vector<AbsenceTuple>& absences) {
            return model.peak_bytes(from_tuples(absences));
          },
          arg("absences"));
}

}  // namespace vdnn
