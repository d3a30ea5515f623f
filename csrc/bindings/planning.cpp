// Python bindings for planning, built from lists: StepModel (evaluates a choice of gaps), RecordedStep (applies a
// choice of recomputes), PlanSearch (searches for both) and Room (for policies that assign copies to intervals).
//
// Searches release the GIL. One that Python waits for ends when Python has a signal to handle.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "device/errors.h"
#include "planning/background_search.h"
#include "planning/local_search.h"
#include "planning/plan_search.h"
#include "planning/recorded_step.h"
#include "planning/room_tree.h"
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

std::vector<StepPoint> kinds_of(const std::vector<int>& numbers) {
  std::vector<StepPoint> kinds;
  kinds.reserve(numbers.size());
  for (const int number : numbers) kinds.push_back(static_cast<StepPoint>(number));
  return kinds;
}

std::unique_ptr<StepModel> make_model(
    std::vector<std::int64_t> compute_ns, std::vector<std::int64_t> peak_bytes, const std::vector<int>& kinds,
    std::vector<std::int32_t> storages_of_points,
    const std::vector<std::tuple<std::int64_t, std::int32_t, std::int32_t, std::int32_t>>& storages,
    const std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int32_t>>& gaps,
    const LinkModel& link, std::vector<std::int64_t> issue_ns, std::int64_t copy_issue_ns, bool synchronizes) {
  StepModel::Shape shape;
  shape.issue_ns = std::move(issue_ns);
  shape.copy_issue_ns = copy_issue_ns;
  shape.synchronizes = synchronizes;
  shape.compute_ns = std::move(compute_ns);
  shape.peak_bytes = std::move(peak_bytes);
  shape.kinds = kinds_of(kinds);
  shape.storages_of_points = std::move(storages_of_points);
  for (const auto& [bytes, copy_point, free_point, end_point] : storages) {
    shape.storages.push_back({bytes, copy_point, free_point, end_point});
  }
  for (const auto& [storage, use, first, last, release_point] : gaps) {
    shape.gaps.push_back({storage, use, first, last, release_point});
  }
  return std::make_unique<StepModel>(std::move(shape), link);
}

std::optional<StepOutcome> evaluate(const StepModel& model, const py::bytes& may_leave_bytes, std::int64_t budget_bytes,
                                    const std::vector<RoomTuple>& more_room, bool in_order, bool furthest_first) {
  const auto may_leave = static_cast<std::string>(may_leave_bytes);
  const py::gil_scoped_release release;
  std::vector<MoreRoom> more;
  more.reserve(more_room.size());
  for (const auto& [interval, bytes] : more_room) more.push_back({interval, bytes});
  const auto absences = model.schedule(may_leave, budget_bytes, more, {in_order, furthest_first});
  if (!absences.has_value()) return std::nullopt;
  return model.replay(*absences);
}

py::bytes cover(const StepModel& model, const std::vector<std::int32_t>& order, std::int64_t budget_bytes) {
  std::string may_leave;
  {
    const py::gil_scoped_release release;
    may_leave = model.cover(order, budget_bytes);
  }
  return may_leave;
}

std::vector<AbsenceTuple> to_tuples(const std::vector<StepAbsence>& absences) {
  std::vector<AbsenceTuple> tuples;
  tuples.reserve(absences.size());
  for (const StepAbsence& one : absences) tuples.emplace_back(one.gap, one.release_point, one.reload_point);
  return tuples;
}

std::vector<std::tuple<std::int32_t, bool, std::int64_t, std::vector<std::int32_t>>> stalls_of(
    const StepOutcome& outcome) {
  std::vector<std::tuple<std::int32_t, bool, std::int64_t, std::vector<std::int32_t>>> tuples;
  tuples.reserve(outcome.stalls.size());
  for (const StepStall& one : outcome.stalls) {
    tuples.emplace_back(one.gap, one.is_reload, one.ns,
                        std::vector<std::int32_t>(one.before.begin(), one.before.begin() + one.count_before));
  }
  return tuples;
}

using StorageTuple = std::tuple<std::int64_t, std::int32_t, std::int32_t, std::int32_t>;
using Indices = std::vector<std::int32_t>;
using RecomputeTuple = std::tuple<Indices, std::int32_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                                  std::int64_t, std::int64_t, std::int64_t>;

std::shared_ptr<RecordedStep> make_recorded_step(std::vector<std::int64_t> compute_ns,
                                                 std::vector<std::int64_t> allocated_bytes,
                                                 std::vector<std::int64_t> peak_bytes, const std::vector<int>& kinds,
                                                 Indices lifetimes_of_points, const std::vector<StorageTuple>& storages,
                                                 const std::vector<Indices>& uses, const std::vector<Indices>& read,
                                                 const std::vector<std::optional<RecomputeTuple>>& recomputes,
                                                 std::vector<std::int64_t> issue_ns, bool synchronizes) {
  if (uses.size() != storages.size() || read.size() != storages.size() || recomputes.size() != storages.size()) {
    throw InvalidArgument("storages", "uses, reads and a recompute (or None) for each storage",
                          std::to_string(storages.size()));
  }
  std::vector<RecordedLifetime> lifetimes;
  for (std::size_t index = 0; index < storages.size(); ++index) {
    const auto& [bytes, copy_point, free_point, end_point] = storages[index];
    RecordedLifetime lifetime{
        {bytes, copy_point, free_point, end_point}, uses[index], read[index], {{}, -1, 0, 0, 0, 0, 0, 0, 0}};
    if (recomputes[index].has_value()) {
      const auto& [inputs, known_point, recompute_ns, extra_bytes, kept_bytes, discard_ns, discard_bytes, host_ns,
                   discard_host_ns] = *recomputes[index];
      lifetime.recompute = {inputs,     known_point,   recompute_ns, extra_bytes,    kept_bytes,
                            discard_ns, discard_bytes, host_ns,      discard_host_ns};
    }
    lifetimes.push_back(std::move(lifetime));
  }
  return std::make_shared<RecordedStep>(
      RecordedStep::Points{std::move(compute_ns), std::move(allocated_bytes), std::move(peak_bytes), kinds_of(kinds),
                           std::move(lifetimes_of_points), std::move(issue_ns), synchronizes},
      std::move(lifetimes));
}

// For each gap the fields of vdnn.planning.gaps.Gap.
using GapTuple = std::tuple<std::int32_t, std::int32_t, std::int64_t, std::int32_t, std::optional<std::int32_t>,
                            std::int32_t, std::int32_t>;

std::vector<GapTuple> gaps_of(const StepModel::Shape& step) {
  std::vector<GapTuple> tuples;
  tuples.reserve(step.gaps.size());
  std::vector<std::int32_t> numbers(step.storages.size(), 0);
  for (const StepGap& gap : step.gaps) {
    const std::optional<std::int32_t> use = gap.use < 0 ? std::nullopt : std::optional(gap.use);
    tuples.emplace_back(gap.storage, numbers[gap.storage]++, step.storages[gap.storage].bytes, gap.release_point, use,
                        gap.first, gap.last);
  }
  return tuples;
}

constexpr std::chrono::milliseconds between_signals{50};

// For a search without the GIL that Python waits for: Ctrl-C ends it.
BeforeEvaluation until_signal() {
  auto next = std::make_shared<std::chrono::steady_clock::time_point>(std::chrono::steady_clock::now());
  return [next] {
    const auto now = std::chrono::steady_clock::now();
    if (now < *next) return;
    *next = now + between_signals;
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
}

using ChoiceTuple = std::tuple<py::bytes, bool, bool>;

std::optional<StepOutcome> local_search(const StepModel& model, std::int64_t budget_bytes, std::int64_t kept_ns,
                                        std::int64_t effort, const std::vector<ChoiceTuple>& starts) {
  std::vector<Choice> choices;
  choices.reserve(starts.size());
  for (const auto& [may_leave, in_order, furthest_first] : starts) {
    choices.push_back({static_cast<std::string>(may_leave), {}, {in_order, furthest_first}});
  }
  const py::gil_scoped_release release;
  auto found = LocalSearch(model, budget_bytes, kept_ns, effort, until_signal()).run(choices);
  if (!found.has_value()) return std::nullopt;
  return std::move(found->outcome);
}

std::vector<ChoiceTuple> first_choices_of(const StepModel& model) {
  const std::vector<Choice> choices = first_choices(model);
  std::vector<ChoiceTuple> tuples;
  tuples.reserve(choices.size());
  for (const Choice& one : choices) {
    tuples.emplace_back(one.may_leave, one.options.in_order, one.options.furthest_first);
  }
  return tuples;
}

using EffortTuple = std::tuple<double, double, std::int64_t, std::int64_t, std::size_t>;

std::shared_ptr<PlanSearch> make_plan_search(std::shared_ptr<const RecordedStep> step, const LinkModel& link,
                                             std::int64_t copy_issue_ns, std::int64_t budget_bytes, Indices candidates,
                                             Indices candidates_by_issue, const EffortTuple& effort, Indices known) {
  const auto& [moves, trials, most_trials, moves_a_trial, finalists] = effort;
  return std::make_shared<PlanSearch>(PlanSearch::Request{std::move(step),
                                                          link,
                                                          copy_issue_ns,
                                                          budget_bytes,
                                                          std::move(candidates),
                                                          std::move(candidates_by_issue),
                                                          {moves, {trials, most_trials, moves_a_trial}, finalists},
                                                          std::move(known)});
}

std::optional<std::vector<AbsenceTuple>> moves_of(const PlanSearch& search, const Indices& chosen) {
  const py::gil_scoped_release release;
  const auto found = search.moves(chosen, until_signal());
  if (!found.has_value()) return std::nullopt;
  return to_tuples(found->absences);
}

std::vector<Indices> recomputes_of(const PlanSearch& search) {
  const py::gil_scoped_release release;
  return search.recomputes(until_signal());
}

using FoundTuple = std::tuple<std::int64_t, Indices, std::vector<AbsenceTuple>>;

std::vector<FoundTuple> to_tuples(const std::vector<FoundPlan>& found) {
  std::vector<FoundTuple> tuples;
  tuples.reserve(found.size());
  for (const FoundPlan& one : found) tuples.emplace_back(one.step_ns, one.chosen, to_tuples(one.absences));
  return tuples;
}

std::vector<FoundTuple> all_of(const PlanSearch& search) {
  std::vector<FoundPlan> found;
  {
    const py::gil_scoped_release release;
    found = search.all(until_signal());
  }
  return to_tuples(found);
}

// Calls RoomTree::take_down() for each entry, in order.
std::vector<std::int32_t> take_down(RoomTree& room,
                                    const std::vector<std::tuple<std::int32_t, std::int32_t, std::int64_t>>& wanted) {
  std::vector<std::int32_t> below;
  below.reserve(wanted.size());
  for (const auto& [highest, lowest, bytes] : wanted) below.push_back(room.take_down(highest, lowest, bytes));
  return below;
}

}  // namespace

void bind_planning(py::module_& module) {
  using py::arg;
  py::class_<StepOutcome>(module, "StepOutcome")
      .def_readonly("step_ns", &StepOutcome::step_ns)
      .def_readonly("host_ns", &StepOutcome::host_ns)
      .def_property_readonly("absences", [](const StepOutcome& outcome) { return to_tuples(outcome.absences); })
      .def_property_readonly("stalls", &stalls_of);
  py::class_<RoomTree>(module, "Room")
      .def(py::init([](const std::vector<std::int64_t>& room) {
             return std::make_unique<RoomTree>(RoomTree::Room(room.begin(), room.end()));
           }),
           arg("room_bytes"))
      .def("take_down", &take_down, arg("wanted"));
  py::class_<StepModel>(module, "StepModel")
      .def(py::init(&make_model), py::kw_only(), arg("compute_ns"), arg("peak_bytes"), arg("kinds"),
           arg("storages_of_points"), arg("storages"), arg("gaps"), arg("link"),
           arg("issue_ns") = std::vector<std::int64_t>(), arg("copy_issue_ns") = 0, arg("synchronizes") = false)
      .def("evaluate", &evaluate, arg("may_leave"), arg("budget_bytes"), arg("more_room") = std::vector<RoomTuple>(),
           arg("in_order") = false, arg("furthest_first") = false)
      .def("cover", &cover, arg("order"), arg("budget_bytes"))
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
  py::class_<StepModel::Shape>(module, "RecomputedStep")
      .def_property_readonly("step_ns", &StepModel::Shape::kept_ns)
      .def_property_readonly("peak_bytes", &StepModel::Shape::most_bytes)
      .def_property_readonly("least_bytes", &StepModel::Shape::least_bytes)
      .def("shortest_ns", &StepModel::Shape::shortest_ns, arg("link"), arg("budget_bytes"))
      .def_property_readonly("compute_ns", [](const StepModel::Shape& step) { return step.compute_ns; })
      .def_property_readonly("gaps", &gaps_of)
      .def(
          "model",
          [](const StepModel::Shape& step, const LinkModel& link, std::int64_t copy_issue_ns) {
            StepModel::Shape shape = step;
            shape.copy_issue_ns = copy_issue_ns;
            return std::make_unique<StepModel>(std::move(shape), link);
          },
          arg("link"), arg("copy_issue_ns") = 0);
  py::class_<RecordedStep, std::shared_ptr<RecordedStep>>(module, "RecordedStep")
      .def(py::init(&make_recorded_step), py::kw_only(), arg("compute_ns"), arg("allocated_bytes"), arg("peak_bytes"),
           arg("kinds"), arg("lifetimes_of_points"), arg("storages"), arg("uses"), arg("read"), arg("recomputes"),
           arg("issue_ns"), arg("synchronizes"))
      .def("with_recomputes", &RecordedStep::with_recomputes, arg("chosen"));
  py::class_<PlanSearch, std::shared_ptr<PlanSearch>>(module, "PlanSearch")
      .def(py::init(&make_plan_search), py::kw_only(), arg("step"), arg("link"), arg("copy_issue_ns"),
           arg("budget_bytes"), arg("candidates"), arg("candidates_by_issue"), arg("effort"), arg("known"))
      .def("moves", &moves_of, arg("chosen"))
      .def("recomputes", &recomputes_of)
      .def("all", &all_of)
      .def_property_readonly("evaluations", &PlanSearch::evaluations);
  py::class_<BackgroundSearch, std::unique_ptr<BackgroundSearch, LeakInForkedChild>>(module, "BackgroundSearch")
      .def(py::init([](std::shared_ptr<const PlanSearch> search) {
             return std::unique_ptr<BackgroundSearch, LeakInForkedChild>(new BackgroundSearch(std::move(search)));
           }),
           arg("search"))
      .def("cancel", &BackgroundSearch::cancel)
      .def_property_readonly("is_done", &BackgroundSearch::is_done)
      .def("wait_for", &BackgroundSearch::wait_for, arg("seconds"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("found", [](const BackgroundSearch& search) { return to_tuples(search.found()); });
  module.def("local_search", &local_search, py::kw_only(), arg("model"), arg("budget_bytes"), arg("kept_ns"),
             arg("effort"), arg("starts"));
  module.def("first_choices", &first_choices_of, arg("model"));
}

}  // namespace vdnn
