// Events as CUDA has them: one handle, and a new version of what it means at every record.
//
// A wait keeps the version that it was given, so recording the event again cannot move a wait that is already
// queued, and destroying the event cannot take it away.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

namespace vdnn::fake {

struct FakeStream;

struct EventVersion {
  // Where it will happen; null once it has (and for records of the legacy stream), which also frees the stream.
  std::shared_ptr<FakeStream> stream;
  std::uint64_t position = 0;
  bool happened = false;
  std::chrono::steady_clock::time_point stamp;
};

struct FakeEvent {
  std::uint64_t number = 0;  // in order of creation
  bool timed = true;
  std::uint64_t versions = 0;
  std::shared_ptr<EventVersion> latest;  // null: never recorded, which counts as happened
};

}  // namespace vdnn::fake
