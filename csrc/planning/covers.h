// Covers: choices of gaps that free enough memory in every interval, and of which no gap can be left out.
//
// Where the copies take longer than the computation, the shortest step is nearly the one that moves least, and that is
// a cover. StepModel::cover() leaves out gaps one by one, as long as the others still meet the budget; each order makes
// its own. The orders here leave out first what is absent for the shortest time, what is largest, what is smallest,
// what is saved last; and some are random.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planning/draw.h"
#include "planning/step_model.h"

namespace vdnn {

// For a gap: how long it is, and how long its two copies take.
struct AbsenceTime {
  double length_ns;
  double copies_ns;
};

[[nodiscard]] std::vector<AbsenceTime> absence_times(const StepModel& model);
// The orders in which gaps are left out.
[[nodiscard]] std::vector<std::vector<std::int32_t>> orders_of_leaving_out(const StepModel& model);
// An order for a cover that resembles `may_leave`: most of what that leaves out comes first.
[[nodiscard]] std::vector<std::int32_t> order_near(const std::string& may_leave, Draw& draw);

}  // namespace vdnn
