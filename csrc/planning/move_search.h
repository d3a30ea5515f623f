// Searches for the moves of one step: which storages are offloaded, and when each is released and reloaded.
//
// Local search from all gaps and from covers, under a series of budgets up to the requested one (a plan for less memory
// is also a plan for more, so a larger budget is never slower); for very short steps also all plans. The shortest step
// wins, and then its points are moved one by one.
#pragma once

#include <cstdint>
#include <optional>

#include "planning/local_search.h"
#include "planning/step_model.h"

namespace vdnn {

// The best moves under the budget. nullopt if no plan meets it. `effort` scales how many evaluations the search has.
[[nodiscard]] std::optional<Moves> find_moves(const StepModel& model, std::int64_t budget_bytes, double effort,
                                              const BeforeEvaluation& before_evaluation);

}  // namespace vdnn
