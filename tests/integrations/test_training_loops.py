"""Other features of training loops: mixed precision with a scaler, accumulation, clipping, averaged weights, compiled
layers and models. Parameters after several steps are those of the same loop without vdnn, bit for bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.integrations.parallel_training import BATCH, WIDTH, batches, blocks, moving
from tests.runtime.rigs.side_by_side import same_bits
from tests.runtime.training_state.loops import LOOPS, OPTIMIZERS, same, train
from tests.runtime.training_state.loops import STEPS as STEPS_OF_A_LOOP
from vdnn.runtime.session.session import Session

pytestmark = pytest.mark.slow

STEPS = 8
EITHER = pytest.mark.parametrize("how", ["moves", "auto"])

Values = list[torch.Tensor]


def values_of(*modules: nn.Module) -> Values:
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


@EITHER
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_the_same(loop: str, how: str) -> None:
    opened: list[Session] = []

    @contextlib.contextmanager
    def inside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        with moving(how) as session:
            opened.append(session)
            yield

    made = OPTIMIZERS["adamw"], LOOPS[loop]
    # So many rows that activations, and not the optimizer, make the peak.
    assert same(train(*made, rows=256), train(*made, inside, rows=256))
    (session,) = opened
    assert session.counters.storages + session.counters.discarded, session.report()
    if how != "moves":
        assert session.plan is not None
        assert session.plan.offloaded_bytes, session.report()
    # With infinite gradients the scaler does not call the optimizer, so two batches look like one step.
    assert session.num_steps == STEPS_OF_A_LOOP - (loop == "scaled_with_a_skipped_step")


# torch.compile.


@pytest.fixture
def _forgets_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(nn.Module):
    """A chain of layers. In an nn.Sequential, dynamo would compile the layers' forwards but not the container's."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compile_nothing(model: Network) -> None: ...


def compile_layers(model: Network) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def compile_whole(model: Network) -> None:
    model.compile(backend="aot_eager")


def compile_by_inductor(model: Network) -> None:
    for layer in model.layers:
        layer.compile(backend="inductor")


# Inductor passes the path of torch's libraries to its compiler without quotes.
NEEDS_A_PATH_WITHOUT_SPACES = pytest.mark.skipif(
    " " in torch.__file__, reason="torch is installed under a path with a space, and Inductor's linking fails there"
)
# A virtual machine is a dispatch mode, in which torch compiles nothing: so there is no compiled code to plan for.
COMPILERS = [
    compile_layers,
    compile_whole,
    pytest.param(compile_by_inductor, marks=[pytest.mark.full, NEEDS_A_PATH_WITHOUT_SPACES]),
]


# Warnings of torch's own code, which it raises without vdnn too.
OF_TORCH = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:The .grad attribute:UserWarning")


def compiled_loop(compile_model: Callable[[Network], None]) -> Values:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compile_model(model)
    for x in batches(0, STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


@OF_TORCH
@pytest.mark.usefixtures("_forgets_compiled_code")
@pytest.mark.parametrize("compile_model", COMPILERS)
def test_what_is_compiled_trains_the_same(compile_model: Callable[[Network], None]) -> None:
    plain = compiled_loop(compile_model)
    with moving("moves") as session:
        ours = compiled_loop(compile_model)
    assert all(map(same_bits, plain, ours))
    assert session.counters.storages, session.report()
    assert session.num_steps == STEPS


class BackAtOnce:
    """Hooks that return copies of saved tensors and count how many bytes of them are alive at a time."""

    def __init__(self) -> None:
        self.saved_bytes = self.live_bytes = self.most_bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and tensor.is_leaf:
            return tensor.detach()
        self.saved_bytes += tensor.nbytes
        return tensor.detach()

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        back = packed.clone()
        self.live_bytes += back.nbytes
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        weakref.finalize(back.untyped_storage(), self._gone, back.nbytes)
        return back

    def _gone(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


def share_back_at_once(compile_model: Callable[[Network], None], layers: int) -> float:
    torch._dynamo.reset()
    model, count = Network(layers), BackAtOnce()
    compile_model(model)
    with torch.autograd.graph.saved_tensors_hooks(count.pack, count.unpack):
        model(torch.randn(16 * BATCH, WIDTH)).square().mean().backward()
    return count.most_bytes / count.saved_bytes


@OF_TORCH
@pytest.mark.usefixtures("_forgets_compiled_code")
def test_layers_compiled_one_by_one_need_a_part_of_their_saves_at_once_and_a_whole_model_needs_all() -> None:
    """A compiled region unpacks all its saved tensors before it computes, so compile layers one by one."""
    layers = 8
    shares = {one: share_back_at_once(one, layers) for one in (compile_nothing, compile_layers, compile_whole)}
    assert shares[compile_nothing] <= shares[compile_layers] < 2 / layers
    assert shares[compile_whole] > 0.9
