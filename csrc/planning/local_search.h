// Searches for the choice of gaps with the shortest step: local search that is led by the stalls of the step.
//
// A choice says which gaps may be used, and which intervals need more room than the budget leaves, so that reloads can
// be issued earlier. StepModel schedules it. Few changes can shorten a stall: keep the storage that was waited for,
// keep one whose copy came just before, or make room for an earlier reload. All are tried and the best is taken, until
// none helps; then the search begins again from a disturbed choice. Effort is counted in evaluations, so the same step
// gives the same plan on any machine.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "planning/draw.h"
#include "planning/step_model.h"

namespace vdnn {

// Called before each evaluation of a search. It may throw to end the search.
using BeforeEvaluation = std::function<void()>;

// The gaps that may be used, with a byte for each, and how they are scheduled. `more_room` is in the order of its
// intervals.
struct Choice {
  std::string may_leave;
  std::vector<MoreRoom> more_room = {};
  ScheduleOptions options = {};
};

struct Found {
  Choice choice;
  StepOutcome outcome;
};

// A search under one budget.
class LocalSearch {
 public:
  // No step is shorter than `kept_ns`, so the search ends when it reaches this. `effort`: how many choices may be
  // evaluated. The model has to outlive the search.
  LocalSearch(const StepModel& model, std::int64_t budget_bytes, std::int64_t kept_ns, std::int64_t effort,
              BeforeEvaluation before_evaluation);

  // The best choice found. nullopt if none of the starts fits the budget.
  std::optional<Found> run(const std::vector<Choice>& starts);
  [[nodiscard]] std::int64_t evaluated() const { return evaluated_; }

 private:
  [[nodiscard]] bool is_over() const;
  std::optional<Found> evaluate(Choice choice);
  void descend(Found found);
  // Calls `visit` with each neighbour until it returns false.
  template <typename Visit>
  void visit_neighbours(const Found& found, const Visit& visit) const;
  [[nodiscard]] Choice disturbed(const Choice& best, Draw& draw) const;

  const StepModel& model_;
  const std::int64_t budget_bytes_;
  const std::int64_t kept_ns_;
  const std::int64_t effort_;
  const BeforeEvaluation before_evaluation_;
  std::optional<Found> best_;
  std::int64_t evaluated_ = 0;
  std::unordered_set<std::string> seen_;
};

// The choices that may use every gap.
[[nodiscard]] std::vector<Choice> all_gaps(const StepModel& model);
// Choices from which a short search begins, with no time for covers.
[[nodiscard]] std::vector<Choice> first_choices(const StepModel& model);

// Absences and the step that they make.
struct Moves {
  std::int64_t step_ns;
  std::vector<StepAbsence> absences;
};

// Moves single points of a plan as long as the step gets shorter and stays under the budget, with at most `effort`
// evaluations.
[[nodiscard]] Moves polish(const StepModel& model, std::int64_t budget_bytes, Moves moves, std::int64_t effort,
                           const BeforeEvaluation& before_evaluation);

}  // namespace vdnn
