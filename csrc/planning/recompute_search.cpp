// Tries choices of recomputes, and descends from the best one.
#include "planning/recompute_search.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "planning/draw.h"

namespace vdnn {

namespace {

using Chosen = std::vector<std::int32_t>;  // lifetimes in ascending order

// Trials for a step of one point; longer steps get fewer.
constexpr double most_effort = 120'000;
constexpr std::int64_t least_trials = 14;
// A choice that cannot meet the budget is found at once, and counts as this part of a trial.
constexpr double infeasible_share = 1.0 / 8;
// With this share of the room between the least memory and that of everything kept, `by_room` changes nothing.
constexpr double usual_room = 0.1;
constexpr double fewest_by_room = 0.6, most_by_room = 3;  // times the usual trials
constexpr std::size_t shares = 8;                         // at first, multiples of 1/8 of the candidates are tried
constexpr std::size_t most_points = 500;   // if all choices have at most this many points, every choice is a finalist
constexpr std::size_t groups = 16;         // at first, 1/16 of the candidates are added or removed together
constexpr std::size_t singles = 6;         // added or removed singly in one round
constexpr std::size_t pairs = 3;           // of these, exchanged with each other
constexpr std::size_t most_disturbed = 4;  // candidates that a disturbance adds or removes
constexpr int most_stale = 20;  // the search ends after this many disturbed choices in a row that were seen before
constexpr std::int64_t unreachable_ns = std::numeric_limits<std::int64_t>::max();

// A choice and its step. `waited_for`: the lifetimes whose copies the step waits for, the longest stall first.
struct Trial {
  std::int64_t step_ns;
  Chosen chosen;
  std::vector<std::int32_t> waited_for = {};
  bool is_bound_by_host = false;
};

// No plan of the choice has a step shorter than `shortest_ns`. It has no trial if it does not fit, or while it need not
// be tried because another choice is at least as short.
struct Tried {
  std::int64_t shortest_ns;
  std::optional<Trial> trial;
};

Chosen sorted(Chosen lifetimes) {
  std::sort(lifetimes.begin(), lifetimes.end());
  return lifetimes;
}

// The lifetimes that are in one of both only.
Chosen toggled(const Chosen& chosen, const Chosen& others) {
  Chosen result;
  std::set_symmetric_difference(chosen.begin(), chosen.end(), others.begin(), others.end(), std::back_inserter(result));
  return result;
}

template <typename Item>
std::vector<Item> first_of(const std::vector<Item>& items, std::size_t count) {
  return {items.begin(), items.begin() + static_cast<std::ptrdiff_t>(std::min(count, items.size()))};
}

class RecomputeSearch {
 public:
  RecomputeSearch(const RecomputeRequest& request, const RecomputeEffort& effort, const BeforeEvaluation& before)
      : request_(request),
        lifetimes_(request.step.lifetimes()),
        candidates_(request.candidates),
        moves_(effort.moves_a_trial),
        before_(before),
        is_candidate_(lifetimes_.size(), 0) {
    const auto points = static_cast<double>(request.step.points().kinds.size());
    const auto trials = static_cast<std::int64_t>(std::nearbyint(effort.trials * most_effort / points));
    std::int64_t most_trials = effort.most_trials;
    if (effort.by_room) {
      most_trials = static_cast<std::int64_t>(std::nearbyint(static_cast<double>(most_trials) * share_by_room()));
    }
    left_ = static_cast<double>(std::max(least_trials, std::min(most_trials, trials)));
    for (const std::int32_t one : candidates_) is_candidate_[one] = 1;
  }

  std::vector<Chosen> run(std::size_t most) {
    if (candidates_.size() < 16 && request_.step.points().kinds.size() << candidates_.size() <= most_points) {
      return every_choice();
    }
    if (!request_.known.empty()) try_choice(sorted(request_.known));
    try_counts(fitting(candidates_));
    // Encoded storages are cheap per byte, but the parts that they leave may take the room of recomputes.
    std::vector<std::int32_t> whole;
    std::copy_if(candidates_.begin(), candidates_.end(), std::back_inserter(whole),
                 [&](std::int32_t one) { return lifetimes_[one].recompute.kept_bytes == 0; });
    if (whole.size() < candidates_.size()) try_counts(fitting(whole));
    if (!request_.candidates_by_issue.empty()) try_counts(fitting(request_.candidates_by_issue));
    if (const std::optional<Trial> best = shortest())
      descend(*best, std::max<std::size_t>(1, candidates_.size() / groups));
    disturb();
    return finalists(most);
  }

 private:
  [[nodiscard]] double share_by_room() const {
    const std::int64_t least_bytes = std::min(request_.step.least_bytes({}), request_.step.least_bytes(candidates_));
    const auto most_room = static_cast<double>(request_.step.with_recomputes({}).most_bytes() - least_bytes);
    const auto room = static_cast<double>(request_.budget_bytes - least_bytes);
    return room <= 0 ? most_by_room : std::clamp(usual_room * most_room / room, fewest_by_room, most_by_room);
  }

  // By the number of recomputes, and then by the candidates that come first.
  [[nodiscard]] std::vector<Chosen> every_choice() const {
    std::vector<std::vector<std::size_t>> places;
    for (std::size_t bits = 0; bits < std::size_t{1} << candidates_.size(); ++bits) {
      std::vector<std::size_t> one;
      for (std::size_t place = 0; place < candidates_.size(); ++place) {
        if ((bits >> place) % 2 != 0) one.push_back(place);
      }
      places.push_back(std::move(one));
    }
    std::sort(places.begin(), places.end(), [](const auto& one, const auto& other) {
      return std::make_pair(one.size(), std::cref(one)) < std::make_pair(other.size(), std::cref(other));
    });
    std::vector<Chosen> choices;
    for (const std::vector<std::size_t>& one : places) {
      Chosen chosen;
      for (const std::size_t place : one) chosen.push_back(candidates_[place]);
      choices.push_back(sorted(std::move(chosen)));
    }
    return choices;
  }

  [[nodiscard]] std::vector<Chosen> finalists(std::size_t most) const {
    std::vector<const Trial*> found;
    for (const Tried& tried : trials_) {
      if (tried.trial.has_value()) found.push_back(&*tried.trial);
    }
    std::stable_sort(found.begin(), found.end(), [](const Trial* one, const Trial* other) {
      return std::forward_as_tuple(one->step_ns, one->chosen.size(), one->chosen) <
             std::forward_as_tuple(other->step_ns, other->chosen.size(), other->chosen);
    });
    if (found.size() > most) found.resize(most);
    std::vector<Chosen> choices;
    choices.reserve(found.size());
    for (const Trial* trial : found) choices.push_back(trial->chosen);
    return choices;
  }

  // Those candidates, in this order, with which and with those before them the budget can be met.
  [[nodiscard]] std::vector<std::int32_t> fitting(const std::vector<std::int32_t>& order) const {
    struct Group {
      std::vector<std::int32_t> members;
      std::size_t fails_behind;  // it is known not to fit if so many are found
    };
    std::vector<std::int32_t> found;
    std::vector<Group> waiting{{order, order.size() + 1}};
    while (!waiting.empty()) {
      const auto [group, fails_behind] = std::move(waiting.back());
      waiting.pop_back();
      std::vector<std::int32_t> both = found;
      both.insert(both.end(), group.begin(), group.end());
      if (before_) before_();
      if (found.size() != fails_behind && request_.step.least_bytes(both) <= request_.budget_bytes) {
        found = std::move(both);
      } else if (group.size() > 1) {
        // If the first half fits, the second one does not: with it, it is what did not fit.
        const std::size_t size = group.size() / 2;
        const auto half = group.begin() + static_cast<std::ptrdiff_t>(size);
        waiting.push_back({{half, group.end()}, found.size() + size});
        waiting.push_back({{group.begin(), half}, order.size() + 1});
      }
    }
    return found;
  }

  // Tries the first n of the order: multiples of 1/8 of them, and then numbers ever closer to the best n.
  void try_counts(const std::vector<std::int32_t>& order) {
    std::map<std::size_t, std::int64_t> steps;
    std::int64_t best_ns = unreachable_ns;
    const auto attempt = [&](std::size_t count) {
      const Trial* trial = try_choice(sorted(first_of(order, count)), best_ns);
      steps[count] = trial == nullptr ? unreachable_ns : trial->step_ns;
      best_ns = std::min(best_ns, steps[count]);
    };
    for (std::size_t share = shares + 1; share-- > 0;) attempt((order.size() * share + shares - 1) / shares);
    while (left_ > 0) {
      const auto best = std::min_element(steps.begin(), steps.end(),
                                         [](const auto& one, const auto& other) { return one.second < other.second; });
      std::vector<std::size_t> between;
      const auto halve = [&](std::size_t one, std::size_t other) {
        if (other - one > 1) between.push_back((one + other) / 2);
      };
      if (best != steps.begin()) halve(std::prev(best)->first, best->first);
      if (std::next(best) != steps.end()) halve(best->first, std::next(best)->first);
      if (between.empty() || best->second == unreachable_ns) break;
      for (const std::size_t count : between) attempt(count);
    }
  }

  void disturb() {
    Draw draw(0);
    int stale = 0;
    while (left_ > 0 && stale < most_stale) {
      const std::optional<Trial> best = shortest();
      if (!best.has_value()) break;
      const std::size_t before = trials_.size();
      const std::size_t count = std::min(candidates_.size(), 2 + draw.below(most_disturbed - 1));
      const Trial* disturbed = try_choice(toggled(best->chosen, sorted(draw.sample(candidates_, count))));
      if (disturbed != nullptr) descend(*disturbed, 1);
      stale = trials_.size() == before ? stale + 1 : 0;
    }
  }

  void descend(Trial best, std::size_t width) {
    while (left_ > 0) {
      std::vector<Trial> better;
      for (const Chosen& neighbour : neighbours(best, width)) {
        const Trial* trial = try_choice(toggled(best.chosen, neighbour), best.step_ns);
        if (trial != nullptr && trial->step_ns < best.step_ns) better.push_back(*trial);
      }
      if (better.size() > 1) {
        Chosen together;
        for (const Trial& one : better) {
          Chosen both;
          const Chosen changed = toggled(one.chosen, best.chosen);
          std::set_union(together.begin(), together.end(), changed.begin(), changed.end(), std::back_inserter(both));
          together = std::move(both);
        }
        const Trial* trial = try_choice(toggled(best.chosen, together), best.step_ns);
        if (trial != nullptr) better.push_back(*trial);
      }
      if (!better.empty()) {
        best = *std::min_element(better.begin(), better.end(),
                                 [](const Trial& one, const Trial& other) { return one.step_ns < other.step_ns; });
      } else if (width > 1) {
        width /= 2;
      } else {
        break;
      }
    }
  }

  // Sets of candidates to toggle.
  [[nodiscard]] std::vector<Chosen> neighbours(const Trial& best, std::size_t width) const {
    std::vector<std::int32_t> to_add;
    for (const std::int32_t one : best.waited_for) {
      const bool is_candidate = one < static_cast<std::int32_t>(is_candidate_.size()) && is_candidate_[one] != 0;
      if (is_candidate && !std::binary_search(best.chosen.begin(), best.chosen.end(), one)) to_add.push_back(one);
    }
    std::vector<std::int32_t> to_remove = best.chosen;
    const auto cost_ns = [&](std::int32_t one) { return cost_of(lifetimes_[one].recompute, best.is_bound_by_host); };
    std::stable_sort(to_remove.begin(), to_remove.end(),
                     [&](std::int32_t one, std::int32_t other) { return cost_ns(one) > cost_ns(other); });
    std::vector<Chosen> sets;
    if (width > 1) {
      const std::vector<std::int32_t> added = first_of(to_add, width);
      const std::vector<std::int32_t> removed = first_of(to_remove, width);
      std::vector<std::int32_t> both = added;
      both.insert(both.end(), removed.begin(), removed.end());
      return {sorted(added), sorted(removed), sorted(both)};
    }
    for (const std::int32_t one : first_of(to_add, singles)) sets.push_back({one});
    for (const std::int32_t one : first_of(to_remove, singles)) sets.push_back({one});
    for (const std::int32_t added : first_of(to_add, pairs)) {
      for (const std::int32_t removed : first_of(to_remove, pairs)) sets.push_back(sorted({added, removed}));
    }
    return sets;
  }

  // Time of the discard and of the recompute, on the device or in which the host issues them.
  static std::int64_t cost_of(const StepRecompute& recompute, bool of_host) {
    if (!of_host) return recompute.discard_ns + recompute.compute_ns;
    return recompute.issue_ns + (recompute.kept_bytes > 0 ? recompute.discard_issue_ns : 0);
  }

  [[nodiscard]] std::optional<Trial> shortest() const {
    const Trial* best = nullptr;
    for (const auto& [_, trial] : trials_) {
      if (trial.has_value() && (best == nullptr || trial->step_ns < best->step_ns)) best = &*trial;
    }
    return best == nullptr ? std::nullopt : std::optional(*best);
  }

  // The trial of a choice: an earlier one, or a new one while there are trials left. nullptr if it does not fit, or if
  // no plan of it is shorter than `below_ns`. The pointer is valid until the next call.
  const Trial* try_choice(const Chosen& chosen, std::int64_t below_ns = unreachable_ns) {
    const auto known = numbers_.find(chosen);
    std::size_t number = trials_.size();
    if (known == numbers_.end()) {
      if (left_ <= 0) return nullptr;
      numbers_.emplace(chosen, number);
      StepModel::Shape shape = request_.step.with_recomputes(chosen);
      const bool fits = shape.least_bytes() <= request_.budget_bytes;
      trials_.push_back(
          {fits ? shape.shortest_ns(request_.link, request_.budget_bytes) : unreachable_ns, std::nullopt});
      left_ -= fits ? 1 : infeasible_share;
      if (trials_.back().shortest_ns < below_ns) trials_.back().trial = make_trial(chosen, std::move(shape));
    } else {
      number = known->second;
      Tried& tried = trials_[number];
      if (!tried.trial.has_value() && tried.shortest_ns < below_ns) {
        tried.trial = make_trial(chosen, request_.step.with_recomputes(chosen));
      }
    }
    const std::optional<Trial>& trial = trials_[number].trial;
    return trial.has_value() ? &*trial : nullptr;
  }

  // nullopt if the search finds no moves that fit.
  [[nodiscard]] std::optional<Trial> make_trial(const Chosen& chosen, StepModel::Shape shape) const {
    if (before_) before_();
    const std::int64_t kept_ns = shape.kept_ns();
    if (shape.most_bytes() <= request_.budget_bytes) return Trial{kept_ns, chosen};
    shape.copy_issue_ns = request_.copy_issue_ns;
    const StepModel model(std::move(shape), request_.link);
    const auto found = LocalSearch(model, request_.budget_bytes, kept_ns, moves_, before_).run(first_choices(model));
    if (!found.has_value()) return std::nullopt;
    const StepOutcome& outcome = found->outcome;
    return Trial{outcome.step_ns, chosen, waited_for(model, outcome), outcome.host_ns >= outcome.step_ns};
  }

  static std::vector<std::int32_t> waited_for(const StepModel& model, const StepOutcome& outcome) {
    std::vector<StepStall> stalls = outcome.stalls;
    std::stable_sort(stalls.begin(), stalls.end(),
                     [](const StepStall& one, const StepStall& other) { return one.ns > other.ns; });
    std::vector<std::int32_t> lifetimes;
    std::vector<char> is_there(model.shape().storages.size(), 0);
    const auto add = [&](std::int32_t gap) {
      if (gap < 0) return;
      const std::int32_t lifetime = model.shape().gaps[gap].storage;
      if (is_there[lifetime] == 0) lifetimes.push_back(lifetime);
      is_there[lifetime] = 1;
    };
    for (const StepStall& stall : stalls) {
      add(stall.gap);
      for (std::size_t index = 0; index < stall.count_before; ++index) add(stall.before[index]);
    }
    return lifetimes;
  }

  const RecomputeRequest& request_;
  const std::vector<RecordedLifetime>& lifetimes_;
  const std::vector<std::int32_t>& candidates_;
  const std::int64_t moves_;  // evaluations of a trial
  const BeforeEvaluation& before_;
  std::vector<char> is_candidate_;
  double left_ = 0;                        // trials
  std::vector<Tried> trials_;              // in the order in which they were tried
  std::map<Chosen, std::size_t> numbers_;  // of the trial of a choice
};

}  // namespace

std::vector<std::vector<std::int32_t>> find_recomputes(const RecomputeRequest& request, const RecomputeEffort& effort,
                                                       std::size_t most, const BeforeEvaluation& before_evaluation) {
  return RecomputeSearch(request, effort, before_evaluation).run(most);
}

}  // namespace vdnn
