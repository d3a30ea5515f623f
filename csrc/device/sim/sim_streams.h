// The streams of a simulated device, run as early, as late or as randomly as is legal.
//
// An operation may run once everything before it on its stream has run and what its stream waits for has happened.
// Within that freedom the schedule decides: `eager` runs at once; `lazy` runs nothing until somebody needs it (a
// host wait, an adopted stream's wait, close), which is the latest legal moment. Both have a worker thread for each
// stream; real concurrency is `eager`'s. `random` draws from the seed how hurried each stream is, and at every call
// made to the device how many operations each runs, one by one in an order that is drawn too, on the calling thread:
// what ran when depends only on the seed and the order of calls, so a failing schedule can be repeated, and no time
// goes by in changing threads. Adopted streams have no worker: their work is the calling thread's.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace vdnn {

enum class Schedule { Eager, Lazy, Random };

class SimStreams {
 public:
  SimStreams(Schedule schedule, std::uint64_t seed);
  SimStreams(const SimStreams&) = delete;  // threads refer to it
  SimStreams& operator=(const SimStreams&) = delete;
  // Ends the workers; what has not run never will. Not in a forked child: see [Note: Leaked in a forked child].
  ~SimStreams();

  std::uint32_t add_worker();
  // From now on the stream runs at once, or only when somebody needs it, whatever the schedule. Not for `random`.
  void set_eager(std::uint32_t stream, bool eager);
  std::uint32_t add_adopted();
  // For exploring schedules one by one, under `lazy`: streams whose next operation may run now; running just that one.
  [[nodiscard]] std::vector<std::uint32_t> runnable();
  void run_one(std::uint32_t stream);
  // Puts `work` on a stream; on an adopted stream it runs now, on this thread.
  void submit(std::uint32_t stream, std::function<void()> work);
  // How much has been put on the stream.
  [[nodiscard]] std::uint64_t position(std::uint32_t stream);
  // Nothing later on `waiter` runs before `stream` has run `position` operations.
  void wait(std::uint32_t waiter, std::uint32_t stream, std::uint64_t position);
  [[nodiscard]] bool done(std::uint32_t stream, std::uint64_t position);
  // Blocks the calling thread; makes what is needed run.
  void synchronize(std::uint32_t stream, std::uint64_t position);
  void drain_all();

 private:
  struct Operation {
    std::function<void()> work;  // empty for a wait
    std::uint32_t awaited_stream = 0;
    std::uint64_t awaited_position = 0;
  };
  struct StreamState {
    bool adopted = false;
    bool running = false;      // `random`: some thread runs its next operation
    std::uint64_t temper = 0;  // `random`: how hurried it is
    std::uint64_t issued = 0;
    std::uint64_t completed = 0;
    std::uint64_t granted = 0;  // may run up to here
    std::uint64_t forced = 0;   // up to here, all that this stream waits for has been granted too
    std::uint32_t fruitless_queries = 0;
    std::deque<Operation> queue;
    std::condition_variable has_work;
    std::thread worker;
  };
  void run_worker(StreamState& state);
  void force(std::uint32_t stream, std::uint64_t position);
  [[nodiscard]] bool must_wait(const Operation& operation) const;
  void run_randomly(std::unique_lock<std::mutex>& lock);
  void run_next(std::unique_lock<std::mutex>& lock, StreamState& state);
  void run_until(std::unique_lock<std::mutex>& lock, std::uint32_t stream, std::uint64_t position);
  [[nodiscard]] bool at_rest(const StreamState& state) const;
  void block_until_done(std::unique_lock<std::mutex>& lock, std::uint32_t stream, std::uint64_t position);

  const Schedule schedule_;
  std::mutex mutex_;
  std::condition_variable progress_;
  std::mt19937_64 random_;
  bool ending_ = false;
  std::vector<std::unique_ptr<StreamState>> streams_;
};

}  // namespace vdnn
