// What a scenario is given and what it says: its seed and rounds, what it counted, and why it failed.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace vdnn::stress {

class FakeDriverControls;

// Something that must hold did not.
struct Failure final : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void require(bool holds, const std::string& what_must_hold);

// How often what happened, by name. Any thread may count.
class Counts {
 public:
  void add(const std::string& what, std::uint64_t times = 1);
  [[nodiscard]] std::uint64_t of(const std::string& what) const;
  // "checks 120, offloads 96"
  [[nodiscard]] std::string text() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::uint64_t> counts_;
};

struct Run {
  std::uint64_t seed = 1;
  std::uint64_t rounds = 1;
  const FakeDriverControls* fake_driver = nullptr;  // none: without CudaDevice
  Counts counts;
};

struct Scenario {
  const char* name;
  const char* summary;
  void (*run)(Run& run);
  bool needs_fake_driver = false;
};

void train_on_every_device(Run& run);
void train_with_several_threads(Run& run);
void abandon_everything(Run& run);
void lease_from_many_threads(Run& run);
void close_pools_under_users(Run& run);
void share_events(Run& run);
void train_with_faults(Run& run);
void plan_beside_training(Run& run);
void train_with_state_away(Run& run);

}  // namespace vdnn::stress
