"""Policies by name: one list, used by the runtime, the command line and the messages.

A policy that needs no recording answers one question at every save: does this leave the device? Each is a file of its
own. Unknown names are answered with the list.
"""

from __future__ import annotations

from vdnn.planning.policies.keep_all import KeepAll
from vdnn.planning.policies.online import OnlinePolicy, SaveFacts
from vdnn.planning.policies.vdnn_all import VdnnAll
from vdnn.planning.policies.vdnn_conv import VdnnConv

_POLICIES: dict[str, type[OnlinePolicy]] = {"keep": KeepAll, "vdnn-all": VdnnAll, "vdnn-conv": VdnnConv}

__all__ = ["OnlinePolicy", "SaveFacts", "make_policy", "policy_names"]


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def make_policy(policy: str | OnlinePolicy) -> OnlinePolicy:
    """The policy of that name, or the policy itself."""
    if isinstance(policy, OnlinePolicy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"policy: expected one of {_known()} or an OnlinePolicy, got {type(policy).__name__}.")
    if policy not in _POLICIES:
        raise ValueError(f"policy: expected one of {_known()}, got {policy!r}.")
    return _POLICIES[policy]()


def _known() -> str:
    return ", ".join(repr(name) for name in _POLICIES)
