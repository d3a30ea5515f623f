// The last accesses of every byte that a checker has seen: for each range, one write and the reads since that write.
//
// A map of disjoint ranges, split where accesses begin and end. It does not use clocks: the caller decides which of two
// accesses came first. Not synchronized.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"

namespace vdnn {

struct LoggedAccess {
  std::uint32_t stream = 0;
  std::uint64_t number = 0;  // index of the operation in its stream, from 1
  Access access = Access::Read;
  std::string label;
  std::shared_ptr<const std::string> origin;  // where the program issued it; null if unknown
};

class AccessLog {
 public:
  // Calls `conflict(range, earlier)` for every logged access that the new access must come after (for a read, the last
  // write; for a write or release, the last write and every read since), then logs the new access.
  void add(ByteRange range, const LoggedAccess& access,
           const std::function<void(ByteRange, const LoggedAccess&)>& conflict);
  void forget(ByteRange range);

 private:
  struct Segment {
    Address end = 0;
    std::vector<LoggedAccess> last_write;  // zero or one
    std::vector<LoggedAccess> reads;       // since last_write, the latest of each stream
  };
  using Segments = std::map<Address, Segment>;
  void split_at(Address address);
  void cover(ByteRange range);
  static void log(Segment& segment, const LoggedAccess& access);

  Segments segments_;
};

}  // namespace vdnn
