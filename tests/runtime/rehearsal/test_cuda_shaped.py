"""A rehearsal on CPU tensors saves what CUDA's operations save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.stage import stage

BF16 = torch.bfloat16
BATCH, HEADS, LENGTH, SIZE = 2, 4, 100, 64


def saved_by(run: Callable[[], torch.Tensor], card: str = "h100") -> tuple[str, dict[tuple[int, ...], int]]:
    """The node of the result, and the bytes of each storage that was saved, by the shape of the tensor."""
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with VirtualMachine(card) as machine, stage(machine):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            out = run()
        assert out.grad_fn is not None
        name = out.grad_fn.name()
        out.float().sum().backward()
        return name, {tuple(one.shape): one.untyped_storage().nbytes() for one in found.values()}


def attention(dtype: torch.dtype, size: int = SIZE, length: int = LENGTH, mask: bool = False, **options: float) -> str:
    return saved_by(lambda: attended(dtype, size, length, mask, **options))[0]


def attended(
    dtype: torch.dtype, size: int = SIZE, length: int = LENGTH, mask: bool = False, **options: float
) -> torch.Tensor:
    query, key, value = (torch.randn(BATCH, HEADS, length, size, dtype=dtype, requires_grad=True) for _ in range(3))
    chosen = torch.ones(length, length, dtype=torch.bool) if mask else None
    return functional.scaled_dot_product_attention(query, key, value, chosen, **options)  # type: ignore[arg-type]


def test_the_attention_is_that_of_the_card() -> None:
    flash, efficient = "ScaledDotProductFlashAttentionBackward0", "ScaledDotProductEfficientAttentionBackward0"
    assert attention(BF16) == attention(BF16, dropout_p=0.1) == attention(torch.float16) == flash
    assert attention(torch.float32) == attention(BF16, mask=True) == efficient
    assert attention(torch.float32, size=30) not in (flash, efficient), "its heads are not aligned"
    assert attention(torch.float64) not in (flash, efficient), "no kernel has doubles"
    assert saved_by(lambda: attended(torch.float16), "v100-16")[0] == efficient
    assert saved_by(lambda: attended(BF16), "v100-16")[0] not in (flash, efficient)
    assert saved_by(lambda: attended(torch.float32), "titan-x")[0] == efficient


def test_an_attention_that_the_program_switched_off_is_not_chosen() -> None:
    flash, efficient = "ScaledDotProductFlashAttentionBackward0", "ScaledDotProductEfficientAttentionBackward0"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention(BF16) not in (flash, efficient)
        assert attention(torch.float32) not in (flash, efficient)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert attention(BF16) == efficient
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert attention(BF16) == flash, "cuDNN's saves as many bytes"


def test_attention_saves_as_much_as_on_the_card() -> None:
    heads = BATCH * HEADS
    _, flash = saved_by(lambda: attended(BF16))
    assert flash[BATCH, HEADS, LENGTH] == heads * LENGTH * 4, "the log of each row's sum, in float32"
    _, efficient = saved_by(lambda: attended(torch.float32))
    assert efficient[BATCH, HEADS, 128] == heads * 128 * 4, "the same, in whole blocks of 32 rows"
    _, masked = saved_by(lambda: attended(torch.float32, mask=True))
    assert masked[BATCH, HEADS, LENGTH, LENGTH] == LENGTH * 104 * 4, "numbers, in rows that are padded to 8"
    _, odd = saved_by(lambda: attended(BF16, size=30))
    assert odd[BATCH, HEADS, LENGTH, 32] == heads * LENGTH * 32 * 2, "flash attention pads the heads to 8"


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_fused_rms_norm_saves_its_input_and_one_statistic(dtype: torch.dtype) -> None:
    def run() -> torch.Tensor:
        norm = nn.RMSNorm(512, eps=1e-6, dtype=dtype)
        return norm(torch.randn(32, 512, dtype=dtype, requires_grad=True))  # type: ignore[no-any-return]

    _, saved = saved_by(run)
    assert saved == {(32, 512): 32 * 512 * dtype.itemsize, (512,): 512 * dtype.itemsize, (32, 1): 32 * 4}


def test_a_layer_norm_has_statistics_in_float32() -> None:
    found: list[torch.dtype] = []
    with VirtualMachine("h100") as machine, stage(machine):
        x = torch.randn(32, 512, dtype=BF16, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: found.append(one.dtype) or one, lambda one: one)
        with hooks:
            nn.LayerNorm(512, dtype=BF16)(x)
    assert found.count(torch.float32) == 2, "mean and inverse deviation"


def test_a_dropout_in_evaluation_keeps_its_input_and_one_in_place_writes_to_it() -> None:
    with VirtualMachine("h100") as machine, stage(machine):
        x = torch.randn(64)
        assert functional.dropout(x, 0.5, training=False) is x
        assert x._version == 0
        assert functional.dropout(x, 0.5, inplace=True) is x
        assert x._version == 1
