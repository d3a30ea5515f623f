// The last boundaries of module calls on one thread, and the last readings of torch's settings, by autograd's sequence
// number: nodes from that number on were made behind the boundary. If the settings were not read at a boundary next to
// a node, nobody can tell under which settings the node ran, unless it saved something itself or rounds once
// (torch_settings.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_set>

namespace vdnn::hooks {

struct Boundary final {
  std::int64_t node;
  std::uintptr_t module;  // 0: a reading at another place
  bool is_read;
};

class Boundaries final {
 public:
  // Of the calling thread.
  static Boundaries& here();

  void cross(const Boundary& boundary);
  // This watch of calls rests from now on, or no more. While one does, every reading has an unread boundary behind it.
  void rest(std::uintptr_t watch, bool begins);
  // The settings were read behind the last node that is older than this one.
  void read(std::int64_t node);

  // The last boundary ahead of this node and the first behind it; null where there is none.
  struct Around final {
    const Boundary* before = nullptr;
    const Boundary* after = nullptr;
    bool is_known = true;  // false: they are forgotten, and not all that are forgotten were read
  };
  [[nodiscard]] Around around(std::int64_t node) const;
  // True if the settings were read at both of them.
  [[nodiscard]] bool were_read_around(std::int64_t node) const;

 private:
  static constexpr std::size_t kMost = 512;

  std::array<Boundary, kMost> last_{};
  std::size_t count_ = 0;
  bool has_skipped_ = false;
  std::unordered_set<std::uintptr_t> resting_;
};

}  // namespace vdnn::hooks
