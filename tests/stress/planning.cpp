// Scenario "planning": plans are searched for on threads of their own while others train.
//
// Two planners share one recorded step and one model of it, as those of two sessions may, make models of their own and
// simulate plans.
// Others share a search, and begin it in the background, take over what it finds, cancel it or drop it at any moment.
// One more thread pins ahead what plans will need. The training goes on beside them.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "compute_stream.h"
#include "network.h"
#include "planning/background_search.h"
#include "planning/plan_search.h"
#include "planning/recorded_step.h"
#include "planning/step_model.h"
#include "planning/step_timeline.h"
#include "rig.h"
#include "together.h"

namespace vdnn::stress {
namespace {

constexpr std::int32_t storages = 24;
constexpr std::int64_t storage_bytes = std::int64_t{1} << 20;
constexpr std::int64_t point_ns = 50'000;
constexpr std::uint64_t plans = 40;
constexpr std::uint64_t searches = 8;
constexpr std::uint64_t steps = 4;
constexpr std::uint64_t layers = 12;

// A step that saves each storage, and uses them in the opposite order. Every other one can be recomputed from the one
// before it.
RecordedStep make_step() {
  RecordedStep::Points points;
  std::vector<RecordedLifetime> lifetimes;
  for (std::int32_t point = 0; point <= 2 * storages; ++point) {
    const bool is_save = point < storages;
    const bool is_end = point == 2 * storages;
    const std::int32_t storage = is_save ? point : 2 * storages - 1 - point;
    const std::int64_t held = is_save ? point + 1 : 2 * storages - point;
    points.compute_ns.push_back(point_ns);
    points.issue_ns.push_back(point_ns / 2);
    points.allocated_bytes.push_back(held * storage_bytes);
    points.peak_bytes.push_back((held + 2) * storage_bytes);
    points.kinds.push_back(is_save ? StepPoint::Save : is_end ? StepPoint::End : StepPoint::Use);
    points.lifetimes.push_back(is_end ? -1 : storage);
  }
  for (std::int32_t storage = 0; storage < storages; ++storage) {
    const std::int32_t use = 2 * storages - 1 - storage;
    StepRecompute recompute{{}, -1, 0, 0, 0, 0, 0, 0, 0};
    if (storage % 2 != 0) recompute = {{storage - 1}, storage, point_ns, storage_bytes, 0, 0, 0, 0, 0};
    lifetimes.push_back({{storage_bytes, storage, storage + 1, use + 1}, {use}, {use + 1}, recompute});
  }
  return {std::move(points), std::move(lifetimes)};
}

// Searches as a plan does: covers, schedules and replays.
void plan(const StepModel& model, std::uint64_t number, Counts& counts) {
  const std::string all(model.gaps(), '\1');
  std::vector<std::int32_t> order;
  for (std::size_t gap = 0; gap < model.gaps(); ++gap) {
    order.push_back(static_cast<std::int32_t>((gap + number) % model.gaps()));
  }
  const std::int64_t budget_bytes = (storages / 2 + static_cast<std::int64_t>(number % 8)) * storage_bytes;
  for (const std::string& may_leave : {all, model.cover(order, budget_bytes)}) {
    const auto absences = model.schedule(may_leave, budget_bytes, {}, {number % 2 == 0, number % 3 == 0});
    if (!absences.has_value()) continue;
    const StepOutcome outcome = model.replay(*absences);
    require(outcome.step_ns >= point_ns * (2 * storages + 1), "no plan is faster than the step computes");
    require(model.peak_bytes(*absences) <= budget_bytes, "a schedule meets its budget");
    counts.add("plans");
  }
}

// Simulates the step with every other storage away from its save to its use.
void simulate_plan(const RecordedStep& step, Counts& counts) {
  std::vector<PlannedAbsence> absences;
  for (std::int32_t storage = 0; storage < storages; storage += 2) {
    absences.push_back({storage, step.lifetimes()[storage].storage.copy_point, -1});
  }
  const StepTimeline timeline = simulate(step, absences, LinkModel{}, point_ns / 8);
  require(timeline.step_ns >= timeline.host_ns, "no step is issued in less time than the host needs");
  require(timeline.copies.size() == 2 * absences.size(), "each of these storages leaves and comes back");
  counts.add("simulated plans");
}

std::shared_ptr<const PlanSearch> make_search(RecordedStep step) {
  std::vector<std::int32_t> candidates;
  for (std::int32_t storage = 1; storage < storages; storage += 2) candidates.push_back(storage);
  return std::make_shared<PlanSearch>(PlanSearch::Request{std::make_shared<RecordedStep>(std::move(step)),
                                                          LinkModel{},
                                                          0,
                                                          storages / 2 * storage_bytes,
                                                          candidates,
                                                          {},
                                                          {0.0, {0.0, 14, 12, false}, 1},
                                                          {}});
}

// Searches in the background, as a session does that takes over what is found, or is left before.
void search_in_background(const std::shared_ptr<const PlanSearch>& search, Dice& dice, Counts& counts) {
  for (std::uint64_t number = 0; number < searches; ++number) {
    BackgroundSearch background(search);
    const std::uint64_t fate = dice.below(4);
    if (fate == 0) continue;  // dropped
    if (fate == 1) background.cancel();
    while (fate == 2 && !background.is_done()) std::this_thread::yield();
    while (!background.wait_for(1.0)) {
    }
    const std::vector<FoundPlan>& found = background.found();
    require(fate == 1 || !found.empty(), "a search that is not cancelled finds plans");
    for (std::size_t one = 1; one < found.size(); ++one) {
      require(found[one - 1].step_ns <= found[one].step_ns, "the shortest step is the first");
    }
    counts.add("searches", found.empty() ? 0 : 1);
  }
}

void plan_beside(Run& run, const DeviceKind& kind, Dice& dice) {
  Rig rig = make_rig(run, kind, dice, HostMemory::Roomy);
  const std::uint64_t seed = dice.seed();
  ComputeStream compute = ComputeStream::on_its_own(rig, "compute");
  const RecordedStep step = make_step();
  const StepModel shared(step.with_recomputes({}), LinkModel{});
  const std::shared_ptr<const PlanSearch> search = make_search(step);
  const std::uint64_t fates[] = {dice.seed(), dice.seed()};
  run_together(6, [&](std::size_t index) {
    if (index == 0) {
      Network network(rig, compute, seed, run.counts);
      for (std::uint64_t number = 0; number < steps; ++number) network.train_step(layers);
    } else if (index == 1) {
      for (std::uint64_t number = 1; number <= plans; ++number) {
        rig.pool->reserve(number << 16);
        if (number % 8 == 0) run.counts.add("trimmed bytes", rig.pool->trim(number << 14));
      }
      rig.pool->wait_for_growth();
    } else if (index < 4) {
      Dice own(fates[index - 2]);
      search_in_background(search, own, run.counts);
    } else {
      for (std::uint64_t number = 0; number < plans; ++number) {
        plan(shared, number, run.counts);
        const std::int32_t chosen = static_cast<std::int32_t>(2 * (number % 8) + 1);
        plan(StepModel(step.with_recomputes({chosen}), LinkModel{}), number, run.counts);
        simulate_plan(step.recomputed({chosen}), run.counts);
      }
    }
  });
  finish(run, rig);
  require_driver_clean(run);
}

}  // namespace

void plan_beside_training(Run& run) {
  Dice dice(run.seed);
  for (std::uint64_t round = 0; round < run.rounds; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) plan_beside(run, kind, dice);
  }
  require(run.counts.of("plans") > 0, "plans are found");
  require(run.counts.of("searches") > 0, "searches in the background find plans");
}

}  // namespace vdnn::stress
