// How a destructor hands something back without taking a lock: a push-only stack that its owner empties whole.
//
// Any thread may push, at any moment, in a garbage collection inside somebody's critical section for instance. Only
// take_all() removes, and it removes everything, so the classic ABA fault of lock-free stacks cannot occur.
#pragma once

#include <atomic>

namespace vdnn {

// Node has a member `Node* next_returned`; a node is on at most one stack at a time.
template <class Node>
class ReturnStack {
 public:
  ReturnStack() = default;
  ReturnStack(const ReturnStack&) = delete;  // nodes in it belong to one owner
  ReturnStack& operator=(const ReturnStack&) = delete;

  void push(Node* node) noexcept {
    Node* head = head_.load(std::memory_order_relaxed);
    do {
      node->next_returned = head;
    } while (!head_.compare_exchange_weak(head, node, std::memory_order_release, std::memory_order_relaxed));
  }

  // All pushed nodes, newest first, linked through next_returned.
  [[nodiscard]] Node* take_all() noexcept { return head_.exchange(nullptr, std::memory_order_acquire); }

 private:
  std::atomic<Node*> head_{nullptr};
};

}  // namespace vdnn
