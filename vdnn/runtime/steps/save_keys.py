"""Makes the save keys of a step, by which its saves are recognized in other steps.

The steps of a session save the same again and again, so their keys and forms are made once and remembered.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from vdnn.runtime.steps.kinds import NO_SAVES, Begin, Kind, kind_with
from vdnn.runtime.torch_internals.module_watch import ModuleWatch
from vdnn.step.forms import NO_FORM, Form
from vdnn.step.recording import SaveKey

# A program whose sizes change in each step would be remembered for ever.
_MOST_KNOWN = 4096

_Node = torch.autograd.graph.Node
_Facts = tuple[str, str, str, tuple[int, ...], tuple[int, ...]]  # a save key without its occurrence


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _AlikeForms:
    """The forms that differ in their occurrence only, in the order of that."""

    __slots__ = ("facts", "forms")

    def __init__(self, producer: str, module: str, dtype: str, dimensions: int) -> None:
        self.facts = producer, module, dtype, dimensions
        self.forms: list[Form] = []


class _AlikeKeys:
    """The keys that differ in their occurrence only, in the order of that."""

    __slots__ = ("facts", "forms", "keys")

    def __init__(self, facts: _Facts, forms: _AlikeForms) -> None:
        producer, module, dtype, size, stride = facts
        self.facts = producer, module, dtype, tuple(map(int, size)), tuple(map(int, stride))
        self.keys: list[SaveKey] = []
        self.forms = forms  # which keys of other sizes have as well


class _KnownKeys:
    """The keys that the steps of one session have made so far."""

    def __init__(self) -> None:
        self._keys: dict[_Facts, _AlikeKeys] = {}
        self._forms: dict[tuple[str, str, str, int], _AlikeForms] = {}
        self.get = self._keys.get  # without a call of ours: each save asks

    @property
    def are_too_many(self) -> bool:
        return len(self._keys) > _MOST_KNOWN

    def add(self, facts: _Facts) -> _AlikeKeys:
        producer, module, dtype, size, _ = facts
        of_form = producer, module, dtype, len(size)
        forms = self._forms.get(of_form)
        if forms is None:
            forms = self._forms[of_form] = _AlikeForms(*of_form)
        alike = self._keys[facts] = _AlikeKeys(facts, forms)
        return alike


Opening = tuple[SaveKey, Begin]  # the first save of a step, and how it begins


class _Begun(NamedTuple):
    """The first save of a step, and the key, the Begin and the kind that it gives the step."""

    given: tuple[_Facts, int, bool, int]  # with the model, whether the micro-batch is a later one, and the bytes
    key: SaveKey
    begin: Begin
    kind: Kind


class SaveKeys:
    """The save keys of one step or micro-batch, and its kind."""

    def __init__(self, *, is_later: bool = False, before: SaveKeys | None = None) -> None:
        """`is_later`: the micro-batch is not the first of its step. `before`: those of the step before, which often
        saves the same."""
        self._is_later = is_later
        self._known: _KnownKeys = _KnownKeys() if before is None or before._known.are_too_many else before._known
        self._begun_before: _Begun | None = None if before is None else before._begun or before._begun_before
        self._begun: _Begun | None = None
        self._occurrences: dict[_AlikeKeys, int] = {}
        self._forms: dict[_AlikeForms, int] = {}
        self.first: SaveKey | None = None
        self.begin: Begin | None = None
        self.form = NO_FORM  # of the last save
        self.kind: Kind = NO_SAVES  # the kind of the step so far
        self.saves: dict[Form, int] = {}  # with their bytes

    @property
    def opening(self) -> Opening | None:
        return None if self.first is None or self.begin is None else (self.first, self.begin)

    def key(self, tensor: torch.Tensor, node: _Node | None, modules: ModuleWatch) -> SaveKey:
        """The key of the next save, whose grad_fn is `node`, in the module whose forward runs."""
        producer = "" if node is None else node.name()
        facts = producer, modules.path(), _name_of(tensor.dtype), tensor.shape, tensor.stride()
        if self.first is None:
            return self._first_key(facts, modules.model(), tensor.nbytes)
        return self._next_key(facts, tensor.nbytes)

    def _first_key(self, facts: _Facts, model: int, nbytes: int) -> SaveKey:
        before = self._begun_before
        if before is not None and before.given == (facts, model, self._is_later, nbytes):
            self._begin_again(before)
            return before.key
        key = self._key(self._alike(facts))
        self.begin_with(key, model, nbytes)
        return key

    def begin_with(self, first: SaveKey, model: int, nbytes: int) -> None:
        """Adds the first save, which has this key. `model`: see ModuleWatch.model."""
        self._occurrences, self._forms = {}, {}
        facts = first.producer, first.module, first.dtype, first.size, first.stride
        begin = Begin(self._form(self._alike(facts).forms), model, self._is_later)
        self._begin_again(_Begun((facts, model, self._is_later, nbytes), first, begin, kind_with(NO_SAVES, begin)))

    def _begin_again(self, begun: _Begun) -> None:
        self._begun = begun
        self.first, self.begin, self.kind, self.form = begun.key, begun.begin, begun.kind, begun.begin.form
        self.saves = {self.form: begun.given[3]}
        self._occurrences, self._forms = {}, {}
        alike = self._alike(begun.given[0])
        self._key(alike)
        self._form(alike.forms)

    def add(self, key: SaveKey, nbytes: int) -> None:
        """Adds the next save, which has this key."""
        self._next_key((key.producer, key.module, key.dtype, key.size, key.stride), nbytes)

    def _next_key(self, facts: _Facts, nbytes: int) -> SaveKey:
        alike = self._known.get(facts) or self._known.add(facts)
        form = self.form = self._form(alike.forms)
        self.saves[form] = nbytes
        self.kind = kind_with(self.kind, form)
        return self._key(alike)

    def _alike(self, facts: _Facts) -> _AlikeKeys:
        return self._known.get(facts) or self._known.add(facts)

    def _key(self, alike: _AlikeKeys) -> SaveKey:
        occurrence = self._occurrences.get(alike, 0)
        self._occurrences[alike] = occurrence + 1
        while occurrence >= len(alike.keys):  # Ctrl-C may have come between the count and the key
            alike.keys.append(SaveKey(*alike.facts, len(alike.keys)))
        return alike.keys[occurrence]

    def _form(self, alike: _AlikeForms) -> Form:
        occurrence = self._forms.get(alike, 0)
        self._forms[alike] = occurrence + 1
        while occurrence >= len(alike.forms):
            alike.forms.append(Form(*alike.facts, len(alike.forms)))
        return alike.forms[occurrence]

    def rewind(self) -> None:
        """Forgets all saves but the first."""
        if self._begun is not None:
            self._begin_again(self._begun)

    def form_of_encoded(self, key: SaveKey) -> Form:
        """The form of encoded bytes. They are not a save of the program and do not count for the kind."""
        return self._form(self._alike((key.producer, key.module, key.dtype, key.size, key.stride)).forms)
