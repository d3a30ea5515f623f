// Workers, grants and forcing.
#include "device/sim_streams.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace vdnn {
namespace {

constexpr std::uint64_t everything = std::numeric_limits<std::uint64_t>::max();
// "As late as legal" would be never for a program that polls; after this many fruitless queries the work is done.
constexpr std::uint32_t patience_with_queries = 8;

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
    const Operation& next = state.queue.front();
    if (next.work || streams_[next.awaited_stream]->completed >= next.awaited_position) found.push_back(stream);
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
  if (waiter == stream) return;  // its own order already says so
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
  if (++state.fruitless_queries >= patience_with_queries) force(stream, position);
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
  force(stream, position);
  const StreamState& state = *streams_[stream];
  progress_.wait(lock, [&] { return state.completed >= position; });
}

void SimStreams::force(std::uint32_t stream, std::uint64_t position) {
  StreamState& state = *streams_[stream];
  // Without remembering what was forced before, streams that wait for each other in turn would be walked through as
  // often as there are paths: exponentially often.
  const std::uint64_t already = std::max(state.completed, state.forced);
  if (already >= position) return;
  state.forced = position;
  if (state.granted < position) state.granted = position;
  state.has_work.notify_one();
  // Waits refer to what was issued before them, so this ends.
  std::uint64_t at = state.completed;
  for (const Operation& operation : state.queue) {
    if (++at > position) break;
    if (at > already && !operation.work) force(operation.awaited_stream, operation.awaited_position);
  }
}

// It has run all it may, or waits for what another stream may not run yet.
bool SimStreams::at_rest(const StreamState& state) const {
  if (state.queue.empty() || state.completed >= state.granted) return true;
  const Operation& next = state.queue.front();
  return !next.work && streams_[next.awaited_stream]->completed < next.awaited_position;
}

void SimStreams::run_randomly(std::unique_lock<std::mutex>& lock) {
  if (schedule_ != Schedule::Random) return;
  for (const auto& state : streams_) {
    if (state->adopted) continue;
    // Often nothing, sometimes one or a few, now and then all that is there: delays of every length.
    static constexpr std::uint64_t bursts[] = {0, 0, 0, 0, 1, 2, 4, 1 << 20};
    const std::uint64_t burst = bursts[random_() % std::size(bursts)];
    state->granted = std::min(state->issued, std::max(state->granted, state->completed) + burst);
    state->has_work.notify_one();
  }
  progress_.wait(lock, [&] {
    return std::all_of(streams_.begin(), streams_.end(), [&](const auto& state) { return at_rest(*state); });
  });
}

void SimStreams::abandon() noexcept {
  for (const auto& state : streams_) {
    if (state->worker.joinable()) state->worker.detach();
  }
}

}  // namespace vdnn
