"""The registry of policies by name, for the runtime, the command line and messages.

A policy decides at every save without a recording (`online`), makes a plan from a recording (`planner`), or both. Third
parties add policies with vdnn.register_policy, or with an entry point of the group "vdnn.policies": its name is the
policy's name, and its value is a callable that makes the policy. Unknown names are refused with a list of known ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from vdnn.planning.policies.online import OnlinePolicy
from vdnn.planning.policies.plan_policy import PlanPolicy

ENTRY_POINTS = "vdnn.policies"


@dataclass(frozen=True, slots=True)
class _RegisteredPolicy:
    online: Callable[[], OnlinePolicy] | None
    planner: Callable[[], PlanPolicy] | None


_entries: dict[str, _RegisteredPolicy] = {}
_are_entry_points_loaded = False


def register_policy(
    name: str,
    *,
    online: Callable[[], OnlinePolicy] | None = None,
    planner: Callable[[], PlanPolicy] | None = None,
) -> None:
    """Adds a policy under `name`. A name that is already registered is refused."""
    if online is None and planner is None:
        raise ValueError(f"register_policy: {name!r} needs a callable that makes it: pass online, planner, or both.")
    if not name or name != name.strip():
        raise ValueError(f"register_policy: expected a name without spaces around it, got {name!r}.")
    if name in _entries:
        raise ValueError(f"register_policy: there is a policy {name!r} already. Choose another name.")
    _entries[name] = _RegisteredPolicy(online, planner)


def policy_names() -> tuple[str, ...]:
    return tuple(_all())


def planner_names() -> tuple[str, ...]:
    """The names of policies that make plans."""
    return tuple(name for name, entry in _all().items() if entry.planner is not None)


def make_policy(policy: str | OnlinePolicy) -> OnlinePolicy:
    """The online policy of that name, or the policy itself. Raises ValueError if the policy needs a recording."""
    if isinstance(policy, OnlinePolicy):
        return policy
    online = _entry_of(policy).online
    if online is None:
        known = ", ".join(repr(name) for name, entry in _all().items() if entry.online is not None)
        raise ValueError(f"policy: {policy!r} needs a recording; policies that work without one are {known}.")
    return online()


def make_planner(policy: str | PlanPolicy | OnlinePolicy) -> PlanPolicy:
    """The plan policy of that name, or the policy itself. Raises ValueError if the policy makes no plans."""
    if isinstance(policy, PlanPolicy):
        return policy
    planner = None if isinstance(policy, OnlinePolicy) else _entry_of(policy).planner
    if planner is None:
        name = policy.name if isinstance(policy, OnlinePolicy) else policy
        raise ValueError(
            f"policy: {name!r} makes no plans: it decides at each save, in a step that runs under vdnn.offload(). "
            f"Policies that make plans are {_listed(planner_names())}."
        )
    return planner()


def has_planner(policy: str) -> bool:
    return _entry_of(policy).planner is not None


def has_online(policy: str) -> bool:
    return _entry_of(policy).online is not None


def _entry_of(name: str) -> _RegisteredPolicy:
    if not isinstance(name, str):
        raise TypeError(f"policy: expected one of {_listed(policy_names())} or a policy, got {type(name).__name__}.")
    entry = _all().get(name)
    if entry is None:
        raise ValueError(f"policy: expected one of {_listed(policy_names())}, got {name!r}.")
    return entry


def _all() -> dict[str, _RegisteredPolicy]:
    global _are_entry_points_loaded
    if not _are_entry_points_loaded:
        _are_entry_points_loaded = True
        for point in entry_points(group=ENTRY_POINTS):
            if point.name not in _entries:
                _entries[point.name] = _RegisteredPolicy(None, point.load())
    return _entries


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)
