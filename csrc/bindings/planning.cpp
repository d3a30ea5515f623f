// Python bindings for planning: RecordedStep (reads a Recording, applies a choice of recomputes, simulates plans),
// StepModel (evaluates a choice of gaps), PlanSearch (searches for both) and Room (for policies that assign copies to
// intervals).
//
// Searches release the GIL. One that Python waits for ends when Python has a signal to handle.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
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
#include "planning/resized_step.h"
#include "planning/room_tree.h"
#include "planning/step_model.h"
#include "planning/step_timeline.h"

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

// The name of an attribute, interned once.
class Field {
 public:
  explicit Field(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  [[nodiscard]] py::object of(py::handle object) const {
    PyObject* value = PyObject_GetAttr(object.ptr(), name_);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }
  [[nodiscard]] std::int64_t number_of(py::handle object) const { return number(of(object)); }
  [[nodiscard]] std::int32_t point_of(py::handle object) const { return point(of(object)); }
  // None is -1.
  [[nodiscard]] std::int32_t point_or_none_of(py::handle object) const {
    const py::object value = of(object);
    return value.is_none() ? -1 : point(value);
  }
  [[nodiscard]] std::vector<std::int64_t> numbers_of(py::handle object) const {
    const py::tuple values(of(object));
    std::vector<std::int64_t> numbers;
    numbers.reserve(values.size());
    for (const py::handle value : values) numbers.push_back(number(value));
    return numbers;
  }
  [[nodiscard]] std::vector<std::int32_t> points_of(py::handle object) const {
    const py::tuple values(of(object));
    std::vector<std::int32_t> points;
    points.reserve(values.size());
    for (const py::handle value : values) points.push_back(point(value));
    return points;
  }

 private:
  // A training waits for this. pybind11's casts take three times as long.
  [[nodiscard]] static std::int64_t number(py::handle value) {
    const long long number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return number;
  }
  [[nodiscard]] static std::int32_t point(py::handle value) {
    const std::int64_t found = number(value);
    if (found < -1 || found > std::numeric_limits<std::int32_t>::max()) {
      throw InvalidArgument("recording", "indices of points and lifetimes", std::to_string(found));
    }
    return static_cast<std::int32_t>(found);
  }

  PyObject* name_;  // never released: a static destructor may run without an interpreter
};

// The fields of vdnn.step.recording and vdnn.step.plan.
struct Fields {
  Field points{"points"}, lifetimes{"lifetimes"}, synchronizes{"synchronizes"};
  Field kind{"kind"}, lifetime{"lifetime"}, compute_ns{"compute_ns"}, allocated_bytes{"allocated_bytes"},
      peak_bytes{"peak_bytes"}, issue_ns{"issue_ns"};
  Field key{"key"}, size{"size"}, operation{"operation"};
  Field nbytes{"nbytes"}, saves{"saves"}, uses{"uses"}, read{"read"}, copy_point{"copy_point"},
      free_point{"free_point"}, end_point{"end_point"}, recompute{"recompute"};
  Field inputs{"inputs"}, known_point{"known_point"}, extra_bytes{"extra_bytes"}, kept_bytes{"kept_bytes"},
      discard_ns{"discard_ns"}, discard_bytes{"discard_bytes"}, discard_issue_ns{"discard_issue_ns"};
  Field absences{"absences"}, release_point{"release_point"}, reload_point{"reload_point"};
};

const Fields& fields() {
  static const Fields names;
  return names;
}

RecordedLifetime lifetime_of(py::handle lifetime) {
  const Fields& field = fields();
  RecordedLifetime found{{field.nbytes.number_of(lifetime), field.copy_point.point_of(lifetime),
                          field.free_point.point_of(lifetime), field.end_point.point_of(lifetime)},
                         field.uses.points_of(lifetime),
                         field.read.points_of(lifetime),
                         {{}, -1, 0, 0, 0, 0, 0, 0, 0},
                         field.saves.points_of(lifetime)};
  const py::object recompute = field.recompute.of(lifetime);
  if (recompute.is_none()) return found;
  found.recompute = {field.inputs.points_of(recompute),           field.known_point.point_of(recompute),
                     field.compute_ns.number_of(recompute),       field.extra_bytes.number_of(recompute),
                     field.kept_bytes.number_of(recompute),       field.discard_ns.number_of(recompute),
                     field.discard_bytes.number_of(recompute),    field.issue_ns.number_of(recompute),
                     field.discard_issue_ns.number_of(recompute), field.operation.of(recompute).cast<std::string>()};
  return found;
}

std::shared_ptr<RecordedStep> make_recorded_step(const py::object& recording) {
  const Fields& field = fields();
  const py::object kinds = py::module_::import("vdnn.step.recording").attr("PointKind");
  const py::object save = kinds.attr("SAVE");
  const py::object use = kinds.attr("USE");
  RecordedStep::Points points;
  points.synchronizes = field.synchronizes.of(recording).cast<bool>();
  for (const py::handle point : py::tuple(field.points.of(recording))) {
    const py::object kind = field.kind.of(point);
    points.kinds.push_back(kind.is(save) ? StepPoint::Save : kind.is(use) ? StepPoint::Use : StepPoint::End);
    points.lifetimes.push_back(field.lifetime.point_or_none_of(point));
    points.compute_ns.push_back(field.compute_ns.number_of(point));
    points.allocated_bytes.push_back(field.allocated_bytes.number_of(point));
    points.peak_bytes.push_back(field.peak_bytes.number_of(point));
    points.issue_ns.push_back(field.issue_ns.number_of(point));
    const py::object key = field.key.of(point);
    points.dimensions.push_back(key.is_none() ? -1 : static_cast<std::int32_t>(py::tuple(field.size.of(key)).size()));
  }
  const py::tuple recorded(field.points.of(recording));
  std::vector<RecordedLifetime> lifetimes;
  for (const py::handle one : py::tuple(field.lifetimes.of(recording))) {
    lifetimes.push_back(lifetime_of(one));
    RecordedLifetime& lifetime = lifetimes.back();
    if (lifetime.saves.empty() || lifetime.saves[0] < 0 || lifetime.saves[0] >= static_cast<int>(recorded.size())) {
      continue;  // RecordedStep checks points
    }
    const py::object key = field.key.of(recorded[lifetime.saves[0]]);
    if (!key.is_none()) lifetime.first_size = field.size.numbers_of(key);
  }
  return std::make_shared<RecordedStep>(std::move(points), std::move(lifetimes));
}

// The absences of PlannedLifetimes.
std::vector<PlannedAbsence> absences_of(const py::object& planned) {
  const Fields& field = fields();
  std::vector<PlannedAbsence> absences;
  std::int32_t lifetime = 0;
  for (const py::handle one : planned) {
    for (const py::handle absence : py::tuple(field.absences.of(one))) {
      absences.push_back(
          {lifetime, field.release_point.point_of(absence), field.reload_point.point_or_none_of(absence)});
    }
    ++lifetime;
  }
  return absences;
}

using GapPlaces = std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int32_t>>;

// A model of the step with these gaps, which are in the order in which offloads are issued.
std::unique_ptr<StepModel> make_model(const RecordedStep& step, const GapPlaces& gaps, const LinkModel& link,
                                      std::int64_t copy_issue_ns) {
  StepModel::Shape shape = step.shape(copy_issue_ns);
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

using Indices = std::vector<std::int32_t>;

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

using MarkTuple = std::tuple<std::int32_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                             std::int64_t, std::int64_t>;
using CopyTuple = std::tuple<bool, std::int32_t, std::int64_t, std::int64_t, std::int64_t>;

// For each point the fields of vdnn.step.timeline.Mark.
std::vector<MarkTuple> marks_of(const StepTimeline& timeline) {
  std::vector<MarkTuple> tuples;
  tuples.reserve(timeline.marks.size());
  for (const StepMark& one : timeline.marks) {
    tuples.emplace_back(static_cast<std::int32_t>(tuples.size()), one.begin_ns, one.end_ns, one.release_stall_ns,
                        one.reload_stall_ns, one.allocated_bytes, one.peak_bytes, one.host_stall_ns);
  }
  return tuples;
}

std::vector<CopyTuple> copies_of(const StepTimeline& timeline) {
  std::vector<CopyTuple> tuples;
  tuples.reserve(timeline.copies.size());
  for (const StepCopy& one : timeline.copies) {
    tuples.emplace_back(one.is_to_host, one.lifetime, one.bytes, one.begin_ns, one.end_ns);
  }
  return tuples;
}

using PointTuple =
    std::tuple<std::int32_t, bool, std::optional<std::int32_t>, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
py::tuple tuple_of(const Indices& indices) {
  py::tuple tuple(indices.size());
  for (std::size_t index = 0; index < indices.size(); ++index) tuple[index] = indices[index];
  return tuple;
}

std::vector<PointTuple> points_of(const RecordedStep& step) {
  const RecordedStep::Points& points = step.points();
  std::vector<PointTuple> tuples;
  tuples.reserve(points.kinds.size());
  for (std::size_t index = 0; index < points.kinds.size(); ++index) {
    const std::int32_t lifetime = points.lifetimes[index];
    tuples.emplace_back(points.recorded.empty() ? static_cast<std::int32_t>(index) : points.recorded[index],
                        points.kinds[index] == StepPoint::Save, lifetime < 0 ? std::nullopt : std::optional(lifetime),
                        points.compute_ns[index], points.allocated_bytes[index], points.peak_bytes[index],
                        points.issue_ns[index]);
  }
  return tuples;
}

// For each lifetime the fields of vdnn.step.recording.Lifetime.
py::list lifetimes_of(const RecordedStep& step) {
  py::list tuples;
  for (const RecordedLifetime& one : step.lifetimes()) {
    const StepStorage& storage = one.storage;
    tuples.append(py::make_tuple(storage.bytes, tuple_of(one.saves), tuple_of(one.uses), tuple_of(one.read),
                                 storage.copy_point, storage.free_point, storage.end_point));
  }
  return tuples;
}

// For each lifetime that can be recomputed the numbers of its Recompute that depend on the size of the step.
py::list recomputes_of_step(const RecordedStep& step) {
  py::list found;
  for (const RecordedLifetime& one : step.lifetimes()) {
    const StepRecompute& recompute = one.recompute;
    if (recompute.known_point < 0) {
      found.append(py::none());
    } else {
      found.append(py::make_tuple(recompute.compute_ns, recompute.extra_bytes, recompute.kept_bytes,
                                  recompute.discard_ns, recompute.discard_bytes));
    }
  }
  return found;
}

std::shared_ptr<RecordedStep> make_resized(const SizeCurve& curve,
                                           const std::vector<std::shared_ptr<RecordedStep>>& steps,
                                           const std::vector<std::int64_t>& more_bytes,
                                           const std::vector<std::int64_t>& first) {
  std::vector<std::reference_wrapper<const RecordedStep>> recorded;
  recorded.reserve(steps.size());
  for (const std::shared_ptr<RecordedStep>& one : steps) recorded.emplace_back(*one);
  std::optional<RecordedStep> made = resized(recorded, more_bytes, curve, first);
  return made.has_value() ? std::make_shared<RecordedStep>(*std::move(made)) : nullptr;
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

using EffortTuple = std::tuple<double, double, std::int64_t, std::int64_t, std::size_t, bool>;

std::shared_ptr<PlanSearch> make_plan_search(std::shared_ptr<const RecordedStep> step, const LinkModel& link,
                                             std::int64_t copy_issue_ns, std::int64_t budget_bytes,
                                             const EffortTuple& effort, Indices known) {
  const auto& [moves, trials, most_trials, moves_a_trial, finalists, by_room] = effort;
  Indices candidates = step->candidates(false);
  Indices candidates_by_issue = step->has_host() ? step->candidates(true) : Indices();
  return std::make_shared<PlanSearch>(
      PlanSearch::Request{std::move(step),
                          link,
                          copy_issue_ns,
                          budget_bytes,
                          std::move(candidates),
                          std::move(candidates_by_issue),
                          {moves, {trials, most_trials, moves_a_trial, by_room}, finalists},
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
  py::class_<StepModel> model(module, "StepModel");  // named before what makes it, defined behind what it is made of
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
  py::class_<StepTimeline>(module, "StepTimeline")
      .def_readonly("step_ns", &StepTimeline::step_ns)
      .def_readonly("host_ns", &StepTimeline::host_ns)
      .def_property_readonly("peak_bytes", &StepTimeline::peak_bytes)
      .def_property_readonly("host_stall_ns", &StepTimeline::host_stall_ns)
      .def_property_readonly("marks", &marks_of)
      .def_property_readonly("copies", &copies_of);
  py::class_<RecordedStep, std::shared_ptr<RecordedStep>>(module, "RecordedStep")
      .def(py::init(&make_recorded_step), arg("recording"))
      .def("with_recomputes", &RecordedStep::with_recomputes, arg("chosen"))
      .def(
          "recomputed",
          [](const RecordedStep& step, const Indices& chosen) {
            return std::make_shared<RecordedStep>(step.recomputed(chosen));
          },
          arg("chosen"))
      .def("candidates", &RecordedStep::candidates, arg("by_issue"))
      .def_property_readonly("points", &points_of)
      .def_property_readonly("lifetimes", &lifetimes_of)
      .def_property_readonly("recomputes", &recomputes_of_step)
      .def_property_readonly("gaps", [](const RecordedStep& step) { return gaps_of(step.with_recomputes({})); })
      .def_property_readonly("peak_bytes", &RecordedStep::most_bytes)
      .def_property_readonly("least_peaks", &RecordedStep::least_peaks)
      .def(
          "interval_bytes",
          [](const RecordedStep& step, const py::object& planned) { return step.interval_bytes(absences_of(planned)); },
          arg("planned"))
      .def(
          "stored_bytes",
          [](const RecordedStep& step, const py::object& planned, const std::vector<bool>& counts) {
            return step.stored_bytes(absences_of(planned), counts);
          },
          arg("planned"), arg("counts"))
      .def(
          "simulate",
          [](const RecordedStep& step, const py::object& planned, const LinkModel& link, std::int64_t copy_issue_ns) {
            return simulate(step, absences_of(planned), link, copy_issue_ns);
          },
          arg("planned"), arg("link"), arg("copy_issue_ns"));
  model.def(py::init(&make_model), arg("step"), arg("gaps"), arg("link"), arg("copy_issue_ns"))
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
  py::class_<SizeCurve>(module, "SizeCurve")
      .def(py::init([](std::vector<double> shares, const std::pair<std::size_t, std::size_t>& pair, double along_line,
                       double with_square, bool is_above) {
             if (shares.size() < 2 || shares.size() > 3 || std::max(pair.first, pair.second) >= shares.size()) {
               throw InvalidArgument("shares", "2 or 3, and a pair of them", std::to_string(shares.size()));
             }
             return SizeCurve{std::move(shares), {pair.first, pair.second}, along_line, with_square, is_above};
           }),
           py::kw_only(), arg("shares"), arg("pair"), arg("along_line"), arg("with_square"), arg("is_above"))
      .def("values", &SizeCurve::values, arg("amounts"))
      .def("resized", &make_resized, arg("steps"), arg("more_bytes"), arg("first"));
  py::class_<PlanSearch, std::shared_ptr<PlanSearch>>(module, "PlanSearch")
      .def(py::init(&make_plan_search), py::kw_only(), arg("step"), arg("link"), arg("copy_issue_ns"),
           arg("budget_bytes"), arg("effort"), arg("known"))
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
