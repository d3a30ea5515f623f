// A recorded step, and the step that results when some storages are discarded and recomputed instead of copied.
//
// [Note: Recomputes as points] A recompute adds points right before the use that asks for it: one use of each of its
// inputs. It computes, and its result stays on the device from then on. A storage that another recompute needs before
// its own use is recomputed at that earlier moment. The encoded bytes of a storage are a lifetime of their own: saved
// where they are encoded, used where they are decoded, moved like any other. These lifetimes come after those of the
// recording.
//
// The same algorithms exist in readable but slow Python (recomputing.py and footprint.py in tests/planning/reference);
// tests check that both agree on any recording. The search for what to recompute asks for the peaks or the gaps of
// every choice that it tries.
#pragma once

#include <cstdint>
#include <string>
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
  std::string operation = {};
};

// Intervals from `first` to `last`, both inclusive; none if `first` is larger. The point that ends an interval names
// it.
struct StepIntervals {
  std::int32_t first;
  std::int32_t last;

  [[nodiscard]] bool empty() const { return first > last; }
};

struct RecordedLifetime {
  StepStorage storage;
  std::vector<std::int32_t> uses;
  std::vector<std::int32_t> read;
  StepRecompute recompute;
  std::vector<std::int32_t> saves = {};
  std::vector<std::int64_t> first_size = {};  // of the tensor of the first save

  // The first use behind a point, or -1.
  [[nodiscard]] std::int32_t use_after(std::int32_t point) const;
  // The intervals in which the storage holds no device memory. `reload_point` is -1 for a reload at the use.
  [[nodiscard]] StepIntervals absent(std::int32_t release_point, std::int32_t reload_point) const;
};

// The absence of a storage under a plan. `reload_point` is -1 if the reload is issued only at the use.
struct PlannedAbsence {
  std::int32_t lifetime;
  std::int32_t release_point;
  std::int32_t reload_point;
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
    // In a step with recomputes: the point of the recorded step, or -1 for one that a recompute adds.
    std::vector<std::int32_t> recorded = {};
    std::vector<std::int32_t> dimensions = {};  // of the tensors of saves; -1 for another point
  };

  // Throws InvalidArgument if indices or sizes are inconsistent.
  RecordedStep(Points points, std::vector<RecordedLifetime> lifetimes);

  // The step with these recomputes. Its storages are the lifetimes, followed by the encodings that codecs keep. Throws
  // InvalidArgument for a lifetime that cannot be recomputed.
  [[nodiscard]] StepModel::Shape with_recomputes(const std::vector<std::int32_t>& chosen) const;
  // The step itself, without gaps.
  [[nodiscard]] StepModel::Shape shape(std::int64_t copy_issue_ns) const;
  // The smallest budget of that step, without the order of its gaps: the search for recomputes asks this most often.
  [[nodiscard]] std::int64_t least_bytes(const std::vector<std::int32_t>& chosen) const;
  // The same for each interval of the step itself: the peaks with everything absent that may be.
  [[nodiscard]] std::vector<std::int64_t> least_peaks() const;
  // The step with these recomputes as a recording of its own, with nothing left to recompute.
  [[nodiscard]] RecordedStep recomputed(const std::vector<std::int32_t>& chosen) const;
  // The lifetimes that can be recomputed and would then be absent for an interval, those first whose recompute and
  // discard take the device (or the host, `by_issue`) the least time per byte.
  [[nodiscard]] std::vector<std::int32_t> candidates(bool by_issue) const;
  // The peak of every interval with these absences.
  [[nodiscard]] std::vector<std::int64_t> interval_bytes(const std::vector<PlannedAbsence>& absences) const;
  // The bytes of the counted lifetimes that are on the device at each point. `counts` has a flag for each lifetime.
  [[nodiscard]] std::vector<std::int64_t> stored_bytes(const std::vector<PlannedAbsence>& absences,
                                                       const std::vector<bool>& counts) const;

  // Throws InvalidArgument if the absences are not of lifetimes and points of the step.
  void require_absences(const std::vector<PlannedAbsence>& absences) const;
  // The peak with everything kept.
  [[nodiscard]] std::int64_t most_bytes() const;
  // True if something is known of the host.
  [[nodiscard]] bool has_host() const;
  [[nodiscard]] const Points& points() const { return points_; }
  [[nodiscard]] const std::vector<RecordedLifetime>& lifetimes() const { return lifetimes_; }

 private:
  const Points points_;
  const std::vector<RecordedLifetime> lifetimes_;
};

}  // namespace vdnn
