// Clocks, claims and violations of the OrderingChecker.
#include "device/check/ordering_checker.h"

#include <algorithm>

#include "codec/codec.h"
#include "device/errors.h"
#include "device/owned_memory.h"

namespace vdnn {
namespace {

std::string phrase(const LoggedAccess& access) {
  return std::string(to_string(access.access)) + " by " + access.label + " (operation " +
         std::to_string(access.number) + ")";
}

}  // namespace

std::string OrderingViolation::missing_edge() const {
  return "stream '" + second_stream + "' has not waited for any event recorded on stream '" + first_stream +
         "' after that " + first.substr(0, first.find(' '));
}

OrderingChecker::OrderingChecker(std::shared_ptr<Device> inner, OnViolation on_violation)
    : inner_(std::move(inner)), on_violation_(on_violation) {
  if (inner_ == nullptr) throw InvalidArgument("device", "a device to wrap", "none");
}

std::vector<OrderingViolation> OrderingChecker::take_violations() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(violations_, {});
}

void OrderingChecker::set_origin(std::string_view origin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  origins_[std::this_thread::get_id()] = std::make_shared<const std::string>(origin);
}

std::uint64_t OrderingChecker::checked_accesses() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return checked_accesses_;
}

VectorClock& OrderingChecker::clock_of(Stream stream) {
  VectorClock& clock = clocks_[stream.index];
  // Work issued to a stream is ordered after everything that the host has waited for.
  clock.join(host_clock_);
  return clock;
}

OrderingViolation OrderingChecker::describe(ByteRange range, const LoggedAccess& first, const LoggedAccess& second) {
  OrderingViolation violation;
  violation.range = range;
  violation.first = phrase(first);
  violation.first_stream = inner_->stream_name({device_id_, first.stream});
  violation.second = phrase(second);
  violation.second_stream = inner_->stream_name({device_id_, second.stream});
  if (first.origin != nullptr) violation.first_issued_at = *first.origin;
  if (second.origin != nullptr) violation.second_issued_at = *second.origin;
  return violation;
}

void OrderingChecker::check_operation(Stream stream, const std::vector<Claim>& claims, const std::string& label) {
  static_cast<void>(inner_->stream_name(stream));  // throws for a stream of another device before anything is logged
  const std::lock_guard<std::mutex> lock(mutex_);
  device_id_ = stream.device_id;
  VectorClock& clock = clock_of(stream);
  const std::uint64_t number = clock.tick(stream.index);
  std::shared_ptr<const std::string> origin;
  if (!origins_.empty()) {
    const auto known = origins_.find(std::this_thread::get_id());
    if (known != origins_.end()) origin = known->second;
  }
  std::vector<OrderingViolation> found;
  for (const Claim& claim : claims) {
    const LoggedAccess access{stream.index, number, claim.access, label, origin};
    checked_accesses_ += claim.range.bytes != 0;
    log_.add(claim.range, access, [&](ByteRange range, const LoggedAccess& earlier) {
      if (clock.at(earlier.stream) < earlier.number) found.push_back(describe(range, earlier, access));
    });
  }
  if (found.empty()) return;
  if (on_violation_ == OnViolation::Collect) {
    violations_.insert(violations_.end(), found.begin(), found.end());
    return;
  }
  const OrderingViolation& violation = found.front();
  throw Error("OrderingViolation", {{"range_address", std::uint64_t{violation.range.address}},
                                    {"range_bytes", violation.range.bytes},
                                    {"first", violation.first},
                                    {"first_stream", violation.first_stream},
                                    {"second", violation.second},
                                    {"second_stream", violation.second_stream},
                                    {"missing", violation.missing_edge()}});
}

Event OrderingChecker::record(Stream stream, Timing timing) {
  // One lock over both, so that the attached clock is that of the recorded point.
  const std::lock_guard<std::mutex> lock(mutex_);
  const Event event = inner_->record(stream, timing);
  auto snapshot = std::make_shared<ClockSnapshot>();
  snapshot->clock = clock_of(stream);
  // No other code has seen the record yet; the device reserves this field for the checker.
  const_cast<EventRecord&>(event.record()).clock = std::move(snapshot);
  return event;
}

void OrderingChecker::wait(Stream stream, const Event& event) {
  inner_->wait(stream, event);
  if (event.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (event.record().clock != nullptr) clock_of(stream).join(event.record().clock->clock);
}

void OrderingChecker::host_learns(const Event& event) {
  if (event.empty() || event.record().clock == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  host_clock_.join(event.record().clock->clock);
}

bool OrderingChecker::query(const Event& event) {
  const bool happened = inner_->query(event);
  if (happened) host_learns(event);
  return happened;
}

void OrderingChecker::synchronize(const Event& event) {
  inner_->synchronize(event);
  host_learns(event);
}

void OrderingChecker::drain(Stream stream) {
  VectorClock reached;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached = clock_of(stream);
  }
  inner_->drain(stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  host_clock_.join(reached);
}

std::int64_t OrderingChecker::elapsed_ns(const Event& begin, const Event& end) {
  const std::int64_t elapsed = inner_->elapsed_ns(begin, end);
  host_learns(begin);
  host_learns(end);
  return elapsed;
}

// The device refused the operation, so nothing can be ordered after it. The accesses that it replaced in the log are
// not restored: a missing wait for one of those may go unnoticed, but no false violation is reported.
void OrderingChecker::withdraw(const std::vector<ByteRange>& ranges) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const ByteRange range : ranges) log_.forget(range);
}

void OrderingChecker::copy_async(Address target, Address source, std::uint64_t bytes, CopyDirection direction,
                                 Stream stream) {
  require_copy_arguments(target, source, bytes);
  check_operation(stream, {{{source, bytes}, Access::Read}, {{target, bytes}, Access::Write}},
                  std::string("copy ") + to_string(direction));
  try {
    inner_->copy_async(target, source, bytes, direction, stream);
  } catch (...) {
    withdraw({{source, bytes}, {target, bytes}});
    throw;
  }
}

void OrderingChecker::launch(const KernelCall& call, Stream stream) {
  check(call);
  check_operation(stream,
                  {{{static_cast<Address>(call.source), source_bytes(call)}, Access::Read},
                   {{static_cast<Address>(call.target), target_bytes(call)}, Access::Write}},
                  std::string("kernel ") + kernel_symbol(call.kernel));
  try {
    inner_->launch(call, stream);
  } catch (...) {
    withdraw({{static_cast<Address>(call.source), source_bytes(call)},
              {static_cast<Address>(call.target), target_bytes(call)}});
    throw;
  }
}

Address OrderingChecker::remember(Address address, std::uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes_by_address_[address] = bytes;
  return address;
}

// Freeing waits for the device, so the next owner of these addresses is ordered after everything logged for them. The
// log forgets them before the free, because afterwards another thread may already have the same addresses.
void OrderingChecker::forget_and_free(Address address, void (Device::*free)(Address)) {
  std::uint64_t bytes = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = bytes_by_address_.find(address);
    if (known != bytes_by_address_.end()) {
      bytes = known->second;
      bytes_by_address_.erase(known);
      log_.forget({address, bytes});
    }
  }
  try {
    (inner_.get()->*free)(address);
  } catch (...) {
    if (bytes != 0) remember(address, bytes);  // refused: the memory is still allocated
    throw;
  }
}

Address OrderingChecker::allocate_pinned(std::uint64_t bytes) {
  return remember(inner_->allocate_pinned(bytes), bytes);
}

void OrderingChecker::free_pinned(Address address) {
  forget_and_free(address, &Device::free_pinned);
}

Address OrderingChecker::allocate_device(std::uint64_t bytes) {
  return remember(inner_->allocate_device(bytes), bytes);
}

void OrderingChecker::free_device(Address address) {
  forget_and_free(address, &Device::free_device);
}

void OrderingChecker::note_access(ByteRange range, Access access, Stream stream, std::string_view label) {
  require_copy_arguments(range.address, range.address, range.bytes);
  check_operation(stream, {{range, access}}, std::string(label));
  inner_->note_access(range, access, stream, label);
}

}  // namespace vdnn
