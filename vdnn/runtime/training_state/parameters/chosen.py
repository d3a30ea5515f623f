"""Chooses the parameters of a model that leave the device, and says why others stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from vdnn.errors import VdnnError
from vdnn.runtime.torch_internals.tensor_kinds import has_plain_storage, plain_part
from vdnn.runtime.training_state.state_tensors import is_dense


@dataclass(frozen=True, slots=True)
class Leaving:
    """A parameter that leaves. `owner` is the position of the first module that has it."""

    name: str
    owner: int
    parameter: torch.nn.Parameter
    is_tied: bool  # several modules have it


@dataclass(slots=True)
class Chosen:
    """Parameters that leave, and the names of those that stay, with the reasons."""

    leave: list[Leaving] = field(default_factory=list)
    stay: dict[str, str] = field(default_factory=dict)


def choose(model: torch.nn.Module, min_bytes: int, trained: frozenset[int] | None = None) -> Chosen:
    """The parameters without grad of at least `min_bytes`, and those whose ids are in `trained`. Tied ones count once,
    by their first name."""
    _refuse_compiled(model)
    chosen = Chosen()
    tensors = [*model.parameters(), *model.buffers()]
    holders = Counter(part.untyped_storage()._cdata for one in tensors if (part := plain_part(one)) is not None)
    modules = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    seen: set[int] = set()
    for owner, (path, module) in enumerate(model.named_modules()):
        for own_name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or (parameter.requires_grad and trained is None):
                continue
            seen.add(id(parameter))
            name = f"{path}.{own_name}" if path else own_name
            if type(parameter) is not torch.nn.Parameter and not has_plain_storage(parameter):
                chosen.stay[name] = f"it is a {type(parameter).__name__}"
            elif not has_plain_storage(parameter):
                chosen.stay[name] = "it has no plain memory of its own"
            elif not parameter.dim() or parameter.nbytes < max(min_bytes, 1):
                continue  # small
            elif parameter.requires_grad and trained is not None and id(parameter) not in trained:
                chosen.stay[name] = "it is trained, and no optimizer of the session has it"
            elif holders[parameter.untyped_storage()._cdata] > 1:
                chosen.stay[name] = "it shares memory with another parameter or buffer"
            elif not is_dense(parameter):
                chosen.stay[name] = "its elements overlap or lie apart"
            else:
                chosen.leave.append(Leaving(name, owner, parameter, is_tied=modules[id(parameter)] > 1))
    return chosen


def _refuse_compiled(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            raise VdnnError(
                f"parameters: module {path or 'model'!r} is compiled, and compiled code reads parameters where no hook "
                "can bring them. Leave out parameters=, or do not compile it."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise VdnnError(
                f"parameters: module {path or 'model'!r} is a TorchScript module, which reads parameters where no hook "
                "can bring them. Leave out parameters=, or give the module as it was before."
            )
