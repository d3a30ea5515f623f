#include "hooks/boundaries.h"

#include <memory>

namespace vdnn::hooks {

Boundaries& Boundaries::here() {
  static thread_local std::unique_ptr<Boundaries> of_thread;
  if (!of_thread) {
    of_thread = std::make_unique<Boundaries>();
  }
  return *of_thread;
}

void Boundaries::cross(const Boundary& boundary) {
  last_[count_++ % kMost] = boundary;
  has_skipped_ = has_skipped_ || !boundary.is_read;
}

void Boundaries::rest(std::uintptr_t watch, bool begins) {
  const bool is_new = begins ? resting_.insert(watch).second : resting_.erase(watch) > 0;
  if (is_new && count_ > 0) {
    cross({last_[(count_ - 1) % kMost].node, 0, false});
  }
}

void Boundaries::read(std::int64_t node) {
  const Boundary* last = count_ == 0 ? nullptr : &last_[(count_ - 1) % kMost];
  if (last == nullptr || last->node != node || !last->is_read) {
    cross({node, 0, true});
  }
  if (!resting_.empty()) {
    cross({node, 0, false});
  }
}

Boundaries::Around Boundaries::around(std::int64_t node) const {
  Around found;
  const std::size_t end = count_ > kMost ? count_ - kMost : 0;
  for (std::size_t index = count_; index != end; --index) {
    const Boundary& one = last_[(index - 1) % kMost];
    if (one.node <= node) {
      found.before = &one;
      return found;
    }
    found.after = &one;
  }
  found.is_known = end == 0 || !has_skipped_;
  return found;
}

bool Boundaries::were_read_around(std::int64_t node) const {
  const auto [before, after, is_known] = around(node);
  return is_known && (before == nullptr || before->is_read) && (after == nullptr || after->is_read);
}

}  // namespace vdnn::hooks
