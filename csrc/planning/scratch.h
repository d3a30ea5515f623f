// Memory for the short lists of one evaluation of a search.
//
// A search evaluates thousands of choices, each with a dozen lists that are dropped at its end. Taken from the heap
// they take a third of the time of an evaluation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

namespace vdnn {

template <typename Item>
using ScratchList = std::pmr::vector<Item>;

// On the stack; what does not fit comes from the heap. Its lists have to end before it.
class Scratch {
 public:
  Scratch() : memory_(first_.data(), first_.size()) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] std::pmr::memory_resource* memory() { return &memory_; }
  template <typename Item>
  [[nodiscard]] ScratchList<Item> list(std::size_t count, Item item) {
    return ScratchList<Item>(count, item, &memory_);
  }

 private:
  static constexpr std::size_t first_bytes = 64 << 10;
  alignas(std::max_align_t) std::array<std::byte, first_bytes> first_;  // not initialized
  std::pmr::monotonic_buffer_resource memory_;
};

}  // namespace vdnn
