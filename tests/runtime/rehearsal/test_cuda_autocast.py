"""Mixed precision in a rehearsal: operations have the dtypes of CUDA's autocast. Then the CPU has its own again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import vdnn
from vdnn.errors import VdnnError
from vdnn.hardware import load_profile
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal import cuda_autocast
from vdnn.runtime.rehearsal.gpu_calls import gpu_calls
from vdnn.runtime.rehearsal.rehearsal import rehearse
from vdnn.runtime.rehearsal.stage import stage
from vdnn.runtime.rehearsal.subjects import Staged, Subject

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def on_stage() -> Iterator[None]:
    with VirtualMachine("h100") as machine, stage(machine):
        yield


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def test_the_table_has_the_operations_that_torch_lists_for_cuda() -> None:
    tables: list[Any] = [
        cuda_autocast.LOWER_PRECISION,
        cuda_autocast.FLOAT32,
        cuda_autocast.FLOAT32_RESULT,
        frozenset(cuda_autocast.FLOAT32_RESULT_BY_OVERLOAD),
        cuda_autocast.WIDEST,
        cuda_autocast.REFUSED,
    ]
    known = frozenset().union(*tables)
    assert len(known) == sum(map(len, tables))  # each is in one table
    listed = cuda_autocast.listed_for_cuda() - {"aten::_cudnn_rnn"}  # built for CUDA; no rehearsal calls it
    if torch.__version__ < "2.13":
        listed = {one for one in listed if "imname" not in one and "names" not in one}  # of named axes
    since = {"aten::rms_norm": "2.12", "aten::linalg_matrix_sqrth": "2.15"}
    assert listed <= known
    assert known - listed == {name for name, version in since.items() if torch.__version__ < version}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("call", "is_float32"),
    [
        (lambda one: torch.exp(one), True),
        (lambda one: one.pow(2), True),
        (lambda one: torch.softmax(one, -1), True),
        (lambda one: torch.softmax(one, -1, dtype=one.dtype), False),
        (lambda one: functional.log_softmax(one, -1), True),
        (lambda one: one.sum(), True),
        (lambda one: one.sum(0), True),
        (lambda one: one.sum(0, dtype=one.dtype), False),
        (lambda one: one.norm(2), True),
        (lambda one: one.norm(2, 1), True),
        (lambda one: one.norm(2, 1, True), True),
        (lambda one: functional.layer_norm(one, (8,)), True),
        (lambda one: functional.group_norm(one.view(1, 8, 8), 2), True),
        (lambda one: functional.interpolate(one.view(1, 1, 8, 8), scale_factor=2), True),
        (lambda one: functional.gelu(one), False),
        (lambda one: one.mean(), False),
        (lambda one: functional.avg_pool3d(one.view(1, 1, 2, 4, 8), 2), False),  # float32 on a CPU
        (lambda one: torch.cat([one, one]), False),
        (lambda one: one @ one.float(), False),
        (lambda one: torch.addcmul(one, one, one.float()), True),
        (lambda one: torch.addcmul(one, one, one), False),
        (lambda one: torch.mv(one.float(), one[0].float()), False),
    ],
)
def test_an_operation_has_the_dtype_that_it_has_on_cuda(
    on_stage: None, dtype: torch.dtype, call: Callable[[torch.Tensor], torch.Tensor], is_float32: bool
) -> None:
    with torch.autocast("cuda", dtype):
        assert call(half(8, 8, dtype=dtype)).dtype is (torch.float32 if is_float32 else dtype)


def test_a_region_without_autocast_casts_nothing(on_stage: None) -> None:
    with torch.autocast("cuda", torch.bfloat16), torch.autocast("cuda", enabled=False):
        assert torch.exp(half(2)).dtype is torch.bfloat16


def test_double_precision_stays(on_stage: None) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.exp(torch.empty(2, dtype=torch.float64)).dtype is torch.float64
        assert torch.softmax(torch.empty(2, 2, dtype=torch.float64), 1).dtype is torch.float64


def test_a_composite_operation_casts_inside(on_stage: None) -> None:
    logits = half(4, 10).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        loss = functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
    assert loss.dtype is torch.float32


def test_a_weight_is_cast_once_in_a_region(on_stage: None) -> None:
    weight = nn.Parameter(torch.empty(8, 8))
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.bfloat16 and tensor.shape == weight.shape:
            saved.append(id(tensor.untyped_storage()))
        return tensor

    vector = half(8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one), torch.autocast("cuda", torch.bfloat16):
        kept = torch.mv(weight, vector), torch.mv(weight, vector)
    assert len(saved) == 2
    assert len(set(saved)) == 1
    del kept


def test_attention_is_chosen_by_the_dtype_of_autocast(on_stage: None) -> None:
    query = torch.empty(1, 2, 16, 64, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out = functional.scaled_dot_product_attention(query, query, query)
    assert out.dtype is torch.bfloat16
    assert out.grad_fn is not None
    assert "FlashAttention" in out.grad_fn.name()


def test_batch_norm_of_halves_has_statistics_in_float32(on_stage: None) -> None:
    shapes: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (3,):
            shapes.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        kept = nn.BatchNorm2d(3)(half(2, 3, 4, 4).requires_grad_())
    assert set(shapes) == {torch.float32}
    del kept


def test_what_cuda_refuses_is_refused(on_stage: None) -> None:
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        functional.binary_cross_entropy(torch.empty(2), torch.empty(2))


def test_the_autocast_of_a_cpu_is_its_own_again_after_a_rehearsal() -> None:
    one = torch.ones(4, dtype=torch.bfloat16)

    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            return [torch.exp(one).dtype, functional.mse_loss(one, one).dtype, torch.softmax(one, 0).dtype]

    before = dtypes()
    with gpu_calls():
        assert dtypes() == [torch.float32] * 3
    assert dtypes() == before == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("by", ["autocast", "the model"])
def test_bfloat16_is_refused_for_a_card_that_does_not_compute_in_it(by: str) -> None:
    def step(batch: int) -> Any:
        model, data = nn.Linear(64, 64), torch.empty(batch, 64)
        if by == "the model":
            return model.to(torch.bfloat16), data.to(torch.bfloat16)

        def loss(out: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return (out @ torch.empty(64, 64, requires_grad=True)).sum()

        return model, data, loss

    for card in ("t4", "v100-16"):
        with pytest.raises(VdnnError) as refused:
            vdnn.plan(step, 8192, hardware=card)
        assert f"{card} does not compute in bfloat16, which the step asks for: use float16" in str(refused.value)
    assert vdnn.plan(step, 8192, hardware="a10g").hardware == "a10g"


def test_float16_is_planned_for_a_t4() -> None:
    def step(batch: int) -> Any:
        return nn.Linear(64, 64).to(torch.float16), torch.empty(batch, 64, dtype=torch.float16)

    assert vdnn.plan(step, 8192, hardware="t4").hardware == "t4"


@pytest.mark.parametrize(
    ("norm", "operation"),
    [
        (lambda: nn.LayerNorm(1024), "layer_norm"),
        (lambda: nn.RMSNorm(1024), "layer_norm"),  # a rehearsal runs a layer norm instead, which saves as much
        (lambda: nn.GroupNorm(4, 1024), "group_norm"),
        (lambda: nn.BatchNorm1d(1024), "batch_norm"),
    ],
)
def test_norms_are_recomputed_under_autocast(norm: Callable[[], nn.Module], operation: str) -> None:
    """The call of a norm has facts that its node does not save. Between that call and the node a rehearsal casts."""
    if isinstance(norm(), nn.RMSNorm) and torch.__version__ < "2.12":
        pytest.skip("CUDA's autocast of this torch does not cast RMS norms")

    def staged() -> Staged:
        model = nn.Sequential(nn.Linear(1024, 1024), norm(), nn.Linear(1024, 1024))
        inputs = torch.empty(2048, 1024)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(inputs).float().sum()
            loss.backward()

        return Staged(model, step, (inputs,))

    recording = rehearse(Subject(staged), load_profile("h100")).recording
    recomputes = [one.recompute.operation for one in recording.lifetimes if one.recompute is not None]
    assert any(operation in one for one in recomputes), recomputes
