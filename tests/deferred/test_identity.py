"""torch's own operations and modules give the CPU's bits on the accelerator, with and without a session that moves
everything.

The fast suite runs one sample of each operation, under one mode; `make test-full` runs every operation under every
mode. Operations that set a seed of their own are left out: see noticing_seeds.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from deferred import Mode
from tests.deferred.identity import Call, IdentityOnIt, all_moved, noticing_seeds
from tests.deferred.test_vdnn_on_it import SEEDS
from tests.runtime.identity.databases import OpSample, dtype_of, largest_sample_of, modules, operations
from tests.runtime.identity.outcome import Outcome
from tests.runtime.identity.runs import SEED, fresh_copies, leaves_of, run_call, run_step
from tests.runtime.identity.runs import Mode as Backwards
from tests.runtime.identity.test_view_identity import VIEWS, squared

Record = Callable[[str, object], None]
CHUNKS = 24
MODULE_CHUNKS = 4
# Modes in which the accelerator can only be wrong about time: the host waits at other points.
MODES = [Mode.COMPUTE_LATE, Mode.RANDOM, Mode.COPIES_LATE, Mode.COPIES_EARLY]
pytestmark = pytest.mark.filterwarnings("ignore")  # the database's own warnings


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> Iterator[None]:
    operations(), modules()  # the databases are large
    gc.collect()
    gc.freeze()  # the accelerator collects garbage if tensors are left on it when it stops
    yield
    gc.unfreeze()


LEFT_OUT = {
    "sparse_sampled_addmm": "there are no sparse tensors on the accelerator",
    "sparse_mm_reduce": "there are no sparse tensors on the accelerator",
    "to_sparse": "there are no sparse tensors on the accelerator",
    "tensor_split": "torch wants its indices on the CPU",
    "linalg_lstsq": "the solution is a part of a larger tensor on the CPU, and one of its own here",
    "linalg_lstsq_grad_oriented": "the same",
}
# Operations that wait for all streams and run at once: they have no meta kernel, or a shape that depends on data.
SYNCHRONOUS = {
    "aten::_ctc_loss_backward",
    "aten::_cummax_helper",
    "aten::_cummin_helper",
    "aten::_logcumsumexp",
    "aten::_unique",
    "aten::equal",
    "aten::fractional_max_pool3d_backward",
    "aten::masked_select",
    "aten::multi_margin_loss_backward",
    "aten::multilabel_margin_loss_backward",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
}


def assert_all_went_well(rigs: list[IdentityOnIt], record: Record) -> None:
    record("compared", sum(rig.compared for rig in rigs))
    synchronous = {name for rig in rigs for name in rig.synchronous}
    record("synchronous", sorted(synchronous))
    failures = [failure for rig in rigs for failure in rig.failures]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:30])
    assert synchronous <= SYNCHRONOUS
    assert sum(rig.counters.reloads for rig in rigs), "nothing came back"


def samples(ops: Sequence[Any]) -> list[OpSample]:
    """One sample of each operation, except operations that cannot run here and those that set a seed."""
    found = []
    for op in ops:
        dtype = dtype_of(op)
        assert dtype is not None
        sample = largest_sample_of(op, dtype)
        assert sample is not None
        with noticing_seeds() as seeds:
            run_call(sample.call, sample.arguments, Backwards.ONCE)
        if op.formatted_name not in LEFT_OUT and all(seed == SEED for seed in seeds):
            found.append(sample)
    return found


def compare_operations(
    all_samples: list[OpSample], modes: Callable[[int], list[Mode]], seed: int, record: Record
) -> None:
    rigs = []
    for mode in MODES:
        with IdentityOnIt(mode, seed) as rig:
            for index, sample in enumerate(all_samples):
                if mode in modes(index):
                    rig.compare(sample.name, functools.partial(run_sample, sample))
        rigs.append(rig)
    assert_all_went_well(rigs, record)


def run_sample(sample: OpSample, on_it: Callable[[Call], Call]) -> Outcome:
    return run_call(on_it(sample.call), sample.arguments, Backwards.TWICE)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_operation_has_the_cpus_gradients(chunk: int, record_property: Record) -> None:
    ours = samples(operations()[chunk::CHUNKS])
    compare_operations(ours, lambda index: [MODES[index % len(MODES)]], chunk, record_property)


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_operation_under_every_mode_has_the_cpus_gradients(chunk: int, record_property: Record) -> None:
    ours = samples(operations()[chunk::CHUNKS])
    for seed in range(5):
        compare_operations(ours, lambda index: MODES, seed, record_property)


def test_what_is_left_out_is_little() -> None:
    names = [op.formatted_name for op in operations()]
    assert len(names) > 500
    assert set(LEFT_OUT) <= set(names)


@pytest.mark.parametrize("chunk", range(MODULE_CHUNKS))
def test_every_module_has_the_cpus_gradients(chunk: int, record_property: Record) -> None:
    rigs = []
    for turn, mode in enumerate(MODES):
        with IdentityOnIt(mode, chunk) as rig:
            for info in modules()[chunk::MODULE_CHUNKS][turn :: len(MODES)]:
                if info.module_cls is torch.nn.LSTM and torch.__version__ < "2.13":
                    continue  # this torch says wrong shapes for the gradients of one without biases
                rig.compare(info.formatted_name, functools.partial(run_module, info, next(_inputs_of(info))))
        rigs.append(rig)
    assert_all_went_well(rigs, record_property)


def _inputs_of(info: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    return iter(info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True))


def run_module(info: Any, given: Any, on_it: Callable[[Call], Call]) -> Outcome:
    """Runs the module with its parameters as leaves on the CPU. They are moved with the inputs, and replace the
    module's own."""
    torch.manual_seed(SEED)
    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).train()
    leaves, arguments = leaves_of((given.forward_input.args, given.forward_input.kwargs))

    def call(state: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        return torch.func.functional_call(module, state, args, kwargs)

    def forward() -> Any:
        args, kwargs = fresh_copies(arguments)
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return on_it(call)(state, args, kwargs)

    if info.is_lazy:
        with torch.no_grad():
            module(*fresh_copies(arguments)[0])
    return run_step(forward, [*leaves, *module.parameters()], Backwards.TWICE)


@pytest.mark.parametrize("view", [pytest.param(view, id=name) for name, view in VIEWS.items()])
def test_a_view_comes_back_as_it_was(view: Callable[[torch.Tensor], torch.Tensor], record_property: Record) -> None:
    numbers = torch.linspace(-1, 1, 2 * 144)
    tensor = torch.complex(numbers[:144], numbers[144:]).reshape(2, 4, 6, 3).requires_grad_()

    def run(on_it: Callable[[Call], Call]) -> Outcome:
        return run_call(on_it(functools.partial(squared, view)), ((tensor,), {}), Backwards.TWICE)

    rigs = []
    for mode, seed in [*((mode, 0) for mode in Mode), *itertools.product([Mode.RANDOM], SEEDS)]:
        with IdentityOnIt(mode, seed, capacity="256KiB") as rig:
            rig.compare("a view", run)
        rigs.append(rig)
    assert_all_went_well(rigs, record_property)


def test_a_move_keeps_every_geometry() -> None:
    tensor = torch.randn(3, 4).to(torch.complex64)
    with IdentityOnIt(Mode.COMPUTE_LATE, 0):
        for view in (tensor, tensor.t(), tensor[1:, ::2], tensor[:1].expand(3, 4), tensor.conj(), tensor.conj().imag):
            (there,) = all_moved([view], "deferred")
            (back,) = all_moved([there], "cpu")
            assert torch.equal(back, view)
            if not view.is_conj() and not view.is_neg():
                assert (there.stride(), there.storage_offset()) == (view.stride(), view.storage_offset())
                assert (back.stride(), back.storage_offset()) == (view.stride(), view.storage_offset())
            del there
