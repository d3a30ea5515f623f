// Puts the searches for moves and for recomputes together.
#include "planning/plan_search.h"

#include <algorithm>
#include <string>
#include <utility>

#include "device/errors.h"
#include "planning/move_search.h"

namespace vdnn {

PlanSearch::PlanSearch(Request request) : request_(std::move(request)) {
  if (request_.step == nullptr) throw InvalidArgument("step", "a recorded step", "none");
  const auto lifetimes = static_cast<std::int32_t>(request_.step->lifetimes().size());
  for (const auto* list : {&request_.candidates, &request_.candidates_by_issue, &request_.known}) {
    for (const std::int32_t one : *list) {
      if (one < 0 || one >= lifetimes || request_.step->lifetimes()[one].recompute.known_point < 0) {
        throw InvalidArgument("candidates", "lifetimes that can be recomputed", std::to_string(one));
      }
    }
  }
}

BeforeEvaluation PlanSearch::counted(const BeforeEvaluation& before_evaluation) const {
  return [this, &before_evaluation] {
    evaluations_.fetch_add(1, std::memory_order_relaxed);
    if (before_evaluation) before_evaluation();
  };
}

std::optional<Moves> PlanSearch::moves(const std::vector<std::int32_t>& chosen,
                                       const BeforeEvaluation& before_evaluation) const {
  StepModel::Shape shape = request_.step->with_recomputes(chosen);
  if (shape.most_bytes() <= request_.budget_bytes) return Moves{shape.kept_ns(), {}};
  if (shape.least_bytes() > request_.budget_bytes) return std::nullopt;
  shape.copy_issue_ns = request_.copy_issue_ns;
  const StepModel model(std::move(shape), request_.link);
  return find_moves(model, request_.budget_bytes, request_.effort.moves, counted(before_evaluation));
}

std::vector<FoundPlan> PlanSearch::all(const BeforeEvaluation& before_evaluation) const {
  std::vector<FoundPlan> plans;
  const auto add = [&](const std::vector<std::int32_t>& chosen) {
    std::optional<Moves> found = moves(chosen, before_evaluation);
    if (found.has_value()) plans.push_back({found->step_ns, chosen, std::move(found->absences)});
  };
  add({});
  if (plans.empty() || plans.front().absences.empty() || request_.candidates.empty()) return plans;
  if (plans.front().step_ns <= request_.step->with_recomputes({}).kept_ns()) return plans;
  for (const std::vector<std::int32_t>& chosen : recomputes(before_evaluation)) add(chosen);
  std::stable_sort(plans.begin(), plans.end(),
                   [](const FoundPlan& one, const FoundPlan& other) { return one.step_ns < other.step_ns; });
  return plans;
}

std::vector<std::vector<std::int32_t>> PlanSearch::recomputes(const BeforeEvaluation& before_evaluation) const {
  const RecomputeRequest request{*request_.step,        request_.link,       request_.copy_issue_ns,
                                 request_.budget_bytes, request_.candidates, request_.candidates_by_issue,
                                 request_.known};
  return find_recomputes(request, request_.effort.recomputes, request_.effort.finalists, counted(before_evaluation));
}

}  // namespace vdnn
