// The series of smaller budgets, and every plan of a very short step.
#include "planning/move_search.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "planning/covers.h"

namespace vdnn {

namespace {

// Evaluations for a step of one point; longer steps get fewer, within the limits below.
constexpr double most_effort = 12'000'000;
constexpr std::int64_t most_evaluations = 20'000;
constexpr double least_evaluations = 600;
constexpr double least_share = 0.25;  // of the least, for a quick search
// The most smaller budgets that are searched, from the least one to the one at which nothing is offloaded.
constexpr std::int64_t smaller_budgets = 12;
constexpr std::int64_t long_stride = 4;
// All plans of a step are tried if there are at most this many.
constexpr std::int64_t most_tried = 4000;

// The lesser of two candidates is the better one: its step is shorter, or it moves less.
struct Candidate {
  Moves moves;
  std::int64_t moved_bytes;
  bool operator<(const Candidate& other) const {
    if (moves.step_ns != other.moves.step_ns) return moves.step_ns < other.moves.step_ns;
    if (moved_bytes != other.moved_bytes) return moved_bytes < other.moved_bytes;
    const auto points = [](const StepAbsence& one) {
      return std::make_tuple(one.gap, one.release_point, one.reload_point);
    };
    return std::lexicographical_compare(
        moves.absences.begin(), moves.absences.end(), other.moves.absences.begin(), other.moves.absences.end(),
        [&](const StepAbsence& one, const StepAbsence& two) { return points(one) < points(two); });
  }
};

class MoveSearch {
 public:
  MoveSearch(const StepModel& model, std::int64_t budget_bytes, double effort, const BeforeEvaluation& before)
      : model_(model), budget_bytes_(budget_bytes), before_(before), kept_ns_(model.shape().kept_ns()) {
    const double evaluations = std::nearbyint(effort * most_effort / static_cast<double>(model.points()));
    const auto least = static_cast<std::int64_t>(least_evaluations * std::clamp(effort, least_share, 1.0));
    effort_ = std::clamp(static_cast<std::int64_t>(evaluations), least, most_evaluations);
    orders_ = orders_of_leaving_out(model);
  }

  std::optional<Moves> run() {
    std::vector<Choice> starts = all_gaps(model_);
    evaluate_at_once(starts.front());
    for (const Choice& cover : covers(budget_bytes_)) evaluate_at_once(cover);
    if (best_.has_value()) return best_->moves;  // nothing is slowed down, so nothing can be faster
    const std::int64_t least = model_.shape().least_bytes();
    const std::int64_t most = model_.shape().most_bytes();
    // A quick search of a long step has fewer evaluations for each budget than starts: it skips some budgets.
    const auto count_of_starts = static_cast<std::int64_t>(starts.size() + orders_.size());
    const std::int64_t stride = effort_ / (2 * smaller_budgets) < count_of_starts ? long_stride : 1;
    for (std::int64_t index = 0; index < smaller_budgets; index += stride) {
      const std::int64_t smaller_bytes = least + (most - least) * index / smaller_budgets;
      if (smaller_bytes < budget_bytes_) search(smaller_bytes, effort_ / (2 * smaller_budgets), starts);
    }
    search(budget_bytes_, effort_ / 2, starts);
    try_every_plan();
    if (!best_.has_value()) return std::nullopt;
    if (best_->moves.step_ns <= kept_ns_) return best_->moves;
    return polish(model_, budget_bytes_, best_->moves, effort_ / 4, before_);
  }

 private:
  [[nodiscard]] std::vector<Choice> covers(std::int64_t budget_bytes) const {
    std::vector<Choice> choices;
    choices.reserve(orders_.size());
    for (const std::vector<std::int32_t>& order : orders_) choices.push_back({model_.cover(order, budget_bytes)});
    return choices;
  }

  void evaluate_at_once(const Choice& choice) {
    if (before_) before_();
    const auto absences = model_.schedule(choice.may_leave, budget_bytes_, {}, {});
    if (!absences.has_value()) return;
    StepOutcome outcome = model_.replay(*absences);
    if (outcome.step_ns <= kept_ns_) add({outcome.step_ns, std::move(outcome.absences)});
  }

  // Searches under one budget of the series. The plan that it finds is a start for the next one.
  void search(std::int64_t budget_bytes, std::int64_t effort, std::vector<Choice>& starts) {
    LocalSearch local(model_, budget_bytes, kept_ns_, effort, before_);
    std::vector<Choice> choices = starts;
    for (Choice& cover : covers(budget_bytes)) choices.push_back(std::move(cover));
    std::optional<Found> found = local.run(choices);
    if (!found.has_value()) return;
    starts.push_back(found->choice);
    add({found->outcome.step_ns, std::move(found->outcome.absences)});
  }

  void add(Moves moves) {
    std::int64_t moved_bytes = 0;
    for (const StepAbsence& one : moves.absences) moved_bytes += model_.shape().bytes_of(one.gap);
    Candidate candidate{std::move(moves), moved_bytes};
    if (!best_.has_value() || candidate < *best_) best_ = std::move(candidate);
  }

  // All plans of a step, if there are few.
  void try_every_plan() {
    std::int64_t count = 1;
    for (const StepGap& gap : model_.shape().gaps) {
      count *= 1 + gap.last - gap.release_point;  // a lower limit, so that long steps end here
      if (count > most_tried) return;
    }
    std::vector<std::vector<StepAbsence>> options;
    count = 1;
    for (std::size_t gap = 0; gap < model_.gaps(); ++gap) {
      options.push_back(absences_in(static_cast<std::int32_t>(gap)));
      count *= static_cast<std::int64_t>(options.back().size()) + 1;
      if (count > most_tried) return;
    }
    for (std::int64_t number = 0; number < count; ++number) {
      std::vector<StepAbsence> absences;
      std::int64_t rest = number;
      for (const std::vector<StepAbsence>& of_gap : options) {
        const auto choices = static_cast<std::int64_t>(of_gap.size()) + 1;
        if (rest % choices > 0) absences.push_back(of_gap[static_cast<std::size_t>(rest % choices) - 1]);
        rest /= choices;
      }
      if (before_) before_();
      if (model_.peak_bytes(absences) > budget_bytes_) continue;
      const std::int64_t step_ns = model_.replay(absences).step_ns;
      add({step_ns, std::move(absences)});
    }
  }

  // Every absence within the gap.
  [[nodiscard]] std::vector<StepAbsence> absences_in(std::int32_t number) const {
    const StepGap& gap = model_.shape().gaps[number];
    std::vector<StepAbsence> absences;
    for (std::int32_t release = gap.release_point; release < gap.last; ++release) {
      absences.push_back({number, release, -1});
      for (std::int32_t reload = std::max(release + 1, gap.first); reload < gap.use; ++reload) {
        absences.push_back({number, release, reload});
      }
    }
    return absences;
  }

  const StepModel& model_;
  const std::int64_t budget_bytes_;
  const BeforeEvaluation& before_;
  const std::int64_t kept_ns_;
  std::int64_t effort_ = 0;
  std::vector<std::vector<std::int32_t>> orders_;
  std::optional<Candidate> best_;
};

}  // namespace

std::optional<Moves> find_moves(const StepModel& model, std::int64_t budget_bytes, double effort,
                                const BeforeEvaluation& before_evaluation) {
  return MoveSearch(model, budget_bytes, effort, before_evaluation).run();
}

}  // namespace vdnn
