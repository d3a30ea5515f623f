// Makes a step of a size that was not recorded of two or three recorded steps on a line of sizes.
//
// Every number of the step lies on a curve through those of the recorded steps; vdnn/runtime/steps/resized_steps.py
// says which. The readable form is tests/planning/reference/size_curve.py; tests check that both agree to the last bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planning/recorded_step.h"

namespace vdnn {

// Numbers of recorded steps: one list for each step, all in the same order.
using Amounts = std::vector<std::vector<std::int64_t>>;

// The curve of a number through its values at two or three sizes, in ascending order, at another size.
struct SizeCurve {
  std::vector<double> shares;       // those of Lagrange, one for each size
  std::array<std::size_t, 2> pair;  // the two sizes next to the wanted one
  double along_line;                // from the upper of the pair, in differences of the two
  double with_square;
  bool is_above;  // the wanted size is above both

  [[nodiscard]] std::vector<std::int64_t> values(const Amounts& amounts) const;
  // The bytes of storages whose first saves have these sizes, by step and storage: they grow as the product of its
  // sizes, each on a line, where the bytes of the recorded steps do.
  [[nodiscard]] std::vector<std::int64_t> stored(
      const std::vector<std::vector<const std::vector<std::int64_t>*>>& sizes, const Amounts& amounts) const;
};

// The step that begins with a save of size `first`. `more_bytes` are added to what each recorded step has allocated.
// nullopt if the steps do not save and use the same in the same order.
[[nodiscard]] std::optional<RecordedStep> resized(const std::vector<std::reference_wrapper<const RecordedStep>>& steps,
                                                  const std::vector<std::int64_t>& more_bytes, const SizeCurve& curve,
                                                  const std::vector<std::int64_t>& first);

}  // namespace vdnn
