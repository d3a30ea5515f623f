// The search for the plan of one step under one budget: what `auto` asks, in a session and for `vdnn plan`.
//
// It holds no Python object and has no state but a count, so threads may share it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "planning/local_search.h"
#include "planning/recompute_search.h"
#include "planning/recorded_step.h"

namespace vdnn {

// How long a search takes. `moves` scales the evaluations of moves; the best `finalists` choices of recomputes get a
// whole search for their moves.
struct SearchEffort {
  double moves;
  RecomputeEffort recomputes;
  std::size_t finalists;
};

// A plan: the recomputes in the order of the lifetimes, and the absences of the step with them. `step_ns` is its step.
struct FoundPlan {
  std::int64_t step_ns;
  std::vector<std::int32_t> chosen;
  std::vector<StepAbsence> absences;
};

class PlanSearch {
 public:
  struct Request {
    std::shared_ptr<const RecordedStep> step;
    LinkModel link;
    std::int64_t copy_issue_ns;
    std::int64_t budget_bytes;
    std::vector<std::int32_t> candidates;           // for a recompute, those with the least cost per byte first
    std::vector<std::int32_t> candidates_by_issue;  // the same by the time of the host; empty: the host takes none
    SearchEffort effort;
    std::vector<std::int32_t> known;  // the recomputes of the plan of nearly the same step; empty: none is known
  };

  explicit PlanSearch(Request request);

  // The best moves found for the step with these recomputes. nullopt if no plan of it meets the budget.
  [[nodiscard]] std::optional<Moves> moves(const std::vector<std::int32_t>& chosen,
                                           const BeforeEvaluation& before_evaluation) const;
  // The choices of recomputes with the shortest steps, the shortest first, at most as many as there are finalists.
  [[nodiscard]] std::vector<std::vector<std::int32_t>> recomputes(const BeforeEvaluation& before_evaluation) const;
  // The plan without recomputes and those of recomputes(), the shortest step first, without those that are certain to
  // be longer than another one. None if no plan meets the budget. The first alone if nothing is slowed down.
  [[nodiscard]] std::vector<FoundPlan> all(const BeforeEvaluation& before_evaluation) const;
  // The number of evaluations so far.
  [[nodiscard]] std::uint64_t evaluations() const { return evaluations_; }

 private:
  // The same as moves(), or nullopt if no plan of it takes at most `most_ns`.
  [[nodiscard]] std::optional<Moves> moves_up_to(std::int64_t most_ns, const std::vector<std::int32_t>& chosen,
                                                 const BeforeEvaluation& before_evaluation) const;
  [[nodiscard]] BeforeEvaluation counted(const BeforeEvaluation& before_evaluation) const;

  const Request request_;
  mutable std::atomic<std::uint64_t> evaluations_{0};
};

}  // namespace vdnn
