// Measures the time of the host in one settled step: outside of the gate's hooks, and inside of them by what they do.
//
// Python switches it on for a few steps of each plan. In all others it costs a hook one counter.
#pragma once

#include <chrono>
#include <cstdint>

#include "hooks/mover.h"

namespace vdnn::hooks {

struct HostTimes final {
  std::int64_t outside_ns;  // the program's own, from the first hook to the last one
  std::int64_t kept_ns;     // inside of hooks that neither move nor recompute anything
  std::int64_t moving_ns;   // of others that recompute nothing
  std::int64_t moves;
  std::int64_t recomputing_ns;
  std::int64_t recomputes;
  std::int64_t last_ns;  // the end of the last hook
  std::int64_t hooks;    // that run now: one, and inside of it those of a recompute's operands
  bool is_on;
};

inline std::int64_t host_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Lives as long as a hook of the gate runs, and adds the time of the outermost one to `times`.
class InHook final {
 public:
  InHook(HostTimes& times, const Mover* mover) : times_(times), mover_(mover) {
    is_outermost_ = times_.hooks++ == 0;
    if (is_outermost_ && times_.is_on) {
      begin_ns_ = host_now_ns();
      moves_ = moves();
      recomputes_ = mover_->state->counts.recomputes;
    }
  }
  InHook(const InHook&) = delete;
  InHook& operator=(const InHook&) = delete;
  ~InHook() {
    --times_.hooks;
    if (is_outermost_ && times_.is_on) {
      end();
    }
  }

 private:
  [[nodiscard]] std::int64_t moves() const {
    const Counts& counts = mover_->state->counts;
    return counts.storages + counts.demand_reloads + counts.prefetched_reloads;
  }

  void end() {
    const std::int64_t now_ns = host_now_ns();
    if (begin_ns_ != 0) {  // else it has begun the step
      const std::int64_t took_ns = now_ns - begin_ns_, moved = moves() - moves_;
      const std::int64_t recomputed = mover_->state->counts.recomputes - recomputes_;
      times_.outside_ns += begin_ns_ - times_.last_ns;
      (recomputed > 0 ? times_.recomputing_ns : moved > 0 ? times_.moving_ns : times_.kept_ns) += took_ns;
      times_.moves += recomputed > 0 ? 0 : moved;
      times_.recomputes += recomputed;
    }
    times_.last_ns = now_ns;
  }

  HostTimes& times_;
  const Mover* mover_;
  std::int64_t begin_ns_ = 0;
  std::int64_t moves_ = 0;
  std::int64_t recomputes_ = 0;
  bool is_outermost_ = false;
};

}  // namespace vdnn::hooks
