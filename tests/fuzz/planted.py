"""The faults of issues #14 and #38, planted again: each function undoes one fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vdnn._C import fact_of_norm
from vdnn.runtime.recompute import compiled_search, node_notes, proofs, recipe
from vdnn.runtime.recompute.backend_flags import backend_flags
from vdnn.runtime.recompute.codecs import Bits
from vdnn.runtime.recompute.node_notes import EPS
from vdnn.runtime.recompute.proofs import Outcome, Proofs, Recent
from vdnn.runtime.recompute.snapshots import Snapshots
from vdnn.runtime.recompute.surroundings import run_under
from vdnn.runtime.session import function_transforms, hooks
from vdnn.runtime.session.hooks import Packer
from vdnn.runtime.session.missing import Missing
from vdnn.runtime.session.saves import Saves
from vdnn.runtime.steps.ends import StepEnds
from vdnn.runtime.storage.counters import Kept
from vdnn.runtime.storage.packed_view import PackedView
from vdnn.runtime.torch_internals import joint_graph, module_watch, zero_grads
from vdnn.runtime.torch_internals.gradient_reads import set_native_gradient
from vdnn.runtime.torch_internals.memory_holders import HolderCounts
from vdnn.runtime.torch_internals.parameter_guard import guard_no_longer
from vdnn.runtime.training_state import away_gradients
from vdnn.runtime.training_state.away_gradients import AwayGradients
from vdnn.runtime.training_state.homes import device_of
from vdnn.runtime.training_state.parameters import managed_parameters
from vdnn.runtime.training_state.parameters.away_parameter import AwayParameter
from vdnn.runtime.training_state.parameters.module_calls import ModuleCalls
from vdnn.runtime.training_state.parameters.streaming import Streaming
from vdnn.runtime.training_state.parameters.uses_between_calls import UsesBetweenCalls
from vdnn.runtime.training_state.parameters.writes import Writes

Plant = Callable[[pytest.MonkeyPatch], None]


def nothing(*arguments: Any, **named: Any) -> None:
    """Replaces a function that fixes something."""


def eps_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """1: takes the eps of torch's modules for that of a call."""

    def default(node: Any, name: str, otherwise: Any) -> Any:
        found = fact_of_norm(node, name, otherwise)
        return 1e-5 if name == EPS and found is not otherwise else found

    monkeypatch.setattr(node_notes, "fact_of_norm", default)
    monkeypatch.setitem(compiled_search._READS, "FACT_OF", default)
    monkeypatch.setattr(compiled_search, "_compiled", {})


def counters_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """2b: gives an unpacked tensor a version counter of its own."""
    unpack = PackedView.unpack

    def apart(self: PackedView) -> torch.Tensor:
        shared = unpack(self)
        alone = torch.empty(0, dtype=shared.dtype)
        return alone.set_(shared.untyped_storage(), shared.storage_offset(), shared.size(), shared.stride())

    monkeypatch.setattr(PackedView, "unpack", apart)


def nothing_before_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """2: recipes read memory that a custom backward has overwritten, and no counter shows it."""
    counters_apart(monkeypatch)
    monkeypatch.setattr(Missing, "before_use", nothing)


def dtypes_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """3: what a codec encoded for views of one dtype also serves views of another dtype."""
    monkeypatch.setattr(Saves, "_can_join", lambda self, managed, part, begin: True)
    monkeypatch.setattr(Bits, "admits", staticmethod(lambda values: True))


def no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """4: recipes read parameters as they are at the use, and not as they were at the save."""
    monkeypatch.setattr(Snapshots, "of", lambda self, recipe: recipe)


def believed_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """4, under a plan: tries a recipe at the save only."""
    monkeypatch.setattr(Proofs, "at_use", lambda self, *facts: True)


def flags_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """5: a recompute runs under the settings of the backward."""
    monkeypatch.setattr(recipe, "run_under", lambda flags, *run: run_under(backend_flags(), *run))


def optimizers_end_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """6: the step of every optimizer ends a step, even within a backward."""
    monkeypatch.setattr(StepEnds, "is_due", lambda self: self._is_pending)


def nothing_before_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """7: an optimizer overwrites memory that a later recompute reads."""
    believed_at_use(monkeypatch)
    monkeypatch.setattr(Missing, "before_writes_to", nothing)


def storages_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """8: the module watch assumes that every parameter has memory."""
    monkeypatch.setattr(module_watch, "storage_of", lambda tensor: tensor.untyped_storage())


def all_have_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """9 and 10: nested tensors and the zeros of forward mode are treated as tensors with memory of their own."""
    keep = Packer._keep

    def taken(self: Packer, tensor: torch.Tensor, reason: Kept, nbytes: int) -> Any:
        if reason is Kept.SUBCLASS and (tensor.is_nested or tensor._is_zerotensor()):
            return self._pack_movable(tensor, tensor, tensor.untyped_storage(), tensor.grad_fn, nbytes)
        return keep(self, tensor, reason, nbytes)

    monkeypatch.setattr(hooks, "transform_level", lambda: None)
    monkeypatch.setattr(Packer, "_keep", taken)


def tracers_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """11: tensors that a tracer follows are treated as plain ones."""
    monkeypatch.setattr(function_transforms, "_innermost_of_a_session", lambda: None)
    monkeypatch.setattr(hooks, "num_dispatch_modes", lambda: 0)
    monkeypatch.setattr(hooks, "transform_level", lambda: None)


def books_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """13: the records of proofs are never forgotten."""
    monkeypatch.setattr(Recent.__init__, "__defaults__", (1 << 60,))


def short_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a fault: lowers the bound of 13 so far that a few steps reach it."""
    monkeypatch.setattr(Recent.__init__, "__defaults__", (8,))


def what_left_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """15: a recipe is reported as wrong if its original has been released."""
    run_trial = Proofs._run_trial

    def found_wrong(self: Proofs, managed: Any, one: Any, original: Any, *rest: Any) -> Outcome:
        if original is None and not managed.transport.fake:
            self._warn_once(f"recomputing it by {one.name} does not give the original: it is not recomputed.")
            return Outcome.WRONG
        return run_trial(self, managed, one, original, *rest)

    monkeypatch.setattr(proofs.Proofs, "_run_trial", found_wrong)


# Issue #38: training state.


def hooks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """1: hooks that were registered ahead of the session run ahead of ours, and a read takes the sum on the host for
    the whole gradient."""

    def give(self: AwayGradients, parameter: torch.Tensor, fetched: torch.Tensor) -> None:
        set_native_gradient(parameter, fetched, device_of(parameter))
        self._forget(parameter)

    for module in (away_gradients, managed_parameters):
        monkeypatch.setattr(module, "hear_first", lambda one, hook: one.register_post_accumulate_grad_hook(hook))
    monkeypatch.setattr(AwayGradients, "_give", give)


def native_holders_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """7: DLPack and storage objects are not asked for."""
    monkeypatch.setattr(
        HolderCounts,
        "exceed",
        lambda self, most, more: self.tensor > most.tensor or self.native_storage > most.native_storage,
    )


def gradients_of_entry_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """8: `zero_grad` drops the gradients of all parameters that the optimizer ever had."""

    def parameters_of(optimizer: torch.optim.Optimizer) -> Any:
        known = vars(optimizer).setdefault("every_parameter", {})
        known.update({id(one): one for group in optimizer.param_groups for one in group["params"]})
        return list(known.values())

    monkeypatch.setattr(zero_grads, "_parameters_of", parameters_of)


def writes_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """2: what a module writes to a parameter on the device is not copied to the host."""
    monkeypatch.setattr(Writes, "_write_back", staticmethod(nothing))


def fetched_ahead_of_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """3: a copy that is on the device is used whatever was written to the host since."""
    use = Streaming.use

    def used(self: Streaming, parameters: list[AwayParameter], phase: Any) -> None:
        for one in parameters:
            if one.on_device is not None:
                one.version = one.parameter._version
        use(self, parameters, phase)

    monkeypatch.setattr(Streaming, "use", used)


def versions_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """4: only reads of `.data` show a write, and no version does."""
    use_ends = Writes.use_ends

    def ends(self: Writes, away: AwayParameter, module: Callable[[], str]) -> Any:
        if away.on_device is not None:
            away.version, away.copy_version = away.parameter._version, away.on_device.tensors[0]._version
        return use_ends(self, away, module)

    monkeypatch.setattr(Writes, "use_ends", ends)


def steps_on_the_device_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """5: what an optimizer steps on the device, while the module runs, is taken for what was fetched."""

    def stepped(self: ModuleCalls, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for away in [self._away.get(id(one)) for group in optimizer.param_groups for one in group["params"]]:
            if away is not None and away.is_in_place and away.on_device is not None:
                away.version, away.copy_version = away.parameter._version, away.on_device.tensors[0]._version

    monkeypatch.setattr(ModuleCalls, "_stepped", stepped)


def holders_of_parameters_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """6: nobody is asked who holds the memory of a parameter."""
    for name in ("memory_is_held", "is_used_natively"):
        monkeypatch.setattr(managed_parameters, name, lambda parameter: False)


def guarded_while_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """10: the class of a parameter has a function of ours in evaluation as well, so torch leaves its fast paths."""
    monkeypatch.setattr(UsesBetweenCalls, "end", nothing)
    monkeypatch.setattr(UsesBetweenCalls, "before_use", lambda self, parameter: guard_no_longer(parameter))


def written_inputs_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """9: backward of a compiled region reads an input that forward wrote to."""
    monkeypatch.setattr(joint_graph, "keep_preimages", nothing)
