"""Lightning's Trainer, the real one, on the CPU: one callback, and the same weights bit for bit."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import vdnn
from tests.runtime.rigs.side_by_side import same_bits
from vdnn.errors import CombinationError, VdnnError

if TYPE_CHECKING:
    from vdnn.integrations.lightning import LightningOffloadCallback
elif not find_spec("lightning"):
    pytest.skip("pip install 'vdnn[lightning]'", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Imports what takes three seconds here, and not in every collection."""
    global LightningOffloadCallback, Regression, STEPS, fit_plainly, fit_with, quiet
    from tests.integrations.lightning_fits import STEPS, Regression, fit_plainly, fit_with, quiet
    from vdnn.integrations.lightning import LightningOffloadCallback


NARROW = {"device": "sim", "min_bytes": 0, "limits": vdnn.Limits(offload_window="4KiB", reload_window="4KiB")}
STATE = {**NARROW, "offload_optimizer": True}
WHOLE = {**STATE, "parameters": "all", "gradients": True}


@pytest.mark.parametrize("given", [NARROW, STATE, WHOLE], ids=["activations", "state", "whole"])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulating", "bf16"],
)
def test_lightning_trains_the_same(given: dict[str, Any], tmp_path: Path, options: dict[str, Any]) -> None:
    callback = LightningOffloadCallback(**given)
    plain = fit_plainly(Regression(), **quiet(tmp_path, **options))
    ours = fit_with(callback, Regression(), **quiet(tmp_path, **options))
    assert all(map(same_bits, plain, ours))
    session = callback.session
    assert session is not None
    assert session.counters.storages, callback.report
    assert session.num_steps == STEPS
    assert ("optimizer state of AdamW" in callback.report) == (given is not NARROW)
    assert ("  parameters: " in callback.report) == (given is WHOLE)
    assert " 0 B on the host" not in callback.report


def test_lightning_follows_a_plan(tmp_path: Path) -> None:
    plain = fit_plainly(Regression(), **quiet(tmp_path))
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        callback = LightningOffloadCallback(policy="prefix-cut", budget="min", device=machine, min_bytes=0)
        ours = fit_with(callback, Regression(), **quiet(tmp_path))
    assert all(map(same_bits, plain, ours))
    assert callback.session is not None
    assert callback.session.plan is not None
    assert callback.session.plan.offloaded_bytes


def test_the_callback_costs_one_line() -> None:
    plain, ours = (inspect.getsource(one).splitlines()[1:] for one in (fit_plainly, fit_with))
    assert len(ours) == len(plain) + 1


def test_a_fit_that_raises_leaves_the_session(tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            loss = super().training_step(x, index)
            if index == 2:
                raise RuntimeError("enough")
            return loss

    with pytest.raises(RuntimeError, match="enough"):
        fit_with(LightningOffloadCallback(device="sim", min_bytes=0), Failing(), **quiet(tmp_path))
    with vdnn.offload(device="sim"):
        pass


def test_a_model_on_the_cpu_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(CombinationError, match="vdnn.offload does not work with a model on cpu: .* device='sim'"):
        fit_with(LightningOffloadCallback(), Regression(), **quiet(tmp_path))


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy"])
def test_a_strategy_that_was_never_tested_is_refused(name: str) -> None:
    class Trainer:
        strategy = type(name, (), {})()

    with pytest.raises(CombinationError, match=f"does not work with Lightning's {name}: .*ddp"):
        LightningOffloadCallback(device="sim").setup(Trainer(), Regression(), "fit")


def test_a_module_compiled_with_cuda_graphs_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Lightning replaces the module's training step by the compiled one."""
    steps: list[int] = []

    class Counting(Regression):
        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            steps.append(index)
            return super().training_step(x, index)

        validation_step = training_step

    compiled = torch.compile(Counting(), mode="reduce-overhead")
    with pytest.raises(CombinationError, match="does not work with the CUDA graphs of torch.compile around the Count"):
        fit_with(LightningOffloadCallback(device="sim", min_bytes=0), compiled, **quiet(tmp_path))
    assert steps == []


def test_the_name_that_the_callback_had_is_refused_with_the_new_one() -> None:
    with pytest.raises(VdnnError, match=r"OffloadCallback is now called LightningOffloadCallback\."):
        from vdnn.integrations.lightning import OffloadCallback  # noqa: F401
