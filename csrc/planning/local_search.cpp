// The neighbours of a choice, and the descent along them.
#include "planning/local_search.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "planning/covers.h"

namespace vdnn {

namespace {

// Only the longest stalls of a choice are tried.
constexpr std::size_t longest_stalls = 6;
// The search ends after this many disturbed choices in a row that were all seen before: there are few choices.
constexpr int most_stale = 60;
// The search descends from the best of its starts only.
constexpr std::size_t descents = 4;
// So many of the smallest used gaps are left out, one after another, in one round of a step that the host bounds.
constexpr std::size_t smallest = 12;
// So many of the unused gaps are tried in one round.
constexpr std::size_t let_in = 12;
constexpr double room_kept_share = 0.7;  // of the intervals with more room, in a disturbed choice
// Starts that use only gaps at least this many times as long as their two copies together.
constexpr double lengths[] = {1, 2, 4};

Choice toggled(Choice choice, std::int32_t gap) {
  choice.may_leave[gap] = choice.may_leave[gap] != 0 ? '\0' : '\1';
  return choice;
}

Choice with_room(Choice choice, std::int32_t interval, std::int64_t bytes) {
  std::vector<MoreRoom>& room = choice.more_room;
  const auto at = std::lower_bound(room.begin(), room.end(), interval,
                                   [](const MoreRoom& one, std::int32_t other) { return one.interval < other; });
  if (at != room.end() && at->interval == interval) {
    at->bytes += bytes;
  } else {
    room.insert(at, {interval, bytes});
  }
  return choice;
}

Choice without_room(Choice choice, std::int32_t interval) {
  std::vector<MoreRoom>& room = choice.more_room;
  room.erase(std::remove_if(room.begin(), room.end(), [&](const MoreRoom& one) { return one.interval == interval; }),
             room.end());
  return choice;
}

// Equal for equal choices only.
std::string key_of(const Choice& choice) {
  std::string key = choice.may_leave;
  for (const MoreRoom& one : choice.more_room) {
    char bytes[sizeof one.interval + sizeof one.bytes];
    std::memcpy(bytes, &one.interval, sizeof one.interval);
    std::memcpy(bytes + sizeof one.interval, &one.bytes, sizeof one.bytes);
    key.append(bytes, sizeof bytes);
  }
  key.push_back(choice.options.in_order ? '\1' : '\0');
  key.push_back(choice.options.furthest_first ? '\1' : '\0');
  return key;
}

}  // namespace

LocalSearch::LocalSearch(const StepModel& model, std::int64_t budget_bytes, std::int64_t kept_ns, std::int64_t effort,
                         BeforeEvaluation before_evaluation)
    : model_(model),
      budget_bytes_(budget_bytes),
      kept_ns_(kept_ns),
      effort_(effort),
      before_evaluation_(std::move(before_evaluation)) {}

bool LocalSearch::is_over() const {
  return evaluated_ >= effort_ || (best_.has_value() && best_->outcome.step_ns <= kept_ns_);
}

std::optional<Found> LocalSearch::run(const std::vector<Choice>& starts) {
  std::vector<Found> found;
  for (const Choice& start : starts) {
    if (std::optional<Found> one = evaluate(start)) found.push_back(std::move(*one));
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Found& one, const Found& other) { return one.outcome.step_ns < other.outcome.step_ns; });
  if (found.size() > descents) found.erase(found.begin() + descents, found.end());
  for (Found& start : found) descend(std::move(start));
  if (!best_.has_value() || is_over()) return best_;  // seeding a draw takes as long as two evaluations
  Draw draw(0);
  int stale = 0;
  while (!is_over() && stale < most_stale) {
    const std::int64_t before = evaluated_;
    if (std::optional<Found> other = evaluate(disturbed(best_->choice, draw))) descend(std::move(*other));
    stale = evaluated_ == before ? stale + 1 : 0;
  }
  return best_;
}

std::optional<Found> LocalSearch::evaluate(Choice choice) {
  if (!seen_.insert(key_of(choice)).second) return std::nullopt;
  if (before_evaluation_) before_evaluation_();
  ++evaluated_;
  const auto absences = model_.schedule(choice.may_leave, budget_bytes_, choice.more_room, choice.options);
  if (!absences.has_value()) return std::nullopt;
  Found found{std::move(choice), model_.replay(*absences)};
  if (!best_.has_value() || found.outcome.step_ns < best_->outcome.step_ns) best_ = found;
  return found;
}

void LocalSearch::descend(Found found) {
  while (!is_over()) {
    std::optional<Found> better;
    visit_neighbours(found, [&](Choice neighbour) {
      if (is_over()) return false;
      std::optional<Found> other = evaluate(std::move(neighbour));
      if (other.has_value() && other->outcome.step_ns < (better ? *better : found).outcome.step_ns) {
        better = std::move(other);
      }
      return true;
    });
    if (!better.has_value()) return;
    found = std::move(*better);
  }
}

template <typename Visit>
void LocalSearch::visit_neighbours(const Found& found, const Visit& visit) const {
  const Choice& choice = found.choice;
  const StepModel::Shape& shape = model_.shape();
  const std::vector<StepAbsence>& absences = found.outcome.absences;
  std::vector<StepStall> stalls = found.outcome.stalls;
  std::stable_sort(stalls.begin(), stalls.end(),
                   [](const StepStall& one, const StepStall& other) { return one.ns > other.ns; });
  if (stalls.size() > longest_stalls) stalls.erase(stalls.begin() + longest_stalls, stalls.end());
  // More room at the interval that kept the reload of the gap from being issued earlier.
  const auto visit_with_room = [&](std::int32_t gap) {
    const auto absence =
        std::find_if(absences.begin(), absences.end(), [&](const StepAbsence& one) { return one.gap == gap; });
    const bool is_at_use = absence == absences.end() || absence->reload_point < 0;
    const std::int32_t interval = is_at_use ? shape.gaps[gap].last : absence->reload_point;
    const std::int64_t bytes = shape.bytes_of(gap);
    return visit(with_room(choice, interval, bytes)) && (bytes <= 1 || visit(with_room(choice, interval, bytes / 2)));
  };
  for (const StepStall& stall : stalls) {
    if (stall.gap >= 0 && !visit(toggled(choice, stall.gap))) return;
    for (std::size_t index = 0; index < stall.count_before; ++index) {
      const std::int32_t earlier = stall.before[index];
      if (choice.may_leave[earlier] != 0 && !visit(toggled(choice, earlier))) return;
    }
    if (stall.gap >= 0 && stall.is_reload && !visit_with_room(stall.gap)) return;
  }
  if (found.outcome.host_ns >= found.outcome.step_ns) {
    std::vector<std::int32_t> used;
    used.reserve(absences.size());
    for (const StepAbsence& one : absences) used.push_back(one.gap);
    std::stable_sort(used.begin(), used.end(),
                     [&](std::int32_t one, std::int32_t other) { return shape.bytes_of(one) < shape.bytes_of(other); });
    if (used.size() > smallest) used.resize(smallest);
    for (const std::int32_t gap : used) {
      if (!visit(toggled(choice, gap))) return;  // a copy less to issue
    }
  }
  Choice in_other_order = choice;
  in_other_order.options.in_order = !choice.options.in_order;
  if (!visit(std::move(in_other_order))) return;
  in_other_order = choice;
  in_other_order.options.furthest_first = !choice.options.furthest_first;
  if (!visit(std::move(in_other_order))) return;
  std::vector<std::int32_t> left_out;
  for (std::size_t gap = 0; gap < choice.may_leave.size(); ++gap) {
    if (choice.may_leave[gap] == 0) left_out.push_back(static_cast<std::int32_t>(gap));
  }
  for (std::size_t index = left_out.size() - std::min(left_out.size(), let_in); index < left_out.size(); ++index) {
    if (!visit(toggled(choice, left_out[index]))) return;
  }
  for (const MoreRoom& one : choice.more_room) {
    if (!visit(without_room(choice, one.interval))) return;
  }
}

Choice LocalSearch::disturbed(const Choice& best, Draw& draw) const {
  Choice other{model_.cover(order_near(best.may_leave, draw), budget_bytes_)};
  for (const MoreRoom& one : best.more_room) {
    if (draw.share() < room_kept_share) other.more_room.push_back(one);
  }
  other.options.in_order = draw.share() < 0.5;
  other.options.furthest_first = draw.share() < 0.5;
  return other;
}

std::vector<Choice> all_gaps(const StepModel& model) {
  std::vector<Choice> choices;
  for (const bool in_order : {false, true}) {
    for (const bool furthest_first : {false, true}) {
      choices.push_back({std::string(model.gaps(), '\1'), {}, {in_order, furthest_first}});
    }
  }
  return choices;
}

std::vector<Choice> first_choices(const StepModel& model) {
  std::vector<Choice> choices = all_gaps(model);
  const std::vector<AbsenceTime> times = absence_times(model);
  for (const double least : lengths) {
    std::string may_leave;
    for (const AbsenceTime& one : times) may_leave.push_back(one.length_ns / one.copies_ns >= least ? '\1' : '\0');
    choices.push_back({std::move(may_leave)});
  }
  return choices;
}

namespace {

// Changes of one absence: none at all, another release point, another reload point, a reload at the use.
std::vector<std::optional<StepAbsence>> shifted(const StepGap& gap, const StepAbsence& absence) {
  std::vector<std::optional<StepAbsence>> others = {std::nullopt};
  const std::int32_t reload_at = absence.reload_point < 0 ? gap.last : absence.reload_point;
  for (const std::int32_t release : {absence.release_point - 1, gap.release_point, absence.release_point + 1}) {
    if (gap.release_point <= release && release < reload_at && release != absence.release_point) {
      others.push_back(StepAbsence{absence.gap, release, absence.reload_point});
    }
  }
  for (const std::int32_t reload : {reload_at - 1, reload_at + 1}) {
    if (gap.use >= 0 && absence.release_point < reload && gap.first <= reload && reload < gap.use) {
      others.push_back(StepAbsence{absence.gap, absence.release_point, reload});
    }
  }
  if (absence.reload_point >= 0) others.push_back(StepAbsence{absence.gap, absence.release_point, -1});
  return others;
}

}  // namespace

Moves polish(const StepModel& model, std::int64_t budget_bytes, Moves moves, std::int64_t effort,
             const BeforeEvaluation& before_evaluation) {
  std::int64_t evaluated = 0;
  // Replaces moves by the first change of absence `index` that shortens the step.
  const auto improve = [&](std::size_t index) {
    const StepAbsence absence = moves.absences[index];
    for (const std::optional<StepAbsence>& other : shifted(model.shape().gaps[absence.gap], absence)) {
      if (evaluated >= effort) return false;
      if (before_evaluation) before_evaluation();
      std::vector<StepAbsence> trial = moves.absences;
      if (other.has_value()) {
        trial[index] = *other;
      } else {
        trial.erase(trial.begin() + static_cast<std::ptrdiff_t>(index));
      }
      ++evaluated;
      if (model.peak_bytes(trial) > budget_bytes) continue;
      const std::int64_t step_ns = model.replay(trial).step_ns;
      if (step_ns >= moves.step_ns) continue;
      moves = {step_ns, std::move(trial)};
      return true;
    }
    return false;
  };
  for (std::size_t index = 0; index < moves.absences.size() && evaluated < effort;) {
    index = improve(index) ? 0 : index + 1;
  }
  return moves;
}

}  // namespace vdnn
