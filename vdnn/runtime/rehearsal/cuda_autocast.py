"""Makes mixed precision on the CPU tensors of a rehearsal cast as CUDA's autocast does.

Each device type has lists of its own. CUDA's run softmax, norms, sums, powers and exponentials in float32, which those
of a CPU leave in the lower precision; a CPU's name operations that CUDA's do not. The tables below are torch's
(aten/src/ATen/autocast_mode.h, "AT_FORALL_LOWER_PRECISION_FP" and what follows; docs.pytorch.org/docs/stable/amp.html,
"CUDA Op-Specific Behavior"), and a test compares their names with those that torch registers for CUDA.

The casts are kernels in torch's dispatcher, because composite operations call listed ones: cross_entropy calls
log_softmax. They stand in for the kernels of the CPU's autocast for the whole process, from `install()` to `remove()`.
Recurrent layers are not cast as cuDNN's are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_HERE = "AutocastCPU"
_CUDNN = frozenset({"aten::cudnn_convolution", "aten::cudnn_convolution_transpose"})  # for CUDA tensors alone


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


LOWER_PRECISION = _names(
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
)
FLOAT32 = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth"
)
# The result is float32 unless the call names a dtype. The input stays as it is.
FLOAT32_RESULT = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
# The same, by the overload that takes a dtype.
FLOAT32_RESULT_BY_OVERLOAD = {
    "aten::norm.Scalar": "aten::norm.ScalarOpt_dtype",
    "aten::norm.ScalarOpt_dim": "aten::norm.ScalarOpt_dim_dtype",
}
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
REFUSED = _names("binary_cross_entropy")


class CudaAutocast:
    """The casts of CUDA's autocast, while they are installed."""

    def __init__(self) -> None:
        self._library: Any = None
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, with the weight to keep the id
        self._clear_cache = torch.clear_autocast_cache

    def install(self) -> None:
        """Installs the casts if they are not installed."""
        if self._library is not None:
            return
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that kernels are replaced
            for name, kernel in self._kernels().items():
                self._library.impl(name, kernel, _HERE, allow_override=True)
        self._clear_cache = torch.clear_autocast_cache
        torch.clear_autocast_cache = self._clear  # autocast calls it at the end of the outermost region

    def remove(self) -> None:
        """Gives the CPU's autocast its own kernels back."""
        if self._library is not None:
            torch.clear_autocast_cache = self._clear_cache
            self._library._destroy()
            self._library = None
            self._weights.clear()

    def _clear(self) -> None:
        self._weights.clear()
        self._clear_cache()

    def _kernels(self) -> dict[str, Callable[..., Any]]:
        of_the_cpu, of_cuda = _registered(_HERE), listed_for_cuda()
        kernels: dict[str, Callable[..., Any]] = dict.fromkeys(of_the_cpu - of_cuda, torch.library.fallthrough_kernel)
        for name in of_cuda:
            if not (name in LOWER_PRECISION and name in of_the_cpu):  # there the CPU's kernel does the same
                kernels[name] = self._kernel(name)
        return kernels

    def _kernel(self, name: str) -> Callable[..., Any]:
        run = below_autocast(_overload(name))
        if name in LOWER_PRECISION:
            return lambda *args, **kwargs: run(*self._lowered(args), **self._lowered(kwargs))
        if name in FLOAT32:
            return lambda *args, **kwargs: run(*as_float32(args), **as_float32(kwargs))
        if name in FLOAT32_RESULT:
            return _with_result(run, _position_of_dtype(name))
        if name in FLOAT32_RESULT_BY_OVERLOAD:
            return _with_last_dtype(below_autocast(_overload(FLOAT32_RESULT_BY_OVERLOAD[name])))
        if name in WIDEST:
            return lambda *args, **kwargs: run(*self._widened(args, kwargs), **self._widened(kwargs, args))
        if name in REFUSED:
            return _refuse
        return run  # a newer torch has it in its lists

    def _lowered(self, tree: Any) -> Any:
        return tree_map_only(torch.Tensor, self._lower, tree)

    def _lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `cached_cast` in autocast_mode.cpp: a weight is cast once in a region."""
        dtype = torch.get_autocast_dtype("cpu")
        if not is_cast(tensor) or tensor.dtype is dtype:
            return tensor
        is_weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not is_weight or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(dtype)
        return self._weights[id(tensor)][1]

    def _widened(self, tree: Any, others: Any) -> Any:
        floats = [one for one in tree_leaves((tree, others)) if isinstance(one, torch.Tensor) and is_cast(one)]
        has_float32 = any(one.dtype is torch.float32 for one in floats)
        return as_float32(tree) if has_float32 else self._lowered(tree)


def listed_for_cuda() -> frozenset[str]:
    """The operations of this version of torch that CUDA's autocast casts."""
    return _registered("AutocastCUDA") - _CUDNN


def _registered(key: str) -> frozenset[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name for name in names if name.startswith("aten::"))  # torchvision casts alike on both


def is_cast(tensor: torch.Tensor) -> bool:
    """Autocast leaves numbers of double precision and whole numbers as they are."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def as_float32(tree: Any) -> Any:
    """The tree with its tensors in float32, those that autocast casts."""
    return tree_map_only(torch.Tensor, lambda one: one.to(torch.float32) if is_cast(one) else one, tree)


def _overload(name: str) -> Any:
    operation, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, operation), overload or "default")


def below_autocast(operation: Any) -> Callable[..., Any]:
    """The operation, without casts of its arguments. An overload is called without a frame of torch's own, which would
    hide from recomputes in which call of a norm the operation runs."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _HERE))
    call = getattr(operation, "_op", operation)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return call(*args, **kwargs)

    return run


def _position_of_dtype(name: str) -> int | None:
    """The position of the argument `dtype`, or None if it is passed by its name."""
    arguments = _overload(name)._schema.arguments
    return next((i for i, one in enumerate(arguments) if one.name == "dtype" and not one.kwarg_only), None)


def _with_result(run: Callable[..., Any], position: int | None) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = kwargs.get("dtype") if position is None or len(args) <= position else args[position]
        if named is not None or not is_cast(args[0]):
            return run(*args, **kwargs)
        if position is not None and len(args) > position:
            return run(*args[:position], torch.float32, *args[position + 1 :], **kwargs)
        return run(*args, **{**kwargs, "dtype": torch.float32})

    return kernel


def _with_last_dtype(run: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(tensor: torch.Tensor, p: Any = 2, *args: Any, **kwargs: Any) -> Any:
        if not args and "dim" not in kwargs:
            return run(tensor, p, dtype=_result_dtype(tensor))
        if len(args) < 2 and "keepdim" not in kwargs:
            kwargs = {**kwargs, "keepdim": False}
        return run(tensor, p, *args, **kwargs, dtype=_result_dtype(tensor))

    return kernel


def _result_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if is_cast(tensor) else tensor.dtype


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are refused under autocast on a GPU. "
        "Use binary_cross_entropy_with_logits or BCEWithLogitsLoss."
    )
