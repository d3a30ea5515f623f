// Counting and failing.
#include "report.h"

namespace vdnn::stress {

void require(bool holds, const std::string& what_must_hold) {
  if (!holds) throw Failure(what_must_hold);
}

void Counts::add(const std::string& what, std::uint64_t times) {
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_[what] += times;
}

std::uint64_t Counts::of(const std::string& what) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = counts_.find(what);
  return found == counts_.end() ? 0 : found->second;
}

std::string Counts::text() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& [what, times] : counts_) {
    if (!text.empty()) text += ", ";
    text += what + " " + std::to_string(times);
  }
  return text;
}

}  // namespace vdnn::stress
