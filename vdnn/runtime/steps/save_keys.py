"""Makes the save keys of a step, by which its saves are recognized in other steps."""

from __future__ import annotations

import functools

import torch

from vdnn.runtime.steps.kinds import NO_SAVES, Begin, kind_with
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.step.forms import NO_FORM, Form, Forms
from vdnn.step.recording import SaveKey


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SaveKeys:
    """The save keys of one step or micro-batch, and its kind."""

    def __init__(self, *, is_later: bool = False) -> None:
        """`is_later`: of a micro-batch that is not the first of its step."""
        self._is_later = is_later
        self._occurrences: dict[tuple[object, ...], int] = {}
        self._forms = Forms()
        self.first: SaveKey | None = None
        self._first_bytes = 0
        self.begin: Begin | None = None
        self.form = NO_FORM  # of the last save
        self.kind = NO_SAVES  # the kind of the step so far
        self.saves: dict[Form, int] = {}  # with their bytes

    def key(self, tensor: torch.Tensor, modules: ModuleWatch) -> SaveKey:
        """The key of the next save, in the module whose forward runs."""
        node = tensor.grad_fn
        alike = (
            "" if node is None else node.name(),
            modules.path(),
            _name_of(tensor.dtype),
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
        )
        number = self._occurrences.get(alike, 0)
        self._occurrences[alike] = number + 1
        key = SaveKey(*alike, number)
        if self.first is None:
            self.begin = Begin(NO_FORM, modules.model(), self._is_later)
        self._add(key, tensor.nbytes)
        return key

    def add(self, key: SaveKey, nbytes: int) -> None:
        """Adds the next save, which has this key."""
        alike = key.producer, key.module, key.dtype, key.size, key.stride
        self._occurrences[alike] = self._occurrences.get(alike, 0) + 1
        self._add(key, nbytes)

    def _add(self, key: SaveKey, nbytes: int) -> None:
        form = self.form = self._forms.of(key)
        self.saves[form] = nbytes
        if self.first is None and self.begin is not None:
            self.first, self.begin = key, self.begin._replace(form=form)
            self._first_bytes = nbytes
            self.kind = kind_with(self.kind, self.begin)
        else:
            self.kind = kind_with(self.kind, form)

    def rewind(self) -> None:
        """Forgets all saves but the first."""
        first = self.first
        if first is None:
            return
        self._occurrences.clear()
        self._forms, self.saves, self.kind, self.first = Forms(), {}, NO_SAVES, None
        self.add(first, self._first_bytes)

    def form_of_encoded(self, key: SaveKey) -> Form:
        """The form of encoded bytes, which are no save of the program and do not count for the kind."""
        return self._forms.of(key)
