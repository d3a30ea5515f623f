// Objects behind opaque handles.
//
// A handle is a number that is never given out twice, in a range of its own per kind. A stale handle, or one of
// another kind, is therefore always an error and never somebody else's object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

namespace vdnn::fake {

template <class Handle, class Object>
class HandleTable final {
 public:
  explicit HandleTable(std::uintptr_t first) : next_(first) {}

  [[nodiscard]] Handle add(Object object) {
    const std::uintptr_t number = next_;
    next_ += spacing;
    objects_.emplace(number, std::move(object));
    return reinterpret_cast<Handle>(number);  // NOLINT(performance-no-int-to-ptr): opaque, never dereferenced
  }

  // nullptr if there is none. Valid until the object is taken.
  [[nodiscard]] Object* find(Handle handle) {
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    return found == objects_.end() ? nullptr : &found->second;
  }

  std::optional<Object> take(Handle handle) {
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == objects_.end()) return std::nullopt;
    std::optional<Object> object(std::move(found->second));
    objects_.erase(found);
    return object;
  }

  [[nodiscard]] std::size_t size() const noexcept { return objects_.size(); }

 private:
  static constexpr std::uintptr_t spacing = 16;

  std::map<std::uintptr_t, Object> objects_;
  std::uintptr_t next_;
};

}  // namespace vdnn::fake
