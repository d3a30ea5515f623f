// Running streams: the worker loop, the inline legacy stream, and what blocks on what.
#include "fake_stream.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace vdnn::fake {

namespace {

constexpr std::uintptr_t first_stream_handle = 0x51000000;
constexpr std::uint64_t seed_stride = 0x9E3779B97F4A7C15;  // an odd constant: streams of one seed draw apart

bool reached(const FakeStream& stream, std::uint64_t position) {
  return stream.finished >= position;
}

}  // namespace

StreamEngine::StreamEngine(std::mutex& mutex, FaultPlan& faults)
    : mutex_(mutex), faults_(faults), legacy_(std::make_shared<FakeStream>()), handles_(first_stream_handle) {}

driver::StreamHandle StreamEngine::create(bool blocking) {
  auto stream = std::make_shared<FakeStream>();
  stream->number = created_ + 1;
  stream->blocking = blocking;
  seed(*stream);
  // Never joined: the process may end, or this library be closed, with streams alive. A thread waits on state that
  // is never freed, so it can be left where it is.
  std::thread(&StreamEngine::run, this, stream).detach();
  ++created_;
  if (blocking) ++blocking_created_;
  running_.push_back(stream);
  return handles_.add(std::move(stream));
}

StreamPointer StreamEngine::find(driver::StreamHandle handle) {
  if (handle == nullptr) return legacy_;
  const StreamPointer* found = handles_.find(handle);
  return found == nullptr ? nullptr : *found;
}

bool StreamEngine::retire(driver::StreamHandle handle) {
  const auto stream = handles_.take(handle);
  if (!stream) return false;
  (*stream)->retired = true;
  demand(*stream, (*stream)->issued);
  changed_.notify_all();
  return true;
}

void StreamEngine::issue(Lock& lock, const StreamPointer& stream, Operation operation) {
  operation.position = ++stream->issued;
  if (operation.record != nullptr) operation.record->position = operation.position;
  if (stream == legacy_) return issue_inline(lock, std::move(operation));
  if (operation.record != nullptr) operation.record->stream = stream;
  if (stream->blocking) operation.after_legacy = legacy_->issued;
  stream->queue.push_back(std::move(operation));
  changed_.notify_all();
}

void StreamEngine::issue_inline(Lock& lock, Operation operation) {
  std::vector<Target> before{{legacy_, operation.position - 1}};
  for (const StreamPointer& stream : running_) {
    if (stream->blocking) before.push_back({stream, stream->issued});
  }
  wait_until(lock, before);
  if (operation.wait != nullptr) synchronize(lock, operation.wait);
  execute(lock, *legacy_, operation);
}

void StreamEngine::drain(Lock& lock, const StreamPointer& stream) {
  std::vector<Target> targets{{stream, stream->issued}};
  // The legacy stream is behind every blocking stream, so waiting for it waits for them.
  for (const StreamPointer& other : running_) {
    if (stream == legacy_ && other->blocking) targets.push_back({other, other->issued});
  }
  wait_until(lock, targets);
}

void StreamEngine::drain_all(Lock& lock) {
  std::vector<Target> targets{{legacy_, legacy_->issued}};
  for (const StreamPointer& stream : running_) targets.push_back({stream, stream->issued});
  wait_until(lock, targets);
}

void StreamEngine::synchronize(Lock& lock, const std::shared_ptr<EventVersion>& version) {
  if (version->stream != nullptr) demand(version->stream, version->position);
  changed_.wait(lock, [&] { return version->happened; });
}

void StreamEngine::wait_until(Lock& lock, const std::vector<Target>& targets) {
  for (const Target& target : targets) demand(target.stream, target.position);
  changed_.wait(lock, [&] {
    return std::all_of(targets.begin(), targets.end(),
                       [](const Target& target) { return reached(*target.stream, target.position); });
  });
}

// A held stream must run as far as somebody blocks on it, and so must each stream that it waits for on the way.
void StreamEngine::demand(const StreamPointer& stream, std::uint64_t position) {
  std::vector<Target> pending{{stream, position}};
  while (!pending.empty()) {
    const Target target = std::move(pending.back());
    pending.pop_back();
    const std::uint64_t already = target.stream->demanded;
    if (target.position <= already) continue;
    target.stream->demanded = target.position;
    for (const Operation& operation : target.stream->queue) {
      if (operation.position <= already || operation.position > target.position) continue;
      if (operation.wait != nullptr && operation.wait->stream != nullptr) {
        pending.push_back({operation.wait->stream, operation.wait->position});
      }
    }
  }
  changed_.notify_all();
}

void StreamEngine::run(const StreamPointer& stream) {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ready(*stream) || (stream->retired && stream->queue.empty()); });
    if (stream->queue.empty()) break;
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    execute(lock, *stream, operation);
  }
  running_.erase(std::find(running_.begin(), running_.end(), stream));
}

bool StreamEngine::ready(const FakeStream& stream) const {
  if (stream.queue.empty()) return false;
  const Operation& next = stream.queue.front();
  if (held_ && next.position > stream.demanded) return false;
  if (next.wait != nullptr && !next.wait->happened) return false;
  return reached(*legacy_, next.after_legacy);
}

void StreamEngine::execute(Lock& lock, FakeStream& stream, Operation& operation) {
  const auto pause = draw_pause(stream);
  if (pause.count() > 0) {
    lock.unlock();
    std::this_thread::sleep_for(pause);
    lock.lock();
  }
  if (operation.work && faults_.lets_work_run()) {
    lock.unlock();
    operation.work();
    lock.lock();
  }
  // Records happen even in a lost context, so that nobody blocks for ever: the error is told by every later call.
  if (operation.record != nullptr) {
    operation.record->stamp = std::chrono::steady_clock::now();
    operation.record->happened = true;
    operation.record->stream = nullptr;
  }
  stream.finished = operation.position;
  changed_.notify_all();
}

void StreamEngine::hold(bool held) {
  held_ = held;
  changed_.notify_all();
}

void StreamEngine::delay(std::uint64_t seed_value, std::chrono::microseconds longest) {
  seed_ = seed_value;
  longest_pause_ = longest;
  seed(*legacy_);
  for (const StreamPointer& stream : running_) seed(*stream);
}

void StreamEngine::reset() {
  hold(false);
  delay(0, std::chrono::microseconds(0));
  blocking_created_ = 0;
  if (handles_.size() == 0) created_ = 0;
}

std::chrono::microseconds StreamEngine::draw_pause(FakeStream& stream) const {
  if (longest_pause_.count() == 0) return longest_pause_;
  std::uniform_int_distribution<std::int64_t> pauses(0, longest_pause_.count());
  return std::chrono::microseconds(pauses(stream.random));
}

void StreamEngine::seed(FakeStream& stream) const {
  stream.random.seed(seed_ + stream.number * seed_stride);
}

}  // namespace vdnn::fake
