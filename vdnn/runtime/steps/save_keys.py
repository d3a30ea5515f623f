"""Makes the save keys of a step, by which its saves are recognized in other steps."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from vdnn.runtime.steps.kinds import NO_SAVES, Begin, kind_with
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.step.forms import NO_FORM, Form, Forms
from vdnn.step.recording import SaveKey


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_Alike = tuple[str, str, str, tuple[int, ...], tuple[int, ...]]  # a save key without its occurrence


class _Begun(NamedTuple):
    """The first save of a step, and the key, the begin and the kind that it gives the step."""

    given: tuple[_Alike, int, bool, int]  # with the model, whether the micro-batch is a later one, and the bytes
    key: SaveKey
    begin: Begin
    kind: int


class SaveKeys:
    """The save keys of one step or micro-batch, and its kind."""

    def __init__(self, *, is_later: bool = False, before: SaveKeys | None = None) -> None:
        """`is_later`: of a micro-batch that is not the first of its step. `before`: those of the step before, which
        often begins alike."""
        self._is_later = is_later
        self._begun_before: _Begun | None = None if before is None else before._begun or before._begun_before
        self._begun: _Begun | None = None
        self._occurrences: dict[tuple[object, ...], int] = {}
        self._forms = Forms()
        self.first: SaveKey | None = None
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
        if self.first is None:
            return self._first_key(alike, modules.model(), tensor.nbytes)
        number = self._occurrences.get(alike, 0)
        self._occurrences[alike] = number + 1
        key = SaveKey(*alike, number)
        self._add(key, tensor.nbytes)
        return key

    def _first_key(self, alike: _Alike, model: int, nbytes: int) -> SaveKey:
        before = self._begun_before
        if before is not None and before.given == (alike, model, self._is_later, nbytes):
            self._begin_again(before)
            return before.key
        key = SaveKey(*alike, 0)
        self.begin_with(key, model, nbytes)
        return key

    def begin_with(self, first: SaveKey, model: int, nbytes: int) -> None:
        """Adds the first save, which has this key. `model`: see ModuleWatch.model."""
        alike = first.producer, first.module, first.dtype, first.size, first.stride
        begin = Begin(Forms().of(first), model, self._is_later)
        self._begin_again(_Begun((alike, model, self._is_later, nbytes), first, begin, kind_with(NO_SAVES, begin)))

    def _begin_again(self, begun: _Begun) -> None:
        self._begun = begun
        self.first, self.begin, self.kind, self.form = begun.key, begun.begin, begun.kind, begun.begin.form
        self.saves = {self.form: begun.given[3]}
        self._occurrences = {begun.given[0]: 1}
        self._forms = Forms()
        self._forms.of(begun.key)

    def add(self, key: SaveKey, nbytes: int) -> None:
        """Adds the next save, which has this key."""
        alike = key.producer, key.module, key.dtype, key.size, key.stride
        self._occurrences[alike] = self._occurrences.get(alike, 0) + 1
        self._add(key, nbytes)

    def _add(self, key: SaveKey, nbytes: int) -> None:
        form = self.form = self._forms.of(key)
        self.saves[form] = nbytes
        self.kind = kind_with(self.kind, form)

    def rewind(self) -> None:
        """Forgets all saves but the first."""
        if self._begun is not None:
            self._begin_again(self._begun)

    def form_of_encoded(self, key: SaveKey) -> Form:
        """The form of encoded bytes, which are no save of the program and do not count for the kind."""
        return self._forms.of(key)
