"""The report names the holder of a storage that was copied but not freed, by its name in the program."""

from __future__ import annotations

import re

import torch
from torch import nn

import vdnn
from vdnn.runtime.session.session import Session


class Remembers(nn.Module):
    """Keeps a tensor of its last forward pass, as models do that visualize their feature maps."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.tanh()
        return self.last.exp()


def held_lines(session: Session) -> list[str]:
    return [line for line in session.report().splitlines() if "copied, and still on the device" in line]


def opened() -> Session:
    return vdnn.offload(device="sim", min_bytes=0, limits=vdnn.Limits(offload_window=1))


def test_a_variable_is_named() -> None:
    with opened() as session:
        x = torch.randn(64, requires_grad=True)
        feature_map = x.tanh()
        loss = feature_map.exp().sin().sum()
        loss.backward()
    (line,) = held_lines(session)
    assert "256 B, float32 [64] saved in no module, held by the variable 'feature_map' of test_a_variable" in line
    session.close()


def test_a_modules_attribute_is_named() -> None:
    model = Remembers()
    with opened() as session:
        model(torch.randn(64, requires_grad=True)).sin().sum().backward()
    (line,) = held_lines(session)
    assert "float32 [64] saved in Remembers, held by the attribute 'last' of a Remembers" in line
    session.close()


def test_a_list_is_named_by_its_kind() -> None:
    kept: list[torch.Tensor] = []
    with opened() as session:
        kept.append(torch.randn(64, requires_grad=True).tanh())
        kept[0].exp().sin().sum().backward()
    (line,) = held_lines(session)
    assert re.search(r"held by a list of 1$", line), line
    kept.clear()
    assert held_lines(session) == [], "it was freed"
    session.close()


def test_what_no_python_object_explains_is_native() -> None:
    with opened() as session:
        x = torch.randn(64, requires_grad=True)
        with vdnn.paused():
            kept = x.tanh().exp()  # its graph itself holds the result of tanh
        (kept.grad_fn.next_functions[0][0]._saved_result * x).sin().sum().backward()  # type: ignore[union-attr]
    assert all("held by" in line for line in held_lines(session))
    session.close()


def test_nothing_held_nothing_said() -> None:
    with opened() as session:
        torch.randn(64, requires_grad=True).tanh().exp().sin().sum().backward()
    assert held_lines(session) == []
    session.close()
