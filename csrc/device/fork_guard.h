// Tells whether this process is a forked child of the one that made an object.
//
// Threads and driver contexts do not survive fork(), so a device made by the parent must not be used in a child
// (DataLoader workers inherit everything): its calls are refused there and its destructors let go of nothing.
#pragma once

#include <cstdint>
#include <string_view>

namespace vdnn {

class ForkGuard {
 public:
  ForkGuard() noexcept;
  [[nodiscard]] bool in_forked_child() const noexcept;
  // Throws Closed there. Comes before any lock: a thread that does not exist in the child may have held it.
  void refuse_in_child(std::string_view what) const;

 private:
  std::uint64_t generation_;
};

}  // namespace vdnn
