// Counting down to the faults that a test has armed.
#include "fault_injection.h"

namespace vdnn::fake {

namespace {

constexpr std::string_view version_suffix = "_v2";

bool names_call(std::string_view armed, std::string_view name) {
  if (armed.empty() || armed == name) return true;
  return name.size() == armed.size() + version_suffix.size() && name.substr(0, armed.size()) == armed &&
         name.substr(armed.size()) == version_suffix;
}

}  // namespace

void FaultPlan::refuse_call(std::string_view name, std::uint64_t nth, driver::Result code) {
  if (nth > 0) refusals_.push_back({std::string(name), nth, code});
}

void FaultPlan::fail_work(std::uint64_t nth, driver::Result code) {
  work_left_ = nth;
  work_code_ = code;
}

void FaultPlan::clear() {
  *this = FaultPlan();
}

driver::Result FaultPlan::at_call(std::string_view name) {
  driver::Result code = driver::success;
  std::vector<Refusal> left;
  for (Refusal& refusal : refusals_) {
    if (names_call(refusal.name, name)) --refusal.calls_left;
    if (refusal.calls_left > 0) {
      left.push_back(refusal);
    } else if (code == driver::success) {
      code = refusal.code;
    }
  }
  refusals_ = std::move(left);
  return code;
}

bool FaultPlan::lets_work_run() {
  // A lost context runs nothing more, so what was queued behind the failure leaves no trace either.
  if (sticky_ != driver::success) return false;
  if (work_left_ == 0) return true;
  if (--work_left_ > 0) return true;
  sticky_ = work_code_;
  return false;
}

}  // namespace vdnn::fake
