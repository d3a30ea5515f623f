"""The ways of docs/training-state.md, the budgets of activations beside them, and what a session may refuse."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

import vdnn
from tests.fuzz.outcomes import MODIFIED
from tests.fuzz.sessions import open_planned
from tests.runtime.training_state.ways import what_stays_changes
from vdnn import _C
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.step.training_plan import PlacedParameter, TrainingPlan

if TYPE_CHECKING:
    from tests.fuzz.trainings.world import Training

# What is given to `vdnn.offload`, by name of the way. "parameters" needs the model as well, and so do "as needed",
# a session that decides by itself what leaves, and "as planned", one that follows a drawn plan of the whole training.
WAYS: dict[str, dict[str, Any]] = {
    "state": {},
    "deferred": {"optimizer_step": "deferred"},
    "gradients": {"gradients": True},
    "deferred gradients": {"optimizer_step": "deferred", "gradients": True},
    "frozen": {"parameters": "frozen"},
    "frozen gradients": {"parameters": "frozen", "gradients": True},
    "deferred frozen gradients": {"optimizer_step": "deferred", "gradients": True, "parameters": "frozen"},
    "frozen alone": {"parameters": "frozen"},
    "all": {"parameters": "all"},
    "as needed": {"model": None},
    "as planned": {"model": None},
    "on the cpu": {"optimizer_on": "cpu"},
    "all on the cpu": {"parameters": "all", "optimizer_on": "cpu"},
}
_WEIGHTS = {"gradients": 2, "all": 4, "as needed": 2, "frozen": 1.5, "deferred gradients": 1.5, "all on the cpu": 1}
# Over the simulated device no bytes are counted, so a budget is a policy there: nothing is offloaded, all activations
# are, all are recomputed. "changing" moves them, and behind each step of an optimizer other parameters, gradients and
# states stay on the device. A virtual machine counts, and has a plan for a share of what the training takes without a
# session, or for the least: what stays there is what shortens the step.
_SHARES = ("planned 80", "planned 90", "planned 120")
BUDGETS = {
    "none": 0.35,
    "changing": 0.045,
    **dict.fromkeys(("medium", "small"), 0.28),
    **dict.fromkeys((*_SHARES, "planned min"), 0.015),
}
_POLICIES = {"none": "keep", "medium": "vdnn-all", "small": "recompute-all", "changing": "vdnn-all"}
# A plan settles, and state begins to stay, behind the fifth step or later.
_STEPS, _MANY_STEPS = 5, 14


class Way(NamedTuple):
    name: str
    budget: str

    @property
    def is_planned(self) -> bool:
        return self.budget.startswith("planned")

    @property
    def what_stays_changes(self) -> bool:
        return self.budget == "changing"

    @property
    def steps_on_cpu(self) -> bool:
        return WAYS[self.name].get("optimizer_on") == "cpu"

    @property
    def all_leaves(self) -> bool:
        """Nothing of this way ever stays on the device."""
        return self.steps_on_cpu or WAYS[self.name].get("optimizer_step") == "deferred"

    @property
    def steps(self) -> int:
        return _MANY_STEPS if self.is_planned or self.what_stays_changes else _STEPS

    def __str__(self) -> str:
        return f"{self.name}, {self.budget}"


def way_of(mode: str) -> Way:
    return Way(*mode.split(", "))


def draw_mode(random: Random) -> str:
    name = random.choices(list(WAYS), [_WEIGHTS.get(one, 1) for one in WAYS])[0]
    budget = random.choices(list(BUDGETS), list(BUDGETS.values()))[0]
    if budget.startswith("planned") and WAYS[name].get("optimizer_on") == "cpu":
        budget = "none"  # refused: a virtual machine has no clock for the CPU
    if budget == "changing" and Way(name, budget).all_leaves:
        budget = "medium"
    if name == "as planned" and budget not in _SHARES:
        budget = random.choice(_SHARES)
    return str(Way(name, budget))


def _options(way: Way, training: Training) -> dict[str, Any]:
    """The arguments of the session. A training without an optimizer or a model gets a session for activations alone."""
    optimizers = [one for one in training.optimizers.values() if any(group["params"] for group in one.param_groups)]
    options = dict(WAYS[way.name])
    if way.name != "frozen alone":
        if not optimizers:
            return {}
        options["optimizer"] = optimizers if len(optimizers) > 1 else optimizers[0]
    if "parameters" in options or "model" in options:
        if not training.nets:
            return {}
        options["model"] = training.whole()
    return options


@contextlib.contextmanager
def sessions_of(way: Way, seed: int, recheck: int, plain: Callable[[], object]) -> Iterator[Any]:
    """Yields a function that opens a session of this way for a training. At the end, the sessions that live on are
    closed ahead of their device. `plain` runs the training without a session."""
    opened: list[weakref.ref[Any]] = []

    def remembered(session: Any) -> Any:
        opened.append(weakref.ref(session))
        return session

    with contextlib.ExitStack() as closing:
        if way.what_stays_changes:
            closing.enter_context(what_stays_changes(seed))
        planned = way.is_planned
        open_one = closing.enter_context(_planned(way, plain, recheck) if planned else _simulated(way, seed, recheck))
        try:
            yield lambda training: remembered(open_one(training))
        finally:
            for reference in opened:
                session = reference()
                if session is not None:
                    session.close()


@contextlib.contextmanager
def _planned(way: Way, plain: Callable[[], object], recheck: int) -> Iterator[Any]:
    share = way.budget.removeprefix("planned ")
    budget: int | str = "min"
    if share != "min":
        with VirtualMachine("titan-x", fake=False) as machine:
            plain()
            budget = machine.peak_bytes * int(share) // 100
    with VirtualMachine("titan-x", fake=False) as machine:

        def opened(training: Training) -> Any:
            options = _options(way, training)
            if way.name != "as planned" or not options:
                return open_planned(budget, machine, recheck, **options)
            assert isinstance(budget, int)
            plan = _drawn_plan(training, options["model"], budget)
            return vdnn.offload(plan=plan, device=machine, min_bytes=0, recheck=recheck, **options)

        yield opened


def _drawn_plan(training: Training, model: nn.Module, budget: int) -> TrainingPlan:
    random = Random(training.program.seed)
    found: dict[int, PlacedParameter] = {}
    for name, parameter in model.named_parameters():
        storage = parameter.untyped_storage()
        leaves = (random.random() < 0.5, random.random() < 0.5, random.random() < 0.7)
        found.setdefault(storage._cdata, PlacedParameter(name, storage.nbytes(), *leaves))
    return TrainingPlan("drawn", budget, tuple(found.values()))


@contextlib.contextmanager
def _simulated(way: Way, seed: int, recheck: int) -> Iterator[Any]:
    window = "256B" if seed % 2 else "2KiB"
    limits = vdnn.Limits(offload_window=window, reload_window=window)
    if seed % 4 == 3:  # each session makes a device of its own
        yield functools.partial(_open, way, limits, recheck, "sim")
        return
    # How far copies run behind the program: not at all, as far as waits allow, or by chance. Every access is checked.
    schedule = (_C.Schedule.EAGER, _C.Schedule.LAZY, _C.Schedule.RANDOM)[seed % 4]
    checker: Any = _C.OrderingChecker(_C.SimDevice(schedule=schedule, seed=seed))
    try:
        yield functools.partial(_open, way, limits, recheck, checker)
    finally:
        checker.close()
    violations = checker.take_violations()
    if violations:
        raise AssertionError(f"{len(violations)} accesses out of order, the first: {violations[0]}")


def _open(way: Way, limits: vdnn.Limits, recheck: int, device: Any, training: Training) -> Any:
    given = _options(way, training)
    return vdnn.offload(_POLICIES[way.budget], device=device, min_bytes=0, limits=limits, recheck=recheck, **given)


class Refusal(NamedTuple):
    """An error that a session may raise where plain PyTorch has none."""

    says: str
    only_if: str  # a pattern that the listing of the program has
    documented: str  # the words of docs/training-state.md


REFUSALS = (
    Refusal(
        r"budget .* cannot be met",
        r"planned \d",
        "A budget that cannot be met is refused with the smallest that can",
    ),
    Refusal(
        r"cannot be stepped on the CPU: the gradient of parameter .* is sparse",
        r"on the cpu[\s\S]*embedding\(",
        "Refused with a sentence: parameters that share memory, DTensors, sparse gradients",
    ),
    Refusal(
        MODIFIED,
        r"on the cpu[\s\S]*(optimizers_in_hooks|'step'|greedy)[\s\S]*loop",
        "The copies back have one, so a graph that saved a parameter ahead of a step refuses its backward behind it.",
    ),
    Refusal(
        r"was moved or replaced by \.data, \.to\(\) or another conversion",
        r"(frozen|all)[\s\S]*(replace_data|momentum\(.*'data'|load\('(assign|swap)'\))",
        "`.to()` and `parameter.data = ...` inside are refused at the next call of the module",
    ),
    Refusal(
        r"has to be on the device from now on, because (it is read between|it was frozen as|torch.func ran)",
        r"(frozen|all)[\s\S]*(alias|save)\(",
        "A parameter that has to stay on the device from then on, while the program holds its memory of the host, is "
        "refused with its name",
    ),
    Refusal(
        r"was written to between calls of modules, while a graph or the program holds",
        r"(frozen|all)[\s\S]*(alias|save)\(",
        "If a graph or the program holds the copy on the device as well, a write to the parameter between calls is "
        "refused",
    ),
    Refusal(
        r"was written to while .* ran, .* in a way that torch does not count",
        r"(changing|planned)[\s\S]*(writing|momentum)\(",
        "If it is found later, a `VdnnError` names the parameter, the module and the line of the call",
    ),
    Refusal(
        r"optimizer: parameter .* is not one of the model's",
        r"load\('assign'\)",
        "the session then checks that the optimizer's parameters are the model's",
    ),
    Refusal(
        r"the data of parameter .* were replaced",
        r"(frozen|all)[\s\S]*(replace_data|momentum\(.*'data'|load\('(assign|swap)'\))",
        "if the parameter was used again since: then the backward is refused with the name",
    ),
)


def may_refuse(error: BaseException, listing: str) -> bool:
    return any(re.search(one.says, str(error)) and re.search(one.only_if, listing) for one in REFUSALS)
