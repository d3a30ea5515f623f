// The last accesses of every byte that a checker has seen: one write and the reads since it, per range.
//
// A map of disjoint ranges, split where accesses begin and end. It knows nothing of clocks: the caller says which
// of two accesses came before. Not synchronised.
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
  std::uint64_t number = 0;  // of the operation, along its stream
  Access access = Access::Read;
  std::string label;
  std::shared_ptr<const std::string> origin;  // where in a program it was issued, if somebody has said so
};

class AccessLog {
 public:
  // Calls `conflict(range, earlier)` for every logged access that the new one must come after (a read: the last
  // write; a write or release: the last write and every read since), then logs the new one.
  void add(ByteRange range, const LoggedAccess& access,
           const std::function<void(ByteRange, const LoggedAccess&)>& conflict);
  void forget(ByteRange range);
  [[nodiscard]] std::size_t ranges() const noexcept { return segments_.size(); }

 private:
  struct Segment {
    Address end = 0;
    std::vector<LoggedAccess> last_write;  // none or one
    std::vector<LoggedAccess> reads;       // since it, the latest of each stream
  };
  using Segments = std::map<Address, Segment>;
  void split_at(Address address);
  void cover(ByteRange range);
  static void log(Segment& segment, const LoggedAccess& access);

  Segments segments_;
};

}  // namespace vdnn
