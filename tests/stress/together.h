// Several threads that start at once and end together; the first failure of any is the failure of all.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace vdnn::stress {

// Runs body(0) .. body(count - 1), each on a thread of its own.
inline void run_together(std::size_t count, const std::function<void(std::size_t)>& body) {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t arrived = 0;
  std::exception_ptr first_failure;
  const auto member = [&](std::size_t index) {
    {
      // A thread takes long to start: without this the first would often be done before the last begins.
      std::unique_lock<std::mutex> lock(mutex);
      ++arrived;
      changed.notify_all();
      changed.wait(lock, [&] { return arrived == count; });
    }
    try {
      body(index);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (first_failure == nullptr) first_failure = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t index = 0; index < count; ++index) threads.emplace_back(member, index);
  for (std::thread& thread : threads) thread.join();
  if (first_failure != nullptr) std::rethrow_exception(first_failure);
}

// How far others have come, for somebody who acts in their midst.
class Progress {
 public:
  void advance() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++steps_;
    changed_.notify_all();
  }
  // A member that ends early, or fails, must not leave the watcher waiting.
  void finish() {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }
  void wait_for(std::uint64_t steps) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_ || steps_ >= steps; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t steps_ = 0;
  bool finished_ = false;
};

// Says that its member has ended, however it ends.
class Finishing {
 public:
  explicit Finishing(Progress& progress) : progress_(progress) {}
  Finishing(const Finishing&) = delete;  // says it once
  Finishing& operator=(const Finishing&) = delete;
  ~Finishing() { progress_.finish(); }

 private:
  Progress& progress_;
};

}  // namespace vdnn::stress
