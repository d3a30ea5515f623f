// Workers, grants and forced progress of SimStreams.
#include "device/sim/sim_streams.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace vdnn {
namespace {

constexpr std::uint64_t everything = std::numeric_limits<std::uint64_t>::max();
// For a program that polls, the latest legal moment would never come: after this many queries without success, the work
// runs.
constexpr std::uint32_t patience_with_queries = 8;

// Under `random`, the number of operations that a stream runs at a call: one of the eight of a row, drawn at each call.
// The row is drawn once per stream, so under some seeds one stream runs far ahead of another until a wait orders them.
constexpr std::uint64_t all = 1 << 20;
constexpr std::uint64_t bursts[][8] = {
    {0, 0, 0, 0, 1, 2, 4, all},              // delays of every length
    {0, 0, 0, 0, 1, 2, 4, all},              //
    {0, 0, 0, 0, 0, 0, 0, 1},                // slow
    {0, 0, 0, 0, 0, 0, 0, all},              // in rare bursts
    {0, all, all, all, all, all, all, all},  // fast
    {0, 0, 0, 0, 0, 0, 0, 0},                // stopped, except for one call in two hundred
};
constexpr std::uint64_t stopped = std::size(bursts) - 1;
constexpr std::uint64_t stopped_calls = 200;

}  // namespace

SimStreams::SimStreams(Schedule schedule, std::uint64_t seed) : schedule_(schedule), random_(seed) {}

SimStreams::~SimStreams() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    for (const auto& state : streams_) state->has_work.notify_all();
    progress_.notify_all();
  }
  for (const auto& state : streams_) {
    if (state->worker.joinable()) state->worker.join();
  }
}

std::uint32_t SimStreams::add_adopted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::make_unique<StreamState>());
  streams_.back()->adopted = true;
  return static_cast<std::uint32_t>(streams_.size() - 1);
}

std::uint32_t SimStreams::add_worker() {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::make_unique<StreamState>());
  StreamState& state = *streams_.back();
  if (schedule_ == Schedule::Random) {
    state.temper = random_() % std::size(bursts);
    return static_cast<std::uint32_t>(streams_.size() - 1);
  }
  state.granted = schedule_ == Schedule::Eager ? everything : 0;
  state.worker = std::thread([this, &state] { run_worker(state); });
  return static_cast<std::uint32_t>(streams_.size() - 1);
}

void SimStreams::set_eager(std::uint32_t stream, bool eager) {
  const std::lock_guard<std::mutex> lock(mutex_);
  StreamState& state = *streams_[stream];
  state.granted = eager ? everything : state.completed;
  state.has_work.notify_one();
}

std::vector<std::uint32_t> SimStreams::runnable() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::uint32_t> found;
  for (std::uint32_t stream = 0; stream < streams_.size(); ++stream) {
    const StreamState& state = *streams_[stream];
    if (state.queue.empty()) continue;
    if (!must_wait(state.queue.front())) found.push_back(stream);
  }
  return found;
}

void SimStreams::run_one(std::uint32_t stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  StreamState& state = *streams_[stream];
  if (state.queue.empty()) return;
  const std::uint64_t position = state.completed + 1;
  state.granted = std::max(state.granted, position);
  state.has_work.notify_one();
  progress_.wait(lock, [&] { return state.completed >= position; });
}

void SimStreams::run_worker(StreamState& state) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    state.has_work.wait(lock, [&] { return ending_ || (!state.queue.empty() && state.completed < state.granted); });
    if (ending_) return;
    Operation operation = std::move(state.queue.front());
    if (operation.work) {
      lock.unlock();
      operation.work();
      lock.lock();
    } else {
      const StreamState& awaited = *streams_[operation.awaited_stream];
      progress_.wait(lock, [&] { return ending_ || awaited.completed >= operation.awaited_position; });
      if (ending_) return;
    }
    state.queue.pop_front();
    ++state.completed;
    progress_.notify_all();
  }
}

void SimStreams::submit(std::uint32_t stream, std::function<void()> work) {
  std::unique_lock<std::mutex> lock(mutex_);
  StreamState& state = *streams_[stream];
  if (state.adopted) {
    run_randomly(lock);
    lock.unlock();
    work();
    lock.lock();
    ++state.issued;
    ++state.completed;
    return;
  }
  state.queue.push_back({std::move(work), 0, 0});
  ++state.issued;
  if (state.completed < state.granted) state.has_work.notify_one();
  run_randomly(lock);
}

std::uint64_t SimStreams::position(std::uint32_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return streams_[stream]->issued;
}

void SimStreams::wait(std::uint32_t waiter, std::uint32_t stream, std::uint64_t position) {
  std::unique_lock<std::mutex> lock(mutex_);
  run_randomly(lock);
  StreamState& state = *streams_[waiter];
  if (waiter == stream) return;  // a stream runs its operations in order anyway
  if (state.adopted) {
    block_until_done(lock, stream, position);
    return;
  }
  if (streams_[stream]->completed >= position) return;
  state.queue.push_back({nullptr, stream, position});
  ++state.issued;
  if (state.completed < state.granted) state.has_work.notify_one();
}

bool SimStreams::done(std::uint32_t stream, std::uint64_t position) {
  std::unique_lock<std::mutex> lock(mutex_);
  run_randomly(lock);
  StreamState& state = *streams_[stream];
  if (state.completed >= position) {
    state.fruitless_queries = 0;
    return true;
  }
  if (++state.fruitless_queries < patience_with_queries) return false;
  if (schedule_ == Schedule::Random) {
    run_until(lock, stream, position);
  } else {
    force(stream, position);
  }
  return false;
}

void SimStreams::synchronize(std::uint32_t stream, std::uint64_t position) {
  std::unique_lock<std::mutex> lock(mutex_);
  run_randomly(lock);
  block_until_done(lock, stream, position);
}

void SimStreams::drain_all() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (std::uint32_t stream = 0; stream < streams_.size(); ++stream) {
    block_until_done(lock, stream, streams_[stream]->issued);
  }
}

void SimStreams::block_until_done(std::unique_lock<std::mutex>& lock, std::uint32_t stream, std::uint64_t position) {
  if (schedule_ == Schedule::Random) {
    run_until(lock, stream, position);
    return;
  }
  force(stream, position);
  const StreamState& state = *streams_[stream];
  progress_.wait(lock, [&] { return state.completed >= position; });
}

// Runs operations on this thread until the stream has reached `position`: its own, and those that they wait for.
void SimStreams::run_until(std::unique_lock<std::mutex>& lock, std::uint32_t stream, std::uint64_t position) {
  std::vector<std::pair<std::uint32_t, std::uint64_t>> needed{{stream, position}};
  while (!needed.empty()) {
    const auto [next, until] = needed.back();
    StreamState& state = *streams_[next];
    if (state.completed >= until) {
      needed.pop_back();
    } else if (state.running || state.queue.empty()) {
      progress_.wait(lock);  // another thread is running it
    } else if (must_wait(state.queue.front())) {
      // A wait refers to operations issued before it, so this terminates.
      needed.emplace_back(state.queue.front().awaited_stream, state.queue.front().awaited_position);
    } else {
      run_next(lock, state);
    }
  }
}

// Runs the operation without the lock: it may be slow, or need a lock that a thread holds while it waits for this one.
void SimStreams::run_next(std::unique_lock<std::mutex>& lock, StreamState& state) {
  auto work = std::move(state.queue.front().work);
  if (work) {
    state.running = true;
    lock.unlock();
    work();
    work = nullptr;  // objects that it captures must not be destroyed under this lock either
    lock.lock();
    state.running = false;
  }
  state.queue.pop_front();
  ++state.completed;
  progress_.notify_all();
}

void SimStreams::force(std::uint32_t stream, std::uint64_t position) {
  StreamState& state = *streams_[stream];
  // Remembering what was forced avoids exponential time: otherwise, streams that wait for each other in turn would be
  // visited once per path.
  const std::uint64_t already = std::max(state.completed, state.forced);
  if (already >= position) return;
  state.forced = position;
  if (state.granted < position) state.granted = position;
  state.has_work.notify_one();
  // A wait refers to operations issued before it, so this terminates.
  std::uint64_t at = state.completed;
  for (const Operation& operation : state.queue) {
    if (++at > position) break;
    if (at > already && !operation.work) force(operation.awaited_stream, operation.awaited_position);
  }
}

bool SimStreams::must_wait(const Operation& operation) const {
  return !operation.work && streams_[operation.awaited_stream]->completed < operation.awaited_position;
}

// True if the stream has run everything it may, waits for another stream, or is being run by another thread.
bool SimStreams::at_rest(const StreamState& state) const {
  return state.running || state.queue.empty() || state.completed >= state.granted || must_wait(state.queue.front());
}

void SimStreams::run_randomly(std::unique_lock<std::mutex>& lock) {
  if (schedule_ != Schedule::Random) return;
  for (const auto& state : streams_) {
    if (state->adopted || state->queue.empty()) continue;
    const std::uint64_t drawn = random_();
    std::uint64_t burst = bursts[state->temper][drawn % std::size(bursts[0])];
    if (state->temper == stopped && drawn % stopped_calls == 0) burst = 1;
    state->granted = std::min(state->issued, std::max(state->granted, state->completed) + burst);
  }
  std::vector<StreamState*> ready;
  while (true) {
    ready.clear();
    for (const auto& state : streams_) {
      if (!at_rest(*state)) ready.push_back(state.get());
    }
    if (ready.empty()) return;
    run_next(lock, *ready[random_() % ready.size()]);
  }
}

}  // namespace vdnn
