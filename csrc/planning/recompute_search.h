// Chooses which storages to recompute instead of moving them, so that the step under a budget is shortest.
//
// Candidates are ordered by their cost per byte, as far as the budget can be met with them. The search tries the first
// n of them, from none to all, and then numbers closer and closer to the best one. From there it adds candidates whose
// copies the step waits for and removes the most expensive ones: several at a time, then single ones and pairs, as long
// as that helps; then the same from disturbed choices. A trial is the step with its recomputes and a short search for
// the moves that it needs besides. If a choice is known that is good for nearly the same step, it is tried first. A
// choice whose plans are all certain to be no shorter than the best one is not tried.
#pragma once

#include <cstdint>
#include <vector>

#include "planning/local_search.h"
#include "planning/recorded_step.h"

namespace vdnn {

// How many choices of recomputes are tried: `trials` scales them, `most_trials` limits them. Each is a search of
// `moves_a_trial` evaluations. `by_room`: more are tried near the least memory, where few choices are good, and fewer
// where the budget leaves room.
struct RecomputeEffort {
  double trials;
  std::int64_t most_trials;
  std::int64_t moves_a_trial;
  bool by_room;
};

// What a search for recomputes is about. The step has to be above its budget with everything kept.
struct RecomputeRequest {
  const RecordedStep& step;
  LinkModel link;
  std::int64_t copy_issue_ns;
  std::int64_t budget_bytes;
  std::vector<std::int32_t> candidates;           // those with the least cost per byte first
  std::vector<std::int32_t> candidates_by_issue;  // the same by the time of the host; empty: the host takes none
  std::vector<std::int32_t> known;                // the choice of nearly the same step; empty: none is known
};

// The choices with the shortest steps that were found and fit, the shortest first, at most `most`; each in the order of
// the lifetimes. For very short steps all choices, untried.
[[nodiscard]] std::vector<std::vector<std::int32_t>> find_recomputes(const RecomputeRequest& request,
                                                                     const RecomputeEffort& effort, std::size_t most,
                                                                     const BeforeEvaluation& before_evaluation);

}  // namespace vdnn
