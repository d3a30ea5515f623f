"""compile_options: a compiled region keeps a budget between forward and backward, and computes the same bits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import vdnn
from vdnn.errors import CombinationError, InvalidArgumentError, TorchMissingError
from vdnn.hardware import load_profile
from vdnn.integrations import compile_options
from vdnn.integrations.compile_options import BudgetPartitioner, RegionChoice, hash_of_code
from vdnn.runtime.storage import graph_copies
from vdnn.runtime.torch_internals import joint_graph

ENOUGH = 2**40
# Torch warns of its own code while it compiles: of torch.jit in Inductor, and of gradients behind a graph break.
pytestmark = [
    pytest.mark.skipif(bool(joint_graph._missing), reason=f"compiled regions need {joint_graph.NEEDED}"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Blocks(nn.Module):
    """Residual blocks with dropout, whose masks may not be drawn again."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


class Attention(nn.Module):
    """Causal attention of several heads: its queries, keys and values are views of one product."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.inner, self.outer = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = (one.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for one in self.inner(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        return x + functional.silu(self.outer(mixed.transpose(-2, -3).flatten(-2)))


def convolutions() -> nn.Module:
    """Convolutions with norms whose buffers the forward writes, and a maximum that keeps indices."""
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "blocks": (Blocks, (16, 32)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 16, 32)),
    "convolutions": (convolutions, (4, 3, 16, 16)),
}


class Run(NamedTuple):
    """A step: its output and gradients, and the bytes that were saved beside inputs and outputs."""

    values: list[Tensor]
    saved_bytes: int


@pytest.fixture(autouse=True)
def compiles_afresh() -> Iterator[None]:
    inductor, functorch = torch._inductor.config, torch._functorch.config
    with inductor.patch(fx_graph_cache=False, compile_threads=1), functorch.patch(enable_autograd_cache=False):
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


def as_it_is(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
    """Runs a graph without compiling it, as torch's backend aot_eager does."""

    def run(arguments: list[Any]) -> Any:
        return module.forward(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def eagerly(partitioner: BudgetPartitioner) -> Any:
    return aot_autograd(fw_compiler=as_it_is, partition_fn=partitioner, keep_inference_input_mutations=True)


def stepped(model: nn.Module, x: Tensor, **how: Any) -> Run:
    """One step of a copy of `model`, compiled."""
    torch._dynamo.reset()
    model, x = copy.deepcopy(model), x.clone().requires_grad_(x.is_floating_point())
    torch.manual_seed(3)
    out = torch.compile(model, **how)(x)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), x, out)}
    node: Any = out.grad_fn
    while "CompiledFunction" not in node.name():
        node = node.next_functions[0][0]
    saved = (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ()))
    kept = [one for one in saved if not graph_copies.is_on_host(one)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kept}
    out.square().mean().backward()
    gradients = [one.grad for one in (x, *model.parameters())]
    assert all(one is not None for one in gradients)
    values = [out.detach(), *model.buffers(), *(one for one in gradients if one is not None)]
    return Run(values, sum(size for address, size in storages.items() if address not in own))


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build(), torch.randn(shape)


def partitioner(budget: int, hardware: str = "h100") -> BudgetPartitioner:
    found = vdnn.compile_options(budget, hardware)["custom_partitioner_fn"]
    assert isinstance(found, BudgetPartitioner)
    return found


def held_bytes(choice: RegionChoice) -> int:
    return choice.inputs_and_outputs_bytes + choice.saved_bytes


def least_bytes(model: nn.Module, x: Tensor, *, offload: bool = True) -> int:
    """The least that an uncompiled region can hold, from the error that refuses one byte."""
    with pytest.raises(BackendCompilerFailed) as caught:
        stepped(model, x, backend=eagerly(BudgetPartitioner(1, load_profile("h100"), offloads=offload)))
    found = re.search(r"expected at least .* \((\d+) bytes\), which the compiled region", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.slow
@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("name", MODELS)
def test_every_budget_is_kept_to_the_byte_with_the_bits_of_aot_eager(name: str) -> None:
    model, x = made(name)
    plain = stepped(model, x, backend="aot_eager")
    ample = partitioner(ENOUGH)
    kept = stepped(model, x, backend=eagerly(ample))
    most, least = held_bytes(ample.regions[0]), least_bytes(model, x)
    assert least < most
    found = [(ample, kept)]
    for budget in ((most + least) // 2, least):
        chosen = partitioner(budget)
        found.append((chosen, stepped(model, x, backend=eagerly(chosen))))
        assert held_bytes(chosen.regions[0]) <= budget
    for chosen, run in found:
        assert run.saved_bytes == chosen.regions[0].saved_bytes
        assert all(map(torch.equal, run.values, plain.values))
    assert kept.saved_bytes == plain.saved_bytes
    assert found[2][1].saved_bytes < plain.saved_bytes


@pytest.mark.full  # inductor compiles three times, and aot_eager has the same choices
def test_inductor_saves_what_was_chosen_and_gives_the_same_gradients() -> None:
    model, x = made("blocks")
    plain = stepped(model, x)
    ample = vdnn.compile_options(ENOUGH, "h100")["custom_partitioner_fn"]
    stepped(model, x, options={"custom_partitioner_fn": ample})
    [free] = ample.regions
    assert free.by == "min-cut"
    assert free.saved_bytes == plain.saved_bytes
    options = vdnn.compile_options(free.inputs_and_outputs_bytes + free.saved_bytes // 3, "h100")
    lean = stepped(model, x, options=options)
    [choice] = options["custom_partitioner_fn"].regions
    assert lean.saved_bytes == choice.saved_bytes <= free.saved_bytes // 3
    assert choice.min_cut_saved_bytes == free.saved_bytes
    assert all(map(torch.equal, lean.values, plain.values))


@pytest.mark.slow
def test_the_cut_of_torch_is_taken_where_it_fits_and_no_further() -> None:
    model, x = made("blocks")
    ample = partitioner(ENOUGH)
    stepped(model, x, backend=eagerly(ample))
    most = held_bytes(ample.regions[0])
    exact, short = partitioner(most), partitioner(most - 1)
    stepped(model, x, backend=eagerly(exact))
    stepped(model, x, backend=eagerly(short))
    assert exact.regions[0].by == "min-cut"
    assert not exact.regions[0].offloaded_bytes
    assert short.regions[0].by != "min-cut" or short.regions[0].offloaded_bytes
    assert short.regions[0].saved_bytes < exact.regions[0].saved_bytes


def test_each_region_between_graph_breaks_has_a_choice() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Blocks(depth=1), Blocks(depth=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    torch.manual_seed(0)
    model, x, chosen = Broken(), torch.randn(16, 32), partitioner(ENOUGH)
    plain = stepped(model, x, backend="aot_eager")
    assert all(map(torch.equal, stepped(model, x, backend=eagerly(chosen)).values, plain.values))
    assert len({choice.name for choice in chosen.regions}) == 2


@pytest.mark.slow
def test_a_region_with_dynamic_shapes_computes_the_same_at_other_sizes() -> None:
    model, x = made("attention")
    ample = partitioner(ENOUGH)
    stepped(model, x, backend=eagerly(ample))
    chosen = partitioner(held_bytes(ample.regions[0]) - ample.regions[0].saved_bytes // 3)
    torch._dynamo.reset()
    plain, compiled = copy.deepcopy(model), copy.deepcopy(model)
    forward = torch.compile(compiled, backend=eagerly(chosen), dynamic=True)
    reference = torch.compile(plain, backend="aot_eager", dynamic=True)
    for batch in (2, 3, 7):
        torch.manual_seed(batch)
        x = torch.randn(batch, 16, 32)
        for called, owner in ((forward, compiled), (reference, plain)):
            owner.zero_grad()
            called(x).square().mean().backward()
        for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)
    assert len(chosen.regions) == 1
    assert chosen.regions[0].by != "min-cut"


@pytest.mark.slow
def test_what_a_checkpoint_asks_to_recompute_stays_recomputed_with_its_dropout() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = Blocks(depth=2), Blocks(depth=2)

        def forward(self, x: Tensor) -> Tensor:
            inside: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return self.outer(inside)

    torch.manual_seed(0)
    model, x, ample = Checkpointed(), torch.randn(128, 32), partitioner(ENOUGH)
    plain = stepped(model, x, backend="aot_eager")
    kept = stepped(model, x, backend=eagerly(ample))
    chosen = partitioner(held_bytes(ample.regions[0]) - ample.regions[0].saved_bytes // 4)
    lean = stepped(model, x, backend=eagerly(chosen))
    assert kept.saved_bytes == plain.saved_bytes
    assert lean.saved_bytes == chosen.regions[0].saved_bytes < plain.saved_bytes
    assert all(map(torch.equal, kept.values, plain.values))
    assert all(map(torch.equal, lean.values, plain.values))


class SomeCheckpointed(nn.Module):
    """Blocks with dropout, of which every second one is a checkpoint: torch saves the states of its generator."""

    def __init__(self, checkpoints: int, others: int) -> None:
        super().__init__()
        self.inside = nn.ModuleList(Blocks(16, depth=1) for _ in range(checkpoints))
        self.beside = nn.ModuleList(Blocks(16, depth=1) for _ in range(others))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inside:
            x = checkpoint(block, functional.dropout(x, 0.1), use_reentrant=False)
        for block in self.beside:
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.drawn(of=4)
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize(("checkpoints", "others"), [(1, 1), (2, 1), (1, 2), (2, 0)])
def test_the_least_budget_that_a_refusal_names_is_met(checkpoints: int, others: int, offload: bool) -> None:
    torch.manual_seed(0)
    model, x = SomeCheckpointed(checkpoints, others), torch.randn(64, 16)
    plain = stepped(model, x, backend="aot_eager")
    profile = load_profile("h100")
    least = least_bytes(model, x, offload=offload)
    for budget in (least, least + 1):
        chosen = BudgetPartitioner(budget, profile, offloads=offload)
        assert all(map(torch.equal, stepped(model, x, backend=eagerly(chosen)).values, plain.values))
        assert held_bytes(chosen.regions[0]) <= chosen.regions[0].peak_bytes <= budget
    with pytest.raises(BackendCompilerFailed, match=rf"\({least} bytes\), which the compiled region"):
        stepped(model, x, backend=eagerly(BudgetPartitioner(least - 1, profile, offloads=offload)))


class Dropped(nn.Module):
    """A checkpoint with dropout beside it. Torch is left with nothing to choose but the results of the dropout, which
    may not be computed again."""

    scale: Tensor

    def __init__(self, ahead: int, behind: int) -> None:
        super().__init__()
        self.inner, self.ahead, self.behind = nn.Linear(16, 16), ahead, behind
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale.cos()
        for _ in range(self.ahead):
            x = functional.dropout(x, 0.3)
        x = checkpoint(lambda one: self.inner(one).sin(), x, use_reentrant=False)
        for _ in range(self.behind):
            x = functional.dropout(x, 0.3)
        return x


@pytest.mark.parametrize(("ahead", "behind"), [(0, 1), (1, 1)])
def test_the_mask_of_a_dropout_is_saved_where_nothing_else_is_left_to_choose(ahead: int, behind: int) -> None:
    torch.manual_seed(0)
    model, x = Dropped(ahead, behind), torch.randn(64, 16)
    plain = stepped(model, x, backend="aot_eager")
    least = least_bytes(model, x, offload=False)
    for budget in (least, least + x.nbytes):
        chosen = BudgetPartitioner(budget, load_profile("h100"), offloads=False)
        lean = stepped(model, x, backend=eagerly(chosen))
        assert all(map(torch.equal, lean.values, plain.values))
        assert chosen.regions[0].peak_bytes <= budget


def test_a_budget_below_inputs_and_outputs_is_refused_with_what_they_take() -> None:
    model, x = made("attention")
    ends = sum(one.nbytes for one in model.parameters()) + 2 * x.nbytes
    sentence = (
        rf"InvalidArgumentError: budget: expected at least .* {vdnn.format_bytes(ends)} of them its inputs and outputs"
    )
    with pytest.raises(BackendCompilerFailed, match=sentence):
        stepped(model, x, backend=eagerly(partitioner(ends - 1)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (lambda: vdnn.compile_options(ENOUGH, "h100"), "does not work with options that it made"),
        (lambda: {"custom_partitioner_fn": print}, r"does not work with options\['custom_partitioner_fn'\]"),
    ],
)
def test_a_second_partitioner_in_the_options_is_refused(options: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(CombinationError, match=sentence):
        vdnn.compile_options(ENOUGH, "h100", options())


def test_settings_of_the_process_that_choose_what_is_saved_are_refused() -> None:
    refused = pytest.raises(CombinationError, match="both decide what forward saves")
    with torch._inductor.config.patch(custom_partitioner_fn=partitioner(ENOUGH)), refused:
        vdnn.compile_options(ENOUGH, "h100")
    with torch._functorch.config.patch(activation_memory_budget=0.5), refused:
        vdnn.compile_options(ENOUGH, "h100")


def test_other_options_are_passed_on() -> None:
    assert vdnn.compile_options(ENOUGH, "h100", {"epilogue_fusion": False})["epilogue_fusion"] is False


@pytest.mark.parametrize("budget", [0, -1, True, 1.5])
def test_a_budget_that_is_not_a_size_is_refused(budget: Any) -> None:
    with pytest.raises(InvalidArgumentError, match='budget: expected bytes or a text such as "12GiB", got'):
        vdnn.compile_options(budget, "h100")


def test_a_machine_without_a_card_needs_the_name_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="hardware: expected the name of a profile on a machine without"):
        vdnn.compile_options(ENOUGH)


def test_a_torch_without_partitioners_is_refused_with_the_version_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_graph, "_missing", "cannot import name 'CustomPartitionerFn'")
    with pytest.raises(TorchMissingError, match=r"needs torch>=2\.13, but torch .* \(cannot import name"):
        vdnn.compile_options(ENOUGH, "h100")


def test_the_uuid_changes_with_budget_hardware_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    first = partitioner(ENOUGH)
    assert first.uuid() == BudgetPartitioner(ENOUGH, load_profile("h100")).uuid()
    others = {partitioner(ENOUGH - 1).uuid(), partitioner(ENOUGH, "titan-x").uuid()}
    before = first.uuid()
    monkeypatch.setattr(compile_options, "hash_of_code", lambda package: "of another version")
    assert len({before, first.uuid(), *others}) == 4


def test_the_hash_of_the_code_changes_with_every_file_that_may_change_a_cut(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    paths = [tmp_path / "__init__.py", tmp_path / "inner" / "one.py", tmp_path / "_C.abi3.so"]
    for path in paths:
        path.write_text("same")
    found = {hash_of_code(tmp_path)}
    for path in paths:
        path.write_text("changed")
        hash_of_code.cache_clear()
        found.add(hash_of_code(tmp_path))
    assert len(found) == 4
