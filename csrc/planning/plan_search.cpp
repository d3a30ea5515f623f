// Puts the searches for moves and for recomputes together.
#include "planning/plan_search.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "device/errors.h"
#include "planning/move_search.h"

namespace vdnn {

namespace {

constexpr std::int64_t any_ns = std::numeric_limits<std::int64_t>::max();

}  // namespace

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
  return moves_up_to(any_ns, chosen, before_evaluation);
}

std::optional<Moves> PlanSearch::moves_up_to(std::int64_t most_ns, const std::vector<std::int32_t>& chosen,
                                             const BeforeEvaluation& before_evaluation) const {
  StepModel::Shape shape = request_.step->with_recomputes(chosen);
  if (shape.most_bytes() <= request_.budget_bytes) return Moves{shape.kept_ns(), {}};
  if (shape.least_bytes() > request_.budget_bytes) return std::nullopt;
  if (shape.shortest_ns(request_.link, request_.budget_bytes) > most_ns) return std::nullopt;
  shape.copy_issue_ns = request_.copy_issue_ns;
  const StepModel model(std::move(shape), request_.link);
  return find_moves(model, request_.budget_bytes, request_.effort.moves, counted(before_evaluation));
}

std::vector<FoundPlan> PlanSearch::all(const BeforeEvaluation& before_evaluation) const {
  std::vector<FoundPlan> plans;
  std::int64_t shortest_ns = any_ns;
  const auto add = [&](const std::vector<std::int32_t>& chosen) {
    std::optional<Moves> found = moves_up_to(shortest_ns, chosen, before_evaluation);
    if (!found.has_value()) return;
    shortest_ns = std::min(shortest_ns, found->step_ns);
    plans.push_back({found->step_ns, chosen, std::move(found->absences)});
  };
  const StepModel::Shape kept = request_.step->with_recomputes({});
  const std::int64_t kept_ns = kept.kept_ns();
  const bool may_be_kept = kept.shortest_ns(request_.link, request_.budget_bytes) <= kept_ns;
  if (may_be_kept || request_.candidates.empty()) add({});
  if (shortest_ns <= kept_ns || request_.candidates.empty()) return plans;
  for (const std::vector<std::int32_t>& chosen : recomputes(before_evaluation)) {
    if (!chosen.empty()) add(chosen);
  }
  if (!may_be_kept) add({});
  std::stable_sort(plans.begin(), plans.end(), [](const FoundPlan& one, const FoundPlan& other) {
    return std::make_pair(one.step_ns, !one.chosen.empty()) < std::make_pair(other.step_ns, !other.chosen.empty());
  });
  return plans;
}

std::vector<std::vector<std::int32_t>> PlanSearch::recomputes(const BeforeEvaluation& before_evaluation) const {
  const RecomputeRequest request{*request_.step,        request_.link,       request_.copy_issue_ns,
                                 request_.budget_bytes, request_.candidates, request_.candidates_by_issue,
                                 request_.known};
  return find_recomputes(request, request_.effort.recomputes, request_.effort.finalists, counted(before_evaluation));
}

}  // namespace vdnn
