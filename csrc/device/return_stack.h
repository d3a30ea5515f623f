// A lock-free stack through which destructors return objects to their owner, which takes all of them at once.
//
// Any thread may push at any moment, for example in a garbage collection inside another thread's critical section. Only
// take_all() removes nodes, and it removes all of them, so the ABA problem of lock-free stacks cannot occur.
#pragma once

#include <atomic>

namespace vdnn {

// Node must have a member `Node* next_returned`. A node is on at most one stack at a time.
template <class Node>
class ReturnStack {
 public:
  ReturnStack() = default;
  ReturnStack(const ReturnStack&) = delete;  // its nodes belong to one owner
  ReturnStack& operator=(const ReturnStack&) = delete;

  void push(Node* node) noexcept {
    Node* head = head_.load(std::memory_order_relaxed);
    do {
      node->next_returned = head;
    } while (!head_.compare_exchange_weak(head, node, std::memory_order_release, std::memory_order_relaxed));
  }

  // Returns all pushed nodes, newest first, linked through next_returned.
  [[nodiscard]] Node* take_all() noexcept { return head_.exchange(nullptr, std::memory_order_acquire); }

 private:
  std::atomic<Node*> head_{nullptr};
};

}  // namespace vdnn
