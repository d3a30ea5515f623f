"""Trains a program of examples/ with its session, and with an object in its place that does nothing: plain PyTorch."""

from __future__ import annotations

import argparse
import re
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import vdnn
from tests.runtime.rigs.side_by_side import same_bits
from vdnn.integrations import ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class NoSession:
    """In place of a session, or of the sessions of ranks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.session = self

    def __enter__(self) -> NoSession:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def step(self) -> None:
        pass

    def report(self) -> str:
        return "plain PyTorch"


class Trained:
    """The weights, losses and report of an example. `options` are those of its command line."""

    def __init__(self, name: str, *, is_plain: bool = False, **options: Any) -> None:
        said: list[str] = []
        replaced = NoSession if is_plain else vdnn.offload
        together = NoSession if is_plain else ranks.offload_together
        with mock.patch.object(vdnn, "offload", replaced), mock.patch.object(ranks, "offload_together", together):
            program = runpy.run_path(str(EXAMPLES / f"{name}.py"))
            with mock.patch("builtins.print", said.append):
                model: torch.nn.Module = program["train"](argparse.Namespace(device="titan-x", **options))
        self.weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
        self.losses = [line for line in said if "loss" in line]
        self.report = said[-1]

    def differs_from(self, plain: Trained) -> list[str]:
        """The names of weights with other bits, and the lines of losses that are not the same."""
        assert list(self.weights) == list(plain.weights)
        assert plain.report == "plain PyTorch"
        weights = [name for name, value in self.weights.items() if not same_bits(value, plain.weights[name])]
        return weights + [line for line in self.losses if line not in plain.losses]

    def count(self, pattern: str) -> int:
        """The number that the report has where `pattern` has its group."""
        found = re.search(pattern, self.report)
        assert found is not None, self.report
        return int(found[1])
