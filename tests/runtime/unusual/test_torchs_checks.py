"""A session changes nothing that torch looks at: modes, fast paths, guards of compiled code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.rigs.torchs_checks import Program, differences
from tests.runtime.training_state.ways import WAYS
from vdnn.runtime.machine.virtual_machine import VirtualMachine

STEPS = 6


@contextlib.contextmanager
def _on_a_machine(**options: Any) -> Iterator[None]:
    """The machine's own mode, which the user asked for, is there with and without a session."""
    with VirtualMachine("h100", fake=False) as machine:
        if not options:
            yield
            return
        with vdnn.offload(device=machine, min_bytes=0, **options):
            yield


@contextlib.contextmanager
def _over_sim(**options: Any) -> Iterator[None]:
    with contextlib.closing(vdnn.offload(device="sim", min_bytes=0, **options)) as session, session:
        yield


ON_SIM: dict[str, dict[str, Any]] = {
    "vdnn-all": {},
    "recompute-all": {"policy": "recompute-all"},
    "integrity": {"integrity": True},
    "keep": {"policy": "keep"},
}
ON_A_MACHINE: dict[str, dict[str, Any]] = {
    "a wide budget": {"budget": "1MiB"},
    "least": {"budget": "min"},
    "moves alone": {"budget": "min", "recompute": False},
    "measured": {"policy": "vdnn-all", "measure": True},
}


@pytest.mark.parametrize("options", ON_SIM.values(), ids=ON_SIM)
def test_torchs_checks_see_no_session(options: dict[str, Any]) -> None:
    found = differences(lambda _: _over_sim(**options), STEPS, lambda _: contextlib.nullcontext())
    assert found == set()


@pytest.mark.parametrize("options", ON_A_MACHINE.values(), ids=ON_A_MACHINE)
def test_torchs_checks_see_no_planned_session(options: dict[str, Any]) -> None:
    found = differences(lambda _: _on_a_machine(**options), STEPS, lambda _: _on_a_machine())
    assert found == set()


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_torchs_checks_see_no_training_state(options: dict[str, Any]) -> None:
    def plain(program: Program) -> contextlib.AbstractContextManager[None]:
        """With an optimizer of torch's own: one of the program has attributes, which steps in slices would change."""
        program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.01, momentum=0.9)  # type: ignore[assignment]
        return contextlib.nullcontext()

    def session(program: Program) -> contextlib.AbstractContextManager[None]:
        plain(program)
        return _over_sim(optimizer=program.optimizer, model=program.model, policy="keep", **options)

    assert differences(session, STEPS, plain) == set()


@pytest.mark.parametrize("parameters", ["frozen", "all"])
def test_evaluation_with_parameters_on_the_host_takes_torchs_fast_path(
    parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    layer.requires_grad_(parameters == "all")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, calls = torch.randn(2, 4, 16), []
    own = torch._transformer_encoder_layer_fwd

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counting)
    with torch.no_grad():
        plain = layer(x)
        with _over_sim(model=layer, optimizer=optimizer, parameters=parameters):
            inside = [layer(x) for _ in range(4)]
    assert len(calls) == 5
    assert all(torch.equal(plain, one) for one in inside)


@pytest.mark.parametrize("gradients", [False, True])
def test_evaluation_behind_a_deferred_step_takes_torchs_fast_path(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters that wait for their step have a class of their own, and the layer reads those of its parts."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer, x, calls = torch.optim.SGD(layer.parameters(), lr=0.1), torch.randn(2, 4, 16), []
    own = torch._transformer_encoder_layer_fwd

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counting)
    with _over_sim(optimizer=optimizer, optimizer_step="deferred", gradients=gradients):
        for _ in range(4):
            layer.train()(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                layer.eval()(x)
    assert len(calls) == 4


def test_a_mode_of_a_session_is_found() -> None:
    found = differences(lambda _: torch.overrides.BaseTorchFunctionMode(), 1, lambda _: contextlib.nullcontext())
    assert "function modes in the behind a model" in found
    assert "has_torch_function of a tensor in the forward of a function" in found


@pytest.mark.parametrize("options", [*ON_SIM.values(), None], ids=[*ON_SIM, "planned"])
@pytest.mark.parametrize("has_gradients", [False, True], ids=["no_grad", "frozen"])
def test_evaluation_takes_torchs_fast_paths(
    options: dict[str, Any] | None, has_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Global hooks on modules are there, and torch looks at those of the modules alone."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(2, 4, 16)
    calls: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        own = getattr(torch, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(*args, **kwargs)

        return called

    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        monkeypatch.setattr(torch, name, counting(name))

    def results() -> list[torch.Tensor]:
        with torch.set_grad_enabled(has_gradients):
            return [one for _ in range(3) for one in (layer(x), attention(x, x, x, need_weights=False)[0])]

    plain, expected = results(), calls.copy()
    calls.clear()
    with _on_a_machine(budget="1MiB") if options is None else _over_sim(**options):
        inside = results()
    assert calls == expected
    assert set(expected) == {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
    assert all(map(torch.equal, plain, inside))


@pytest.mark.slow
@pytest.mark.parametrize("options", ON_SIM.values(), ids=ON_SIM)
def test_compiled_code_stays_valid_in_a_session(options: dict[str, Any]) -> None:
    """Dynamo's guards look at modes, hooks and the state of torch: what was compiled outside runs inside, and back."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled.append(len(graph.graph.nodes))
        return graph.forward  # type: ignore[no-any-return]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.nn.functional.gelu(self.linear(x)))  # type: ignore[no-any-return]

    model = Block()
    model.compile(backend=backend)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    assert len(compiled) == 1
    with _over_sim(**options):
        for _ in range(3):
            model(x).sum().backward()
    model(x).sum().backward()
    assert len(compiled) == 1
