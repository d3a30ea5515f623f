// The events after which a range of host memory may be written again: at most one per stream, the latest.
#pragma once

#include <utility>
#include <vector>

#include "device/device.h"

namespace vdnn {

class LastUses {
 public:
  void add(const Event& event) {
    if (event.empty()) return;
    for (Event& known : events_) {
      if (!(known.record().stream == event.record().stream)) continue;
      // Of two records of one stream, the later one covers both.
      if (known.record().position < event.record().position) known = event;
      return;
    }
    events_.push_back(event);
  }
  void add(const LastUses& other) {
    for (const Event& event : other.events_) add(event);
  }
  [[nodiscard]] const std::vector<Event>& events() const noexcept { return events_; }

 private:
  std::vector<Event> events_;
};

}  // namespace vdnn
