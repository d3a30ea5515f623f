"""Makes tensors without data directly, as FakeTensorMode does with results that it has in its cache."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_C: Any = torch._C
_make_subclass: Any = torch.Tensor._make_subclass
_empty_strided = torch.empty_strided


class FakeResults:
    """The results of operations on tensors of one device. Call its methods below torch's dispatch modes."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._device = device
        self._empty: dict[torch.dtype, torch.Tensor] = {}
        with _C._DisableTorchDispatch():
            elem = torch.empty(0, device="meta")
        self._attributes = dict(vars(FakeTensor(mode, elem, device)))
        self._throws = not mode._allow_unsafe_data_ptr_access

    def new(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of its own."""
        with _C._DisableTorchDispatch():
            return self._fake(_empty_strided(shape, stride, dtype=dtype, device="meta"))

    def view(
        self,
        of: torch.Tensor,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        offset: int,
    ) -> torch.Tensor:
        """A tensor on the storage of another one."""
        storage = of.untyped_storage()
        with _C._DisableTorchDispatch():
            empty = self._empty.get(dtype)
            if empty is None:
                empty = self._empty[dtype] = _empty_strided((0,), (1,), dtype=dtype, device="meta")
            elem = empty.detach()
            elem.set_(storage, offset, shape, stride)
            return self._fake(elem)

    def alias(self, of: torch.Tensor) -> torch.Tensor:
        """A tensor on all that another one shows."""
        with _C._DisableTorchDispatch():
            return self._fake(of)

    def _fake(self, elem: torch.Tensor) -> torch.Tensor:
        made = _make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=self._device)
        if self._throws:
            _C._set_throw_on_mutable_data_ptr(made)
        else:
            _C._set_warn_deprecated_on_mutable_data_ptr(made)
        vars(made).update(self._attributes)
        return made  # type: ignore[no-any-return]
