// Formats the lines of the IssueLog.
#include "device/check/issue_log.h"

#include <utility>

#include "codec/codec.h"
#include "device/errors.h"

namespace vdnn {

IssueLog::IssueLog(std::shared_ptr<Device> inner) : inner_(std::move(inner)) {
  if (inner_ == nullptr) throw InvalidArgument("device", "a device to wrap", "none");
}

std::vector<std::string> IssueLog::take_issues() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(issues_, {});
}

void IssueLog::add(const char* verb, Stream stream, const std::string& detail) {
  const std::size_t number = streams_.try_emplace(stream.index, streams_.size() + 1).first->second;
  issues_.push_back(verb + (" s" + std::to_string(number)) + " " + detail);
}

std::string IssueLog::event_name(const Event& event) {
  const auto [known, is_new] = records_.try_emplace(&event.record(), records_.size() + 1);
  if (is_new) seen_.push_back(event);
  return "e" + std::to_string(known->second);
}

Event IssueLog::record(Stream stream, Timing timing) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Event event = inner_->record(stream, timing);
  add("record", stream, event_name(event));
  return event;
}

void IssueLog::wait(Stream stream, const Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  inner_->wait(stream, event);
  if (!event.empty()) add("wait", stream, event_name(event));
}

void IssueLog::copy_async(Address target, Address source, std::uint64_t bytes, CopyDirection direction, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  inner_->copy_async(target, source, bytes, direction, stream);
  if (bytes == 0) return;
  add(direction == CopyDirection::DeviceToHost ? "copy_d2h" : "copy_h2d", stream, std::to_string(bytes));
}

void IssueLog::launch(const KernelCall& call, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  inner_->launch(call, stream);
  add("launch", stream, kernel_symbol(call.kernel));
}

void IssueLog::close() {
  inner_->close();
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.clear();
  seen_.clear();
}

}  // namespace vdnn
