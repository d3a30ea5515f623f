// A recorded step, and the step that results when some storages are discarded and recomputed instead of copied.
//
// vdnn/planning has the same algorithm in Python (recomputing.py, gaps.py), which explains it; tests check that both
// agree on any recording. The search for what to recompute calls this version for every choice that it tries.
#pragma once

#include <cstdint>
#include <vector>

#include "planning/step_model.h"

namespace vdnn {

struct StepRecompute {
  std::vector<std::int32_t> inputs;
  std::int32_t known_point;  // -1 if it cannot be recomputed
  std::int64_t compute_ns;
  std::int64_t extra_bytes;
  std::int64_t kept_bytes;
  std::int64_t discard_ns;
  std::int64_t discard_bytes;
  std::int64_t issue_ns;  // of the recompute, by the host; the next of the discard
  std::int64_t discard_issue_ns;
};

struct RecordedLifetime {
  StepStorage storage;
  std::vector<std::int32_t> uses;
  std::vector<std::int32_t> read;
  StepRecompute recompute;
};

class RecordedStep {
 public:
  struct Points {
    std::vector<std::int64_t> compute_ns;
    std::vector<std::int64_t> allocated_bytes;
    std::vector<std::int64_t> peak_bytes;
    std::vector<StepPoint> kinds;
    std::vector<std::int32_t> lifetimes;  // -1 for none
    std::vector<std::int64_t> issue_ns;
    bool synchronizes = false;
  };

  // Throws InvalidArgument if indices or sizes are inconsistent.
  RecordedStep(Points points, std::vector<RecordedLifetime> lifetimes);

  // The step with these recomputes. Its storages are the lifetimes, followed by the encodings that codecs keep. Throws
  // InvalidArgument for a lifetime that cannot be recomputed.
  [[nodiscard]] StepModel::Shape with_recomputes(const std::vector<std::int32_t>& chosen) const;
  // The smallest budget of that step, without the order of its gaps: the search for recomputes asks this most often.
  [[nodiscard]] std::int64_t least_bytes(const std::vector<std::int32_t>& chosen) const;

  [[nodiscard]] const Points& points() const { return points_; }
  [[nodiscard]] const std::vector<RecordedLifetime>& lifetimes() const { return lifetimes_; }

 private:
  const Points points_;
  const std::vector<RecordedLifetime> lifetimes_;
};

}  // namespace vdnn
