// Splitting and filling the ranges of an AccessLog.
#include "device/check/access_log.h"

#include <algorithm>
#include <iterator>

namespace vdnn {

void AccessLog::split_at(Address address) {
  auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return;
  const auto holder = std::prev(after);
  if (holder->first == address || holder->second.end <= address) return;
  Segment right = holder->second;
  holder->second.end = address;
  segments_.emplace_hint(after, address, std::move(right));
}

// Creates segments that cover `range` exactly; segments that fill gaps have no accesses.
void AccessLog::cover(ByteRange range) {
  split_at(range.address);
  split_at(range.end());
  Address at = range.address;
  for (auto segment = segments_.lower_bound(range.address); at < range.end();) {
    if (segment == segments_.end() || segment->first >= range.end()) {
      segments_.emplace_hint(segment, at, Segment{range.end(), {}, {}});
      return;
    }
    if (segment->first > at) segments_.emplace_hint(segment, at, Segment{segment->first, {}, {}});
    at = segment->second.end;
    ++segment;
  }
}

void AccessLog::log(Segment& segment, const LoggedAccess& access) {
  if (access.access != Access::Read) {
    segment.last_write.assign(1, access);
    segment.reads.clear();
    return;
  }
  const auto same_stream = std::find_if(segment.reads.begin(), segment.reads.end(),
                                        [&](const LoggedAccess& read) { return read.stream == access.stream; });
  if (same_stream == segment.reads.end()) {
    segment.reads.push_back(access);
  } else {
    *same_stream = access;  // an operation ordered after a read is ordered after earlier reads of the same stream
  }
}

void AccessLog::add(ByteRange range, const LoggedAccess& access,
                    const std::function<void(ByteRange, const LoggedAccess&)>& conflict) {
  if (range.bytes == 0) return;
  cover(range);
  const auto begin = segments_.find(range.address);
  const auto end = segments_.lower_bound(range.end());
  for (auto segment = begin; segment != end; ++segment) {
    const ByteRange part{segment->first, segment->second.end - segment->first};
    for (const LoggedAccess& write : segment->second.last_write) conflict(part, write);
    if (access.access == Access::Read) continue;
    for (const LoggedAccess& read : segment->second.reads) conflict(part, read);
  }
  for (auto segment = begin; segment != end; ++segment) log(segment->second, access);
}

void AccessLog::forget(ByteRange range) {
  if (range.bytes == 0) return;
  split_at(range.address);
  split_at(range.end());
  segments_.erase(segments_.lower_bound(range.address), segments_.lower_bound(range.end()));
}

}  // namespace vdnn
