// Implements VirtualClock.
#include "device/sim/virtual_clock.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "device/errors.h"

namespace vdnn {
namespace {

constexpr std::size_t most_past = 1024;  // intervals are dropped many at a time

double checked_rate(const char* name, double bytes_per_s) {
  if (!(bytes_per_s > 0) || !std::isfinite(bytes_per_s)) {
    throw InvalidArgument(name, "a positive number of bytes per second", std::to_string(bytes_per_s));
  }
  return bytes_per_s;
}

std::int64_t duration_ns(double bytes, double bytes_per_s) {
  return static_cast<std::int64_t>(std::ceil(bytes / bytes_per_s * 1e9));
}

}  // namespace

VirtualClock::VirtualClock(const LinkModel& link) : link_(link) {
  to_host_.bytes_per_s = checked_rate("to_host_bytes_per_s", link.to_host_bytes_per_s);
  to_device_.bytes_per_s = checked_rate("to_device_bytes_per_s", link.to_device_bytes_per_s);
  const double duplex = checked_rate("duplex_bytes_per_s", link.duplex_bytes_per_s);
  if (duplex < std::max(to_host_.bytes_per_s, to_device_.bytes_per_s)) {
    throw InvalidArgument("duplex_bytes_per_s", "at least the rate of the faster direction alone",
                          std::to_string(duplex));
  }
  if (link.latency_ns < 0) throw InvalidArgument("latency_ns", "0 or more", std::to_string(link.latency_ns));
  // The rest of the duplex rate, but at least a sixteenth of its own rate: a copy always makes progress.
  const auto shared = [&](double own, double other) { return std::clamp(duplex - other, own / 16, own); };
  to_host_.shared_bytes_per_s = shared(to_host_.bytes_per_s, to_device_.bytes_per_s);
  to_device_.shared_bytes_per_s = shared(to_device_.bytes_per_s, to_host_.bytes_per_s);
}

void VirtualClock::add_stream() {
  streams_.push_back({host_ns_, 0});
}

void VirtualClock::advance(std::uint32_t stream, std::int64_t duration) {
  StreamClock& clock = streams_[stream];
  clock.now_ns = std::max(clock.now_ns, host_ns_) + duration;
}

void VirtualClock::wait_until(std::uint32_t stream, std::int64_t time_ns) {
  StreamClock& clock = streams_[stream];
  const std::int64_t ready = std::max(clock.now_ns, host_ns_);
  if (time_ns > ready) clock.stall_ns += time_ns - ready;
  clock.now_ns = std::max(ready, time_ns);
}

void VirtualClock::host_waits_until(std::int64_t time_ns) {
  host_ns_ = std::max(host_ns_, time_ns);
}

std::int64_t VirtualClock::end_of_copy(const Engine& engine, const Engine& other, std::int64_t begin_ns,
                                       std::uint64_t bytes) {
  std::int64_t now = begin_ns;
  auto left = static_cast<double>(bytes);
  const auto begin = other.busy.begin() + static_cast<std::ptrdiff_t>(other.past);
  const auto first = std::lower_bound(begin, other.busy.end(), begin_ns,
                                      [](const Interval& busy, std::int64_t time) { return busy.end_ns <= time; });
  for (auto busy = first; busy != other.busy.end() && left > 0; ++busy) {
    const auto run = [&](std::int64_t until, double rate) {
      if (until <= now || left <= 0) return;
      const std::int64_t end = std::min(until, now + duration_ns(left, rate));
      left = end < until ? 0 : left - static_cast<double>(end - now) * rate / 1e9;
      now = end;
    };
    run(busy->begin_ns, engine.bytes_per_s);
    run(busy->end_ns, engine.shared_bytes_per_s);
  }
  return left > 0 ? now + duration_ns(left, engine.bytes_per_s) : now;
}

void VirtualClock::copy(std::uint32_t stream, std::uint64_t bytes, CopyDirection direction) {
  Engine& engine = direction == CopyDirection::DeviceToHost ? to_host_ : to_device_;
  Engine& other = direction == CopyDirection::DeviceToHost ? to_device_ : to_host_;
  StreamClock& clock = streams_[stream];
  const std::int64_t issue = std::max({clock.now_ns, host_ns_, engine.free_ns});
  const std::int64_t begin = issue + link_.latency_ns;
  const std::int64_t end = end_of_copy(engine, other, begin, bytes);
  engine.busy.push_back({begin, end});
  engine.free_ns = end;
  clock.now_ns = end;
  // Later copies of this engine start after `issue`, so intervals that end before it do not affect them.
  while (other.past < other.busy.size() && other.busy[other.past].end_ns <= issue) ++other.past;
  if (other.past < most_past) return;
  other.busy.erase(other.busy.begin(), other.busy.begin() + static_cast<std::ptrdiff_t>(other.past));
  other.past = 0;
}

}  // namespace vdnn
