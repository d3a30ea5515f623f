// The threads of one GPU block as fibers of one host thread.
//
// A fiber runs alone until it ends or must meet others, so a run is deterministic and needs no lock. A barrier that
// some thread of the block never reaches ends the program with a message, where a GPU would hang.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace cuda_on_host {

[[noreturn]] inline void fail(const char* what) {
  std::printf("cuda_on_host: %s\n", what);
  std::abort();
}

struct Fiber {
  ucontext_t context{};
  std::vector<char> stack = std::vector<char>(64 * 1024);
  bool ended = false;
  unsigned warp_meetings = 0;
  unsigned block_meetings = 0;
  std::array<std::uint64_t, 2> offered{};  // by parity: a fast fiber may be one meeting ahead of a slow one
};

class Block final {
 public:
  static Block& instance() {
    static Block block;
    return block;
  }
  // Runs `body` once for each of `threads` threads, set_thread telling which one runs.
  void run(unsigned threads, const std::function<void()>& body, const std::function<void(unsigned)>& set_thread);
  // Waits until all fibers from `first` on have met as often as the running one.
  void meet(unsigned Fiber::* meetings, unsigned first, unsigned count);

  [[nodiscard]] unsigned current() const { return current_; }
  [[nodiscard]] unsigned threads() const { return threads_; }
  [[nodiscard]] Fiber& fiber(unsigned index) { return fibers_[index]; }

 private:
  static void enter();

  std::vector<Fiber> fibers_;
  ucontext_t scheduler_{};
  const std::function<void()>* body_ = nullptr;
  unsigned threads_ = 0;
  unsigned current_ = 0;
  bool progress_ = false;
};

inline void Block::enter() {
  Block& block = instance();
  (*block.body_)();
  block.fibers_[block.current_].ended = true;
  block.progress_ = true;
}

inline void Block::run(unsigned threads, const std::function<void()>& body,
                       const std::function<void(unsigned)>& set_thread) {
  if (fibers_.size() < threads) fibers_.resize(threads);
  body_ = &body;
  threads_ = threads;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers_[i];
    fiber.ended = false;
    fiber.warp_meetings = fiber.block_meetings = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Block::enter, 0);
  }
  for (bool all_ended = false; !all_ended;) {
    all_ended = true;
    progress_ = false;
    for (current_ = 0; current_ < threads; ++current_) {
      if (fibers_[current_].ended) continue;
      set_thread(current_);
      swapcontext(&scheduler_, &fibers_[current_].context);
      all_ended = all_ended && fibers_[current_].ended;
    }
    if (!progress_) fail("some threads of a block wait for others that never come");
  }
}

inline void Block::meet(unsigned Fiber::* meetings, unsigned first, unsigned count) {
  const unsigned mine = ++(fibers_[current_].*meetings);
  progress_ = true;
  for (unsigned i = first; i < first + count; ++i) {
    while (fibers_[i].*meetings < mine) swapcontext(&fibers_[current_].context, &scheduler_);
  }
}

}  // namespace cuda_on_host
