// Computes the orders of covers from the times of gaps.
#include "planning/covers.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace vdnn {

namespace {

constexpr int random_orders = 8;
// A cover near another first lets in up to so many gaps that the other leaves out: a share of them, but a few at least.
constexpr double returned_share = 0.05;
constexpr std::size_t returned_at_least = 6;

}  // namespace

std::vector<AbsenceTime> absence_times(const StepModel& model) {
  const StepModel::Shape& shape = model.shape();
  std::vector<std::int64_t> reached(shape.compute_ns.size() + 1, 0);
  std::partial_sum(shape.compute_ns.begin(), shape.compute_ns.end(), reached.begin() + 1);
  const LinkModel& link = model.link();
  const double copies_ns = 1e9 / link.to_host_bytes_per_s + 1e9 / link.to_device_bytes_per_s;  // of a byte, both ways
  std::vector<AbsenceTime> times;
  times.reserve(shape.gaps.size());
  for (const StepGap& gap : shape.gaps) {
    times.push_back({static_cast<double>(reached[gap.last + 1] - reached[gap.release_point + 1]),
                     static_cast<double>(shape.storages[gap.storage].bytes) * copies_ns});
  }
  return times;
}

std::vector<std::vector<std::int32_t>> orders_of_leaving_out(const StepModel& model) {
  const StepModel::Shape& shape = model.shape();
  const std::vector<AbsenceTime> times = absence_times(model);
  const auto bytes = [&](std::int32_t gap) { return static_cast<double>(shape.bytes_of(gap)); };
  std::vector<std::function<double(std::int32_t)>> keys = {
      [&](std::int32_t gap) { return times[gap].length_ns - times[gap].copies_ns; },
      [&](std::int32_t gap) { return times[gap].length_ns / times[gap].copies_ns; },
      [&](std::int32_t gap) { return -bytes(gap); },
      bytes,
      [](std::int32_t gap) { return -static_cast<double>(gap); },
  };
  // Fewer copies to issue: what frees few bytes, or frees them in few intervals, is left out first.
  if (shape.copy_issue_ns > 0) {
    keys.emplace_back(
        [&](std::int32_t gap) { return bytes(gap) * (shape.gaps[gap].last - shape.gaps[gap].first + 1); });
  }
  std::vector<std::int32_t> every(shape.gaps.size());
  std::iota(every.begin(), every.end(), 0);
  std::vector<std::vector<std::int32_t>> orders;
  std::vector<double> values(every.size());
  for (const auto& key : keys) {
    std::transform(every.begin(), every.end(), values.begin(), key);
    orders.push_back(every);
    std::stable_sort(orders.back().begin(), orders.back().end(),
                     [&](std::int32_t one, std::int32_t other) { return values[one] < values[other]; });
  }
  Draw draw(0);
  for (int order = 0; order < random_orders; ++order) orders.push_back(draw.sample(every, every.size()));
  return orders;
}

std::vector<std::int32_t> order_near(const std::string& may_leave, Draw& draw) {
  std::vector<std::int32_t> used;
  std::vector<std::int32_t> left_out;
  for (std::size_t gap = 0; gap < may_leave.size(); ++gap) {
    (may_leave[gap] != 0 ? used : left_out).push_back(static_cast<std::int32_t>(gap));
  }
  const auto share = static_cast<std::size_t>(std::nearbyint(static_cast<double>(left_out.size()) * returned_share));
  const std::size_t most = std::min(left_out.size(), std::max(returned_at_least, share));
  const std::vector<std::int32_t> returned = draw.sample(left_out, draw.below(most + 1));
  draw.shuffle(used);
  std::vector<char> is_returned(may_leave.size(), 0);
  for (const std::int32_t gap : returned) is_returned[gap] = 1;
  std::vector<std::int32_t> order;
  order.reserve(may_leave.size());
  std::copy_if(left_out.begin(), left_out.end(), std::back_inserter(order),
               [&](std::int32_t gap) { return is_returned[gap] == 0; });
  order.insert(order.end(), used.begin(), used.end());
  order.insert(order.end(), returned.begin(), returned.end());
  return order;
}

}  // namespace vdnn
