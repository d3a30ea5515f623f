// The streams of a simulated device, which run as early, as late or as randomly as is legal.
//
// An operation may run once every earlier operation of its stream has run and every event that its stream waits for has
// happened. Within these limits the schedule decides:
//   eager   runs an operation at once;
//   lazy    runs an operation only when it is needed (by a wait of the host, a wait of an adopted stream, or close()),
//           which is the latest legal moment;
//   random  draws from the seed how fast each stream is and, at every call to the device, how many operations each
//           stream runs and in which order.
// `eager` and `lazy` have one worker thread per stream, and only `eager` runs operations concurrently. `random` runs
// them on the calling thread: the order depends only on the seed and the order of calls, so a failing schedule can be
// repeated, and no time is spent on thread switches. An adopted stream has no worker: the calling thread does its work.
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
  // Ends the workers; operations that have not run are dropped. Must not run in a forked child, see
  // [Note: Leaked in a forked child].
  ~SimStreams();

  std::uint32_t add_worker();
  // From now on the stream runs at once, or only when needed, whatever the schedule. Not for `random`.
  void set_eager(std::uint32_t stream, bool eager);
  std::uint32_t add_adopted();
  // For exploring schedules one by one, under `lazy`: runnable() returns the streams whose next operation may run now,
  // and run_one() runs the next operation of a stream.
  [[nodiscard]] std::vector<std::uint32_t> runnable();
  void run_one(std::uint32_t stream);
  // Issues `work` to a stream; on an adopted stream it runs now, on this thread.
  void submit(std::uint32_t stream, std::function<void()> work);
  // The number of operations issued to the stream.
  [[nodiscard]] std::uint64_t position(std::uint32_t stream);
  // Later operations of `waiter` run only after `stream` has run `position` operations.
  void wait(std::uint32_t waiter, std::uint32_t stream, std::uint64_t position);
  [[nodiscard]] bool done(std::uint32_t stream, std::uint64_t position);
  // Blocks the calling thread and makes the operations run that are needed.
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
    bool running = false;      // `random`: a thread is running its next operation
    std::uint64_t temper = 0;  // `random`: its row of `bursts`, which says how fast it is
    std::uint64_t issued = 0;
    std::uint64_t completed = 0;
    std::uint64_t granted = 0;  // it may run operations up to this position
    std::uint64_t forced = 0;   // up to this position, everything that the stream waits for is granted too
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
