// A recorded step, and what becomes of it when some storages are given up without a copy and rebuilt from others.
//
// vdnn/planning has the same in Python (rebuilding.py, gaps.py), which says why it is so; tests hold that both agree on
// any recording. Here is what a search for what to rebuild asks for every choice that it tries.
#pragma once

#include <cstdint>
#include <vector>

#include "planning/step_model.h"

namespace vdnn {

struct StepRebuild {
  std::vector<std::int32_t> inputs;
  std::int32_t known_point;  // -1: it cannot be rebuilt
  std::int64_t compute_ns;
  std::int64_t extra_bytes;
  std::int64_t kept_bytes;
  std::int64_t giving_up_ns;
  std::int64_t giving_up_bytes;
};

struct RecordedLifetime {
  StepStorage storage;
  std::vector<std::int32_t> uses;
  std::vector<std::int32_t> read;
  StepRebuild rebuild;
};

// `shape` is that of the step with its rebuilds, whose storages are the lifetimes and, behind them, what codecs leave;
// `release_points` are those at which each of its gaps may begin.
struct RebuiltStep {
  StepModel::Shape shape;
  std::vector<std::int32_t> release_points;
  [[nodiscard]] std::int64_t compute_ns() const;
  [[nodiscard]] std::int64_t peak_bytes() const;   // with nothing moved
  [[nodiscard]] std::int64_t least_bytes() const;  // with everything moved that can be
};

class RecordedStep {
 public:
  struct Points {
    std::vector<std::int64_t> compute_ns;
    std::vector<std::int64_t> allocated_bytes;
    std::vector<std::int64_t> peak_bytes;
    std::vector<StepPoint> kinds;
    std::vector<std::int32_t> lifetimes;  // -1 for none
  };

  // Throws InvalidArgument if indices or sizes do not fit together.
  RecordedStep(Points points, std::vector<RecordedLifetime> lifetimes);

  // Throws InvalidArgument for what cannot be rebuilt.
  [[nodiscard]] RebuiltStep with_rebuilds(const std::vector<std::int32_t>& chosen) const;

  [[nodiscard]] const Points& points() const { return points_; }
  [[nodiscard]] const std::vector<RecordedLifetime>& lifetimes() const { return lifetimes_; }

 private:
  const Points points_;
  const std::vector<RecordedLifetime> lifetimes_;
};

}  // namespace vdnn
