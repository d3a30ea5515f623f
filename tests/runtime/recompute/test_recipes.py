"""Each entry of the table recomputes its tensor bit for bit, through find_recipe, in three dtypes and two layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.runtime.recompute.saving import Saving
from vdnn.runtime.recompute import observe, recipe_names
from vdnn.runtime.recompute.operation import Node
from vdnn.runtime.recompute.table import operation_of

Tensor = torch.Tensor


class GroupNorm(torch.nn.Module):
    """In newer versions of torch the node does not save eps, and only calls of modules are watched."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return functional.group_norm(x, 4, c, c.neg(), 1e-3)


# By node: functions that compute it from x (2, 8, 6, 6), a vector of its channels and a vector of its columns.
CASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ReluBackward0": lambda x, c, w: x.relu(),
    "LeakyReluBackward0": lambda x, c, w: functional.leaky_relu(x, 0.2),
    "HardtanhBackward0": lambda x, c, w: functional.relu6(x),
    "ClampBackward1": lambda x, c, w: x.clamp(-0.5, 0.7),
    "ClampMinBackward0": lambda x, c, w: x.clamp_min(0.1),
    "EluBackward0": lambda x, c, w: functional.selu(x),
    "GeluBackward0": lambda x, c, w: functional.gelu(x, approximate="tanh"),
    "SiluBackward0": lambda x, c, w: functional.silu(x),
    "MishBackward0": lambda x, c, w: functional.mish(x),
    "HardswishBackward0": lambda x, c, w: functional.hardswish(x),
    "HardsigmoidBackward0": lambda x, c, w: functional.hardsigmoid(x),
    "SoftplusBackward0": lambda x, c, w: functional.softplus(x, 2.0, 3.0),
    "LogSigmoidBackward0": lambda x, c, w: functional.logsigmoid(x),
    "GluBackward0": lambda x, c, w: functional.glu(x, 1),
    "PreluKernelBackward0": lambda x, c, w: torch.prelu(x, c),
    "AddBackward0": lambda x, c, w: torch.add(x, w, alpha=3),
    "SubBackward0": lambda x, c, w: torch.sub(x, w, alpha=2),
    "RsubBackward0": lambda x, c, w: torch.rsub(x, w, alpha=2),
    "MulBackward0": lambda x, c, w: x * 2.1,
    "DivBackward0": lambda x, c, w: x / (w.abs() + w.abs()),
    "DivBackward1": lambda x, c, w: torch.ops.aten.div.Scalar(x, 0.3),
    "MulBackward1": lambda x, c, w: torch.ops.aten.mul.Scalar(x.float(), 0.3),
    "SafeSoftmaxBackward0": lambda x, c, w: torch.ops.aten._safe_softmax(x, -1),
    "WeightNormInterfaceBackward0": lambda x, c, w: torch._weight_norm(x.float(), x.float()[:, :1, :1, :1], 0),
    "PowBackward0": lambda x, c, w: x**3,
    "PowBackward1": lambda x, c, w: x.abs() ** w,
    "PowBackward2": lambda x, c, w: 2**x,
    "AddcmulBackward0": lambda x, c, w: torch.addcmul(x, x, w, value=0.3),
    "LerpBackward0": lambda x, c, w: torch.lerp(x, x.neg(), 0.3),
    "WhereBackward0": lambda x, c, w: torch.where(x.detach() > 0, x, x.exp()),
    "NativeDropoutBackward0": lambda x, c, w: torch.native_dropout(x, 0.3, True)[0],
    "ToCopyBackward0": lambda x, c, w: x.to(torch.float64),
    "CloneBackward0": lambda x, c, w: x.clone(),
    "ViewBackward0": lambda x, c, w: x[0].exp().view(2, -1),
    "UnsafeViewBackward0": lambda x, c, w: x.transpose(1, 2).reshape(2, -1),
    "TBackward0": lambda x, c, w: x[0, 0].exp().t(),
    "TransposeBackward0": lambda x, c, w: x.exp().transpose(1, 2),
    "PermuteBackward0": lambda x, c, w: x.exp().permute(0, 2, 3, 1),
    "ExpandBackward0": lambda x, c, w: x[:, :1].expand(2, 8, 6, 6) + x,
    "UnsqueezeBackward0": lambda x, c, w: x.exp().unsqueeze(1),
    "SqueezeBackward0": lambda x, c, w: x[:1].exp().squeeze(),
    "SqueezeBackward1": lambda x, c, w: x[:1].exp().squeeze(0),
    "SqueezeBackward2": lambda x, c, w: x[:1, :1].exp().squeeze((0, 1)),
    "SelectBackward0": lambda x, c, w: x[:, 1].exp(),
    "SliceBackward0": lambda x, c, w: x[:, 1:7:2].exp(),
    "SplitBackward0": lambda x, c, w: x.split(4, 1)[1].exp(),
    "UnsafeSplitBackward0": lambda x, c, w: torch.unsafe_split(x.exp(), 4, 1)[1].exp(),
    "SplitWithSizesBackward0": lambda x, c, w: x.split([3, 5], 1)[1].exp(),
    "UnbindBackward0": lambda x, c, w: x.unbind(1)[3].exp(),
    "CatBackward0": lambda x, c, w: torch.cat([x, x.exp(), x], 1),
    "StackBackward0": lambda x, c, w: torch.stack([x, x.exp()], 2),
    "RepeatBackward0": lambda x, c, w: x.repeat(2, 1, 3, 1),
    "RollBackward0": lambda x, c, w: x.roll((1, 2), (2, 3)),
    "SoftmaxBackward0": lambda x, c, w: x.softmax(1),
    "LogSoftmaxBackward0": lambda x, c, w: x.log_softmax(-1),
    "MeanBackward0": lambda x, c, w: x.mean(),
    "MeanBackward1": lambda x, c, w: x.mean((1, -1), keepdim=True),
    "SumBackward0": lambda x, c, w: x.sum(),
    "SumBackward1": lambda x, c, w: x.sum((-1, 0)),
    "MaxPool2DWithIndicesBackward0": lambda x, c, w: functional.max_pool2d(x, 3, 2, 1),
    "MaxPool3DWithIndicesBackward0": lambda x, c, w: functional.max_pool3d(x, 2),
    "AvgPool2DBackward0": lambda x, c, w: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "AvgPool3DBackward0": lambda x, c, w: functional.avg_pool3d(x, 2, ceil_mode=True),
    "AdaptiveAvgPool2DBackward0": lambda x, c, w: functional.adaptive_avg_pool2d(x, (4, 3)),
    "AdaptiveAvgPool3DBackward0": lambda x, c, w: functional.adaptive_avg_pool3d(x, (4, 3, 2)),
    "UpsampleNearest1DBackward0": lambda x, c, w: functional.interpolate(x[0], scale_factor=1.5),
    "UpsampleNearest2DBackward0": lambda x, c, w: functional.interpolate(x, scale_factor=2),
    "UpsampleNearest3DBackward0": lambda x, c, w: functional.interpolate(x[None], size=(9, 7, 8)),
    "UpsampleNearestExact1DBackward0": lambda x, c, w: functional.interpolate(x[0], 9, mode="nearest-exact"),
    "UpsampleNearestExact2DBackward0": lambda x, c, w: functional.interpolate(x, 9, mode="nearest-exact"),
    "UpsampleNearestExact3DBackward0": lambda x, c, w: functional.interpolate(x[None], 9, mode="nearest-exact"),
    "UpsampleLinear1DBackward0": lambda x, c, w: functional.interpolate(x[0], 9, mode="linear"),
    "UpsampleBilinear2DBackward0": lambda x, c, w: functional.interpolate(x, 9, mode="bilinear", align_corners=True),
    "UpsampleBicubic2DBackward0": lambda x, c, w: functional.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "UpsampleTrilinear3DBackward0": lambda x, c, w: functional.interpolate(x[None], 9, mode="trilinear"),
    "NativeBatchNormBackward0": lambda x, c, w: functional.batch_norm(x, None, None, c, c.neg(), True),
    "NativeGroupNormBackward0": lambda x, c, w: GroupNorm()(x, c),
    "ConvolutionBackward0": lambda x, c, w: functional.conv2d(x, x[:, :, :3, :3].contiguous(), c[:2], padding=1),
    "MmBackward0": lambda x, c, w: x[0, 0] @ x[0, 1],
    "BmmBackward0": lambda x, c, w: torch.bmm(x[0], x[1]),
    "AddmmBackward0": lambda x, c, w: torch.addmm(w, x[0, 0], x[0, 1], beta=0.5, alpha=2),
    "BaddbmmBackward0": lambda x, c, w: torch.baddbmm(x[1], x[0], x[1], beta=0.5, alpha=2),
    "EmbeddingBackward0": lambda x, c, w: functional.embedding(torch.tensor([1, 0, 3]), x.reshape(-1, 6)),
    "ScaledDotProductFlashAttentionForCpuBackward0": lambda x, c, w: functional.scaled_dot_product_attention(
        *(one.contiguous().float() for one in (x, x.exp(), x.neg())), is_causal=True
    ),
}
CASES |= {
    f"{name}Backward0": lambda x, c, w, name=name: getattr(torch, name.lower())(x.sigmoid())
    for name in (
        *("Neg", "Reciprocal", "Rsqrt", "Sqrt", "Exp", "Expm1", "Log", "Log2", "Log10", "Log1P", "Exp2", "Abs", "Sgn"),
        *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh", "Sigmoid", "Erf", "Erfc"),
    )
}
# These are proven at run time only: they need other hardware, or facts of a module (test_norms).
ELSEWHERE = {
    "AliasBackward0",
    "ReshapeAliasBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    "NativeLayerNormBackward0",
    "FusedRmsNormBackward0",
    "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
}


def test_every_entry_of_the_table_has_a_case() -> None:
    assert set(recipe_names()) == CASES.keys() | ELSEWHERE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("node", CASES)
def test_it_recomputes_its_tensor_bit_for_bit(node: str, layout: torch.memory_format, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, c, w = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((2, 8, 6, 6), (8,), (6,))
    )
    x = x.detach().to(memory_format=layout).requires_grad_()
    for leaf in (x, c, w):
        observe(leaf)
    with Saving() as saving:
        try:
            made = CASES[node](x, c, w)
        except RuntimeError as refusal:
            pytest.skip(f"torch refuses: {refusal}")
        made * torch.ones((), dtype=made.dtype, requires_grad=True)
    assert saving.failures == []
    operation = operation_of(_node_above(made, node))
    assert operation is not None
    assert operation.name in saving.operations


def _node_above(tensor: Tensor, name: str) -> Node:
    near = [tensor.grad_fn]
    while near:
        node = near.pop()
        if node is not None:
            if node.name() == name:
                return node
            near += [one for one, _ in node.next_functions]
    raise AssertionError(f"the case makes no {name}, but {tensor.grad_fn}")
