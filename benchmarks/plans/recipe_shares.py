"""Computes the share of a step's saved bytes that must be kept or offloaded if cheap recipes recompute the rest.

    python -m benchmarks.plans.recipe_shares [--models resnet50 ...] [--batch 8] [--remaining]

The choice is greedy, in the order of the saves: a storage is discarded if a cheap recipe recomputes it with a chain of
at most so many operations, counted through storages that were discarded before it. Boolean masks that are kept count an
eighth, because the lossless codec packs them. Parameters do not count. Autocast's casts of weights count as saved bytes
and are recomputed from the parameter; the last column omits them on both sides. Nothing is computed: models run on
tensors without data, with the shapes that CUDA saves and those that the CPU saves.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models.bert import bert_large
from benchmarks.models.densenet import densenet121
from benchmarks.models.gpt import GptShape, gpt
from benchmarks.models.resnet import resnet50
from benchmarks.models.vgg import vgg16
from benchmarks.models.vit import vit_large
from benchmarks.models.workload import Workload
from benchmarks.progress import Progress
from benchmarks.text_table import render_table
from vdnn.runtime.recompute import (
    Recipe,
    UnknownLayoutError,
    find_recipe,
    note_saved,
    observe_flags,
    observe_flags_at_save,
    observe_parameters,
    owner_recipe,
)
from vdnn.runtime.recompute.given import geometry_of
from vdnn.runtime.recompute.node_notes import Packed
from vdnn.runtime.rehearsal.cuda_shaped import CudaShaped
from vdnn.runtime.storage.kept import KeptTensor, pack_kept, unpack_kept
from vdnn.runtime.storage.packed_view import PackedView

DEPTHS = (4, 8)
_MIB = 1 << 20
_SHOWN = 8
_VIEWS = 4  # how many views to pass through when naming the producer of kept bytes
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure. `make(batch)` gives the model and a function that returns the loss."""

    title: str
    make: Callable[[int], tuple[torch.nn.Module, Callable[[], torch.Tensor]]]
    batch: int
    autocast: bool


@dataclass(slots=True, eq=False)
class Storage:
    """A saved storage. `depth` is the length of the chain of operations that recomputes it, once it is discarded."""

    nbytes: int
    kept_bytes: int
    producer: str
    is_weight_cast: bool
    recipe: Recipe | None = None
    depth: int = 0


class View(PackedView):
    """A save with the attributes of a managed save that recipes read."""

    def __init__(self, storage: Storage, tensor: torch.Tensor) -> None:
        self.storage = storage
        self.geometry = (tensor.dtype, tensor.size(), tensor.stride())
        address, witness = tensor.untyped_storage()._cdata, tensor.detach()
        self.managed: Any = SimpleNamespace(witness=witness, version=witness._version, native_address=address)


@dataclass(slots=True)
class GreedyHooks:
    """Hooks of this thread that decide about each storage when it is first saved."""

    max_depth: int
    parameters: set[int]  # native addresses of storages
    storages: list[Storage] = field(default_factory=list)
    _known: dict[int, View] = field(default_factory=dict)
    _ownerless: list[View] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> KeptTensor | View:
        observe_flags_at_save(tensor)
        address = tensor.untyped_storage()._cdata
        if address in self.parameters or (tensor.is_leaf and tensor.requires_grad):
            return pack_kept(tensor)
        node = tensor.grad_fn
        for one in list(self._ownerless):
            recipe = owner_recipe(one, node, self.unpack)
            if recipe is not None:
                self._decide(one.storage, recipe)
                self._ownerless.remove(one)
        known = self._known.get(address)
        is_new = known is None or known.managed.version != tensor._version
        view = View(_storage_of(tensor) if is_new or known is None else known.storage, tensor)
        if is_new:
            self._known[address] = view
            self.storages.append(view.storage)
            self._look(view, tensor, node)
        if node is not None:
            note_saved(node, tensor.output_nr, view)
        return view

    def unpack(self, packed: Packed) -> torch.Tensor:
        raise AssertionError("no backward is run")

    def _look(self, view: View, tensor: torch.Tensor, node: Any) -> None:
        if node is not None:
            recipe = find_recipe(tensor, node, self.unpack, max_depth=self.max_depth)
            if recipe is not None:
                self._decide(view.storage, recipe)
        elif not tensor.is_floating_point():
            self._ownerless.append(view)

    def _decide(self, storage: Storage, recipe: Recipe) -> None:
        through_operands = [
            operand_depth + operand.storage.depth
            for operand_depth, operand in zip(recipe.template.operand_depths, recipe.operands, strict=True)
            if isinstance(operand, View)
        ]
        depth = max([recipe.template.depth, *through_operands])
        if depth <= self.max_depth and _can_be_followed(recipe):
            storage.recipe, storage.depth = recipe, depth


def _can_be_followed(recipe: Recipe) -> bool:
    """True if the layouts of all values that the recipe reads are known. Without data, running it tests only that."""
    try:
        recipe.recompute(_without_data)
    except UnknownLayoutError:
        return False
    return True


def _without_data(packed: Packed) -> torch.Tensor:
    if isinstance(packed, tuple):
        return unpack_kept(packed)
    dtype, size, stride = geometry_of(packed)
    return torch.empty_strided(size, stride, dtype=dtype)


def _storage_of(tensor: torch.Tensor) -> Storage:
    nbytes = tensor.untyped_storage().nbytes()
    kept_bytes = -(-nbytes // 8) if tensor.dtype is torch.bool else nbytes
    node: Any = (tensor if tensor._base is None else tensor._base).grad_fn
    return Storage(nbytes, kept_bytes, _producer(tensor, node), _is_weight_cast(node))


def _producer(tensor: torch.Tensor, node: Any) -> str:
    """The dtype and the operations that made the tensor, through views and copies."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    names: list[str] = []
    while node is not None and len(names) < _VIEWS:
        names.append(node.name().removesuffix("Backward0"))
        if not any(
            word in names[-1] for word in ("View", "Transpose", "Clone", "Expand", "Permute", "squeeze", "Copy")
        ):
            break
        node = node.next_functions[0][0]
    return f"{dtype} by {' of '.join(names) or 'what has no history'}"


def _is_weight_cast(node: Any) -> bool:
    source = None if node is None or node.name() != "ToCopyBackward0" else node.next_functions[0][0]
    return source is not None and source.name() == _LEAF


@contextlib.contextmanager
def _told(hooks: GreedyHooks) -> Iterator[None]:
    """A context in which torch's module hooks note what the graph does not contain."""
    observe_flags()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: observe_parameters(module))
    try:
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            yield
    finally:
        handle.remove()


def measure(subject: Subject, max_depth: int, *, cuda_shaped: bool, batch: int | None = None) -> list[Storage]:
    """The storages that one forward pass saves, with the decision for each."""
    with FakeTensorMode(), CudaShaped() if cuda_shaped else contextlib.nullcontext():
        model, forward = subject.make(batch or subject.batch)
        parameters = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
        hooks = GreedyHooks(max_depth, parameters)
        with _told(hooks), torch.autocast("cpu", torch.bfloat16, enabled=subject.autocast):
            forward()
    return hooks.storages


def share(storages: Sequence[Storage], *, with_weight_casts: bool) -> float:
    """The saved bytes that must be kept or offloaded, in percent."""
    counted = [one for one in storages if with_weight_casts or not one.is_weight_cast]
    kept = sum(one.kept_bytes for one in counted if one.recipe is None)
    return 100 * kept / max(1, sum(one.nbytes for one in counted))


def _of(make: Callable[[int], Workload]) -> Callable[[int], tuple[torch.nn.Module, Callable[[], torch.Tensor]]]:
    def made(batch: int) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
        work = make(batch)
        return work.model, lambda: work.loss(work.model(*work.inputs))

    return made


def _of_transformers(name: str, tokens: int, **shape: Any) -> Callable[[int], Any]:
    """A causal language model of transformers, with random weights."""

    def made(batch: int) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
        import transformers

        transformers.logging.set_verbosity_error()
        configuration = getattr(transformers, f"{name}Config")(use_cache=False, **shape)
        model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(configuration)
        text = torch.randint(configuration.vocab_size, (batch, tokens))
        return model, lambda: _loss_of_one_text_a_row(model, text)

    return made


def _loss_of_one_text_a_row(model: Any, text: torch.Tensor) -> torch.Tensor:
    """The loss with each row as one text. Without data transformers cannot see that, and would make masks."""
    with mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None):
        loss: torch.Tensor = model(input_ids=text, labels=text).loss
    return loss


_LLAMA = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
}
SUBJECTS = {
    "resnet50": Subject("ResNet-50", _of(resnet50), 32, autocast=False),
    "densenet121": Subject("DenseNet-121", _of(densenet121), 32, autocast=False),
    "vgg16": Subject("VGG-16", _of(vgg16), 32, autocast=False),
    "gpt2": Subject("GPT-2 AMP, transformers'", _of_transformers("GPT2", 1024), 4, autocast=True),
    "gpt": Subject(
        "GPT-2 AMP, without dropout",
        _of(partial(gpt, tokens=1024, shape=GptShape(50257, 1024, 12, 768, 12))),
        4,
        autocast=True,
    ),
    "bert": Subject("BERT-large AMP", _of(bert_large), 4, autocast=True),
    "vit": Subject("ViT-L AMP", _of(vit_large), 8, autocast=True),
    "llama": Subject("Llama AMP, transformers', 4 x 2048", _of_transformers("Llama", 1024, **_LLAMA), 2, autocast=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plans.recipe_shares", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--remaining", action="store_true", help="also list kept bytes by producer, others by recipe")
    options = parser.parse_args(arguments)
    rows, details = [], []
    progress = Progress("recipe_shares", len(options.models))
    for name in options.models:
        subject = SUBJECTS[name]
        progress.begin(subject.title)
        cuda = [measure(subject, depth, cuda_shaped=True, batch=options.batch) for depth in DEPTHS]
        cpu = measure(subject, DEPTHS[-1], cuda_shaped=False, batch=options.batch)
        plain = sum(one.nbytes for one in cuda[0]) / _MIB
        shares = [share(one, with_weight_casts=True) for one in (*cuda, cpu)] + [
            share(cuda[-1], with_weight_casts=False)
        ]
        rows.append(
            [f"{subject.title} ({options.batch or subject.batch})", f"{plain:.0f}", *(f"{one:.1f} %" for one in shares)]
        )
        details.append(_details(subject.title, cuda[-1]))
    header = (
        "model (batch)",
        "saved, MiB",
        *(f"chains of {depth}" for depth in DEPTHS),
        "on the CPU",
        "no weight casts",
    )
    progress.end()
    print(render_table("Saved bytes that must be kept or offloaded, with cheap recipes and bit masks", header, rows))
    if options.remaining:
        print(*details, sep="\n\n")
    return 0


def _details(title: str, storages: Sequence[Storage]) -> str:
    total = sum(one.nbytes for one in storages)
    kept, recomputed = Counter[str](), Counter[str]()
    for one in storages:
        if one.recipe is None:
            kept[one.producer] += one.kept_bytes
        else:
            recomputed[one.recipe.name] += one.nbytes
    rows = [(f"kept: {name}", f"{100 * nbytes / total:.1f} %") for name, nbytes in kept.most_common(_SHOWN)]
    rows += [(f"recomputed: {name}", f"{100 * n / total:.1f} %") for name, n in recomputed.most_common(_SHOWN)]
    return render_table(title, ("of the saved bytes", "share"), rows)


if __name__ == "__main__":
    sys.exit(main())
