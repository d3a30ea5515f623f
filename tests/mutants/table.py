"""Small faults, each one replacement in one file, with the tests of its room that are asked first.

Anchors are short, so that other changes to a file leave them alone. `run.py` reports an anchor that a file does not
have exactly once.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    path: str  # below vdnn/, or csrc/ for C++
    anchor: str
    fault: str
    tests: str  # files and folders below tests/


def _of(tests: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(path, anchor, fault, tests) for path, anchor, fault in faults]


MUTANTS = [
    *_of(
        "planning/test_host_lane.py planning/training/test_issued.py",
        ("csrc/planning/step_replay.cpp", "? std::max(ready_ns, host_ns_) : ready_ns", "? ready_ns : ready_ns"),
        ("csrc/planning/recorded_step.cpp", "issue_ns_ += lifetime.recompute.issue_ns;", ""),
        ("planning/bound/lower_bound.py", "min(1.0, missing / nbytes)", "1.0"),
        ("planning/search/auto.py", "if min(steps_ns) > min(alone_ns):", "if False:"),
        ("planning/training/issued.py", "found += training.micro_batches * unit.forward_issue_ns", "pass"),
    ),
    *_of(
        "planning/test_footprint.py planning/test_costs.py planning/test_recorded_step.py planning/test_simulate.py"
        " planning/test_recomputing.py planning/search planning/policies",
        ("planning/footprint.py", "if use > point), None)", "if use >= point), None)"),
        ("planning/footprint.py", "return range(begin, end + 1)", "return range(begin, end)"),
        ("csrc/planning/recorded_step.cpp", "std::max({held, one.use, one.done})", "std::max(held, one.use)"),
        ("csrc/planning/step_replay.cpp", "begin_ns - computed_ns", "0"),
        ("csrc/planning/step_timeline.cpp", "now += absent[point + 1]", "now += absent[point]"),
        ("planning/least_memory.py", "return max(recorded_step", "return min(recorded_step"),
        (
            "csrc/planning/recorded_step.cpp",
            "std::max(recompute.kept_bytes, recompute.disc",
            "std::min(recompute.kept_bytes, recompute.disc",
        ),
        ("planning/costs.py", "max(*rates.values(), share * both)", "min(*rates.values(), share * both)"),
        (
            "csrc/planning/local_search.cpp",
            "found.outcome.step_ns < best_->outcome.step_ns",
            "found.outcome.step_ns > best_->outcome.step_ns",
        ),
        ("csrc/planning/local_search.cpp", "absence.reload_point < 0 ? gap.last : absence.reload_point", "gap.last"),
    ),
    *_of(
        "planning/bound",
        ("planning/bound/stall_program.py", "if gap.first <= anchor <= gap.last", "if gap.first < anchor <= gap.last"),
        ("planning/bound/stall_program.py", "* (present + 1) > room]", "* (present + 1) >= room]"),
    ),
    *_of(
        "planning/training planning/published benchmarks/test_executed_placements.py",
        (
            "planning/training/cycle.py",
            "max(earliest, self.last_backward + 1)",
            "max(earliest, self.last_backward - 1)",
        ),
        ("planning/training/cycle.py", "one.gradient_leaves or (bool(steps) and", "one.gradient_leaves or (False and"),
        ("planning/training/copy_flow.py", "min(rates[2], machine", "max(rates[2], machine"),
        ("planning/training/copy_flow.py", "columns[(now + 1) % len(windows)]", "columns[now]"),
    ),
    *_of(
        "planning runtime/steps/test_plans.py",
        ("step/recording.py", "return max(point.peak_bytes", "return min(point.peak_bytes"),
        (
            "csrc/planning/resized_step.cpp",
            "line > square ? line : square",
            "line < square ? line : square",
        ),
        (
            "step/plan.py",
            "absence.release_point < reload_point <= last",
            "absence.release_point <= reload_point <= last",
        ),
    ),
    *_of(
        "benchmarks/test_executed_placements.py benchmarks/test_shared_device.py",
        (
            "benchmarks/whole_state/executed_placement.py",
            "turn - 1 - self.placement.delayed_update",
            "turn - self.placement.delayed_update",
        ),
        (
            "benchmarks/whole_state/shared_device.py",
            "if event.position > self._streams",
            "if event.position >= self._streams",
        ),
    ),
    *_of(
        "house/test_bytesize.py",
        ("bytesize.py", "UNITS[unit] * 0.999995", "UNITS[unit]"),
        ("bytesize.py", "if count > MAX_BYTES:", "if count >= MAX_BYTES:"),
    ),
    *_of(
        "runtime/machine",
        (
            "runtime/machine/allocation_tracker.py",
            "self._mark_peak_bytes = max(self._mark_peak_bytes, self.live_bytes)",
            "self._mark_peak_bytes = self.live_bytes",
        ),
        (
            "runtime/machine/gauges.py",
            "if now.peak_bytes > before.peak_bytes:",
            "if now.peak_bytes < before.peak_bytes:",
        ),
        ("runtime/machine/roofline.py", "max(traffic_ns, arithmetic_ns)", "min(traffic_ns, arithmetic_ns)"),
        ("runtime/machine/operation_class.py", "channels < _FEW_CHANNELS", "channels <= _FEW_CHANNELS"),
        ("runtime/machine/virtual_machine.py", "self.peak_bytes <= self.profile", "self.peak_bytes >= self.profile"),
    ),
    *_of(
        "runtime/session runtime/storage integrations/test_compiled_moves.py runtime/recompute/test_recomputes.py",
        ("runtime/storage/discarded.py", "self._unused_views <= 0 and", "self._unused_views <= 1 and"),
        ("runtime/storage/graph_copies.py", "return (last + 1) * tensor.itemsize", "return last * tensor.itemsize"),
        ("runtime/storage/transport.py", "+ nbytes > self.reload_window_bytes", "+ nbytes < self.reload_window_bytes"),
        (
            "runtime/storage/packed_view.py",
            "container is None or container.version != part.version",
            "container is None",
        ),
        ("runtime/session/exemptions.py", '"paused", 0) + 1', '"paused", 0)'),
        ("runtime/session/limits.py", "budget_bytes // 8", "budget_bytes * 8"),
    ),
    *_of(
        "runtime/unusual/test_rechecks.py runtime/unusual/test_unseen_writes.py runtime/unusual/test_backend_flags.py"
        " integrations/test_ranks.py",
        ("runtime/recompute/rechecks.py", "self._times((signature, save_key)) >= _FIRST:", "True:"),
        ("runtime/recompute/finder.py", "if len(ran_under) > 1:", "if len(ran_under) > 2:"),
        ("runtime/session/offload.py", "or recheck < 0", "or recheck < -1"),
        ("runtime/storage/unseen_writes.py", "and reach[1] <= end:", "and reach[1] >= end:"),
        ("runtime/session/limits.py", "or int(value) < 1", "or int(value) < 0"),
    ),
    *_of(
        "runtime/recompute",
        ("runtime/recompute/codecs.py", "(original - made).abs() <= bound", "(original - made).abs() <= 64 * bound"),
        ("runtime/recompute/codecs.py", "values.view(torch.uint8).max() <= 1", "values.view(torch.uint8).max() <= 2"),
        ("runtime/recompute/recipe.py", "made.dtype is not dtype or made.shape", "made.shape"),
        ("runtime/recompute/tolerance.py", "if not 0 <= value < 1:", "if not 0 <= value <= 1:"),
    ),
    *_of(
        "runtime/steps",
        ("runtime/steps/guard.py", "while self._candidates and self._over_bytes() > 0", "while False"),
        ("runtime/steps/measurement.py", "if peak_bytes <= budget_bytes:", "if peak_bytes < budget_bytes:"),
        ("runtime/steps/executor.py", "found - self._next_save > NEARBY", "found - self._next_save > 0"),
        ("runtime/steps/plan_guard.py", "lifetime - _SOON:", "lifetime + 100 * _SOON:"),
        (
            "runtime/steps/planner.py",
            "peak_bytes + more_bytes <= budget_bytes:\n            return True",
            "peak_bytes <= budget_bytes:\n            return True",
        ),
        ("runtime/steps/plan_table.py", "if len(self.plans) > _MOST_PLANS:", "if len(self.plans) >= _MOST_PLANS:"),
        (
            "runtime/steps/recorder.py",
            "self._recompute_peak_bytes = max(self._recompute_peak_bytes, peak_bytes)",
            "self._recompute_peak_bytes = peak_bytes",
        ),
        ("runtime/steps/settling.py", "if len(known) > _MOST_SHAPES:", "if len(known) > 0:"),
        ("runtime/steps/script_sizes.py", "return None if number % self.divisor else", "return"),
        ("runtime/steps/script_sizes.py", "values[index] > self._largest[index]", "False"),
        ("runtime/steps/watched_step.py", "max(self.peak_bytes, last_bytes)", "self.peak_bytes"),
        ("runtime/steps/kinds.py", "and resident_bytes >= known", "and resident_bytes > known"),
    ),
    *_of(
        "planning/test_resized_steps.py",
        (
            "runtime/steps/size_model.py",
            "lines = self._lines(first, in_part=not is_served)",
            "lines = self._lines(first)",
        ),
        ("runtime/steps/resized_steps.py", "_alike_nearest(steps) if in_part else steps", "steps"),
    ),
    *_of(
        "runtime/training_state",
        ("runtime/training_state/state_copies.py", "min(transport.narrow_window", "max(transport.narrow_window"),
        ("runtime/training_state/state_copies.py", "if not begin.empty and not end.empty:", "if False:"),
        ("runtime/training_state/cpu_steps.py", "place.tensor.nbytes < self._min_bytes", "False"),
        (
            "runtime/training_state/gradient_passes.py",
            "if error_if_nonfinite and not bool",
            "if error_if_nonfinite and bool",
        ),
        ("runtime/training_state/optimizer_state.py", "part_bytes + nbytes > limit_bytes", "part_bytes > limit_bytes"),
        ("runtime/training_state/away_gradients.py", "local.nbytes >= min_bytes", "local.nbytes > min_bytes"),
        (
            "runtime/training_state/slices.py",
            "else type(one) for one in parameters}) > 1",
            "else type(one) for one in parameters}) > 2",
        ),
        ("runtime/training_state/parameters/managed_parameters.py", "if self._entries > 1:", "if self._entries > 2:"),
    ),
    *_of(
        "runtime/rehearsal",
        ("runtime/rehearsal/made_warm_up.py", "has_written or found != self._made", "found != self._made"),
        ("runtime/rehearsal/made_warm_up.py", "random_before != random_states()", "False"),
        ("runtime/rehearsal/made_warm_up.py", "return self._are_storages_the_same()", "return True"),
        ("runtime/rehearsal/expectations.py", "Expectation(left * right)", "Expectation(left + right)"),
        ("runtime/rehearsal/fused_attention.py", "query.dtype is not torch.float32 and not is_half", "False"),
        ("runtime/rehearsal/cuda_shaped.py", "if not training or p == 0.0 or inplace:", "if p == 0.0:"),
    ),
    *_of(
        "house/test_link_probe.py advisor report",
        (
            "hardware/link_probe.py",
            "moved_bytes * 10**9 // max(taken_ns, 1)",
            "moved_bytes * 10**6 // max(taken_ns, 1)",
        ),
    ),
    *_of(
        "memory device codec transfer planning/search",
        (
            "csrc/memory/pinned_pool.cpp",
            "return (bytes + unit - 1) / unit * unit;",
            "return bytes / unit * unit + unit;",
        ),
        (
            "csrc/memory/slab_space.cpp",
            "if (range.bytes > bytes) insert_free",
            "if (range.bytes > 2 * bytes) insert_free",
        ),
        ("csrc/planning/room_tree.cpp", "if (begin >= end) return;", "if (begin + 1 >= end) return;"),
        ("csrc/transfer/transfer_queue.cpp", "bytes <= options_.small_copy_bytes", "bytes < options_.small_copy_bytes"),
        ("csrc/device/check/ordering_checker.cpp", "< earlier.number) found", "+ 1 < earlier.number) found"),
        ("csrc/memory/host_limits.cpp", "*used - std::min(*used, reclaimable)", "*used"),
    ),
    *_of(
        "runtime/steps/test_light_discards.py runtime/steps/test_settled_recomputes.py runtime/unusual/test_rechecks.py"
        " runtime/recompute/test_compiled_run.py",
        ("runtime/storage/discarded.py", "one.identity if isinstance(one, _C.LightSave) else id(one)", "id(one)"),
        (
            "runtime/session/settled_hooks.py",
            "saves.readers.forget_index()\n            return _C.CountedRecipe",
            "return _C.CountedRecipe",
        ),
        ("runtime/session/session_recipes.py", "or self._rechecks.is_checking:", "or False:"),
        ("runtime/recompute/compiled_run.py", 'f"v{index} = None" for', '"pass" for'),
    ),
    *_of(
        "runtime/steps/test_facts_of_settled_steps.py runtime/steps/test_readings_of_hooks.py runtime/recompute",
        ("csrc/hooks/torch_settings.cpp", "&& !Boundaries::here().were_read_around(node)", "&& false"),
        ("csrc/hooks/torch_settings.cpp", "} else if (saved.epoch != newest_) {", "} else if (false) {"),
        ("csrc/hooks/norm_calls.cpp", "made(call, arguments[0]) ? is_made_by(*call.norm, arguments[0]) : 0", "1"),
        ("csrc/hooks/norm_calls.cpp", "if (!(in_python && distance == 0) && !passes_on(code.get())) {", "if (false) {"),
        ("csrc/hooks/norm_calls.cpp", "call.node != number ||", "false ||"),
        ("runtime/recompute/proofs.py", "self._at_any_size.get(trial_key.shapeless) is Outcome.EXACT", "True"),
        ("runtime/steps/plan_guard.py", "managed.copy is None or not managed.can_be_evicted", "managed.copy is None"),
        ("runtime/storage/transport.py", "self.release_context.changes += 1", "pass"),
    ),
    *_of(
        "deferred/test_gradients_of_moved_parameters.py",
        ("runtime/training_state/parameters/graph_uses.py", "            if times > 1:", "            if times > 9:"),
        (
            "runtime/torch_internals/backward_inputs.py",
            "return functools.reduce(operator.add, there)",
            "return there[0]",
        ),
        ("runtime/torch_internals/backward_inputs.py", "for node in found.get(id(one), ())]", "for node in ()]"),
        ("runtime/torch_internals/backward_inputs.py", "if in_backward():", "if False:"),
    ),
]
