// The stress program: drives the core as a training loop with several threads does, and checks the data.
//
//   vdnn_stress [--seed N] [--rounds N] [--scenario NAME] [--fake-driver PATH] [--list]
//
// Every scenario is a legal program, so any report of a sanitizer is a fault of the core. One line per scenario says
// what it counted. The exit code is 0 if all passed, 1 if one failed and 2 for wrong arguments.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "fake_driver_controls.h"
#include "report.h"

namespace {

using vdnn::stress::FakeDriverControls;
using vdnn::stress::Run;
using vdnn::stress::Scenario;

constexpr Scenario scenarios[] = {
    {"training", "offload forward, reload backward, on every device", vdnn::stress::train_on_every_device},
    {"several_threads", "one device, pool and queue under four trainers", vdnn::stress::train_with_several_threads},
    {"training_state", "states, gradients and parameters on the host, stepped in slices",
     vdnn::stress::train_with_state_away},
    {"abandonment", "handles, queues, pools and devices dropped at any moment", vdnn::stress::abandon_everything},
    {"pool", "blocks leased and dropped by many threads under a cap", vdnn::stress::lease_from_many_threads},
    {"pool_under_users", "a pool that is closed, or whose device is, under its users",
     vdnn::stress::close_pools_under_users},
    {"events", "events of shared streams, and a device closed under its users", vdnn::stress::share_events},
    {"planning", "plans made and memory pinned ahead beside a trainer", vdnn::stress::plan_beside_training},
    {"faults", "a driver that refuses a call or loses the device", vdnn::stress::train_with_faults, true},
};

struct Arguments {
  std::uint64_t seed = 1;
  std::uint64_t rounds = 2;
  std::string scenario;
  std::string fake_driver = vdnn::stress::fake_driver_beside_program();
  bool list = false;
};

std::uint64_t number(const std::string& option, const std::string& text) {
  std::size_t used = 0;
  try {
    const std::uint64_t value = std::stoull(text, &used, 0);
    if (used == text.size()) return value;
  } catch (const std::logic_error&) {
    // not a number at all: told below
  }
  throw std::invalid_argument(option + " takes a number, got '" + text + "'");
}

Arguments parse(int count, char** words) {
  Arguments arguments;
  for (int index = 1; index < count; ++index) {
    const std::string option = words[index];
    if (option == "--list") {
      arguments.list = true;
      continue;
    }
    const bool known =
        option == "--seed" || option == "--rounds" || option == "--scenario" || option == "--fake-driver";
    if (!known) throw std::invalid_argument("there is no option '" + option + "'");
    if (++index == count) throw std::invalid_argument(option + " takes a value");
    const std::string value = words[index];
    if (option == "--seed") arguments.seed = number(option, value);
    if (option == "--rounds") arguments.rounds = number(option, value);
    if (option == "--scenario") arguments.scenario = value;
    if (option == "--fake-driver") arguments.fake_driver = value;
  }
  return arguments;
}

bool run_one(const Scenario& scenario, const Arguments& arguments, const FakeDriverControls* fake_driver) {
  Run run;
  run.seed = arguments.seed;
  run.rounds = arguments.rounds;
  run.fake_driver = fake_driver;
  const auto begin = std::chrono::steady_clock::now();
  std::string failure;
  try {
    if (scenario.needs_fake_driver && fake_driver == nullptr) throw vdnn::stress::Failure("needs the fake driver");
    scenario.run(run);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  const char* verdict = failure.empty() ? "passed" : "FAILED";
  std::printf("%-16s %s in %.1f s: %s\n", scenario.name, verdict, elapsed.count(), run.counts.text().c_str());
  if (!failure.empty()) {
    const unsigned long long seed = arguments.seed;
    std::printf("%-16s because: %s (--scenario %s --seed %llu)\n", "", failure.c_str(), scenario.name, seed);
  }
  std::fflush(stdout);
  return failure.empty();
}

int run_all(const Arguments& arguments) {
  std::unique_ptr<FakeDriverControls> fake_driver;
  if (!arguments.fake_driver.empty()) fake_driver = std::make_unique<FakeDriverControls>(arguments.fake_driver);
  if (fake_driver == nullptr) std::printf("without CudaDevice: no libvdnn_fake_driver.so beside this program\n");
  int passed = 0;
  int failed = 0;
  for (const Scenario& scenario : scenarios) {
    if (!arguments.scenario.empty() && arguments.scenario != scenario.name) continue;
    ++(run_one(scenario, arguments, fake_driver.get()) ? passed : failed);
  }
  if (passed + failed == 0) throw std::invalid_argument("there is no scenario '" + arguments.scenario + "'");
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int count, char** words) {
  try {
    const Arguments arguments = parse(count, words);
    if (!arguments.list) return run_all(arguments);
    for (const Scenario& scenario : scenarios) std::printf("%-16s %s\n", scenario.name, scenario.summary);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "vdnn_stress: %s\n", error.what());
    return 2;
  }
}
