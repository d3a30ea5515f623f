"""Frozen parameters from the begin of a session to after its end, and what a program does to them."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.conftest import open_fake_device
from tests.fake_driver.control import FakeDriver
from tests.runtime.training_state.parameters.frozen_loops import frozen_away, made, same, train
from vdnn import _C
from vdnn.errors import VdnnError
from vdnn.runtime.session.session import Session
from vdnn.runtime.training_state.parameters.managed_parameters import ManagedParameters

OUT_OF_MEMORY, INVALID_VALUE = 2, 1


def frozen_bytes(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters() if not one.requires_grad)


def pinned(session: Session) -> tuple[int, int]:
    """The bytes of frozen parameters on the host, and those that are leased of pinned memory for them."""
    parameters = session._parameters
    assert isinstance(parameters, ManagedParameters)
    return parameters._host_bytes, sum(one.state_bytes for one in session._engine.transports.opened())


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def test_a_model_is_as_before_after_a_session(device: _C.Device) -> None:
    model = made("low-rank")
    objects, values = [id(one) for one in model.parameters()], values_of(model)
    with frozen_away(device, model) as session:
        assert pinned(session) == (frozen_bytes(model), frozen_bytes(model))
        assert same(values, values_of(model))
    assert pinned(session)[1] == 0
    assert [id(one) for one in model.parameters()] == objects
    assert same(values, values_of(model))


def test_a_session_that_is_entered_again_keeps_the_parameters_away_until_the_last_exit(device: _C.Device) -> None:
    model = made("low-rank")
    values, away = values_of(model), (frozen_bytes(model), frozen_bytes(model))
    with frozen_away(device, model) as session:
        for _ in range(2):
            with session:
                assert pinned(session) == away
                model(torch.randn(6, 16)).sum().backward()
            assert pinned(session) == away
        model(torch.randn(6, 16)).sum().backward()
    assert pinned(session)[1] == 0
    assert same(values, values_of(model))


def test_a_state_dict_that_is_kept_outlives_the_pinned_memory(device: _C.Device) -> None:
    model = made("low-rank")
    values = values_of(model)
    with frozen_away(device, model):
        kept = model.state_dict()
        view = model[0][0].layer.weight.data[3:]  # type: ignore[index,union-attr]
    gc.collect()
    assert same(values, list(kept.values()))
    assert torch.equal(view, values[2][3:])


def with_layers_of(saved: dict[str, torch.Tensor]) -> nn.Module:
    """The model with the frozen layers of a checkpoint, whose memory they keep."""
    model = made("low-rank")
    frozen = {name: value for name, value in saved.items() if "layer" in name}
    model.load_state_dict(frozen, strict=False, assign=True)
    for name, one in model.named_parameters():
        one.requires_grad_("layer" not in name)
    return model


def test_a_mapped_checkpoint_is_not_copied(device: _C.Device, tmp_path: Path) -> None:
    torch.save(made("low-rank").state_dict(), tmp_path / "model.pt")
    model = with_layers_of(torch.load(tmp_path / "model.pt", mmap=True))
    addresses = [one.data_ptr() for one in model.parameters() if not one.requires_grad]
    with frozen_away(device, model) as session:
        assert pinned(session) == (frozen_bytes(model), 0)
        assert "4.25 KiB of it in mapped files" in session.report()
        found = train(model, "plain")
    assert same(train(made("low-rank"), "plain"), found)
    assert [one.data_ptr() for one in model.parameters() if not one.requires_grad] == addresses


def test_a_mapped_file_of_safetensors_is_not_copied(device: _C.Device, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(made("low-rank").state_dict(), tmp_path / "model.safetensors")
    model = with_layers_of(safetensors.load_file(tmp_path / "model.safetensors"))
    with frozen_away(device, model) as session:
        assert pinned(session) == (frozen_bytes(model), 0)
        found = train(model, "plain")
    assert same(train(made("low-rank"), "plain"), found)


def test_what_is_written_to_a_parameter_in_its_module_is_kept(device: _C.Device) -> None:
    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.add_(0.01)
            return super().forward(x)

    class Hidden(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.add_(0.01)
            return super().forward(x)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*[kind(16, 16).requires_grad_(False) for kind in (Counting, Hidden)], nn.Linear(16, 4))

    expected, away = model(), model()
    found = train(expected, "plain", steps=5)
    with frozen_away(device, away) as session:
        assert same(found, train(away, "plain", steps=5))
        assert "parameter 0.weight is written to while a module runs, 5 times, and copied out" in session.report()
        assert "parameter 1.weight is written to while a module runs, 5 times, and copied out" in session.report()


def test_a_parameter_that_is_trained_later_stays_on_the_device(device: _C.Device) -> None:
    def thawed(model: nn.Module) -> list[Any]:
        found = train(model, "plain", steps=2)
        model.requires_grad_(True)
        return found + train(model, "plain", steps=3)

    expected = thawed(made("low-rank"))
    model = made("low-rank")
    with frozen_away(device, model):
        assert same(expected, thawed(model))


def test_a_parameter_that_is_replaced_inside_is_used(device: _C.Device) -> None:
    def replaced(model: nn.Module) -> list[Any]:
        found = train(model, "plain", steps=2)
        layer = model[0][0].layer  # type: ignore[index,union-attr]
        layer.weight = nn.Parameter(torch.ones(16, 16), requires_grad=False)
        return found + train(model, "plain", steps=2)

    expected = replaced(made("low-rank"))
    model = made("low-rank")
    with frozen_away(device, model):
        assert same(expected, replaced(model))
    assert same(expected[-13:], values_of(model)[-13:])


def test_a_model_that_is_converted_inside_is_refused(device: _C.Device) -> None:
    model = made("low-rank")
    with frozen_away(device, model):
        model.double()
        with pytest.raises(VdnnError, match=r"parameter 0.0.layer.weight was moved or replaced by .data, .to\(\)"):
            model(torch.randn(6, 16).double())
    assert {one.dtype for one in model.parameters()} == {torch.float64}
    assert model(torch.randn(6, 16).double()).isfinite().all()


def test_two_sessions_that_manage_one_model_are_refused(device: _C.Device) -> None:
    model = made("low-rank")
    with frozen_away(device, model):
        other = vdnn.offload("vdnn-all", device=device, min_bytes=0, model=model[0], parameters="frozen")  # type: ignore[index]
        with pytest.raises(VdnnError, match="managed by another session, which has not been left"):
            other.__enter__()
        model(torch.randn(6, 16)).sum().backward()
        other.close()


def test_wrong_arguments_are_refused_before_anything_moves() -> None:
    with pytest.raises(ValueError, match="parameters: expected 'frozen', 'all' or None, got 'some'"):
        vdnn.offload(parameters="some", model=nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Give model= as well"):
        vdnn.offload(parameters="frozen")
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got list"):
        vdnn.offload(parameters="frozen", model=[])  # type: ignore[arg-type]
    with pytest.raises(VdnnError, match="module 'model' is compiled"):
        vdnn.offload(parameters="frozen", model=torch.compile(nn.Linear(1, 1), backend="eager"))


def test_parameters_that_share_memory_stay_and_are_named(device: _C.Device) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).requires_grad_(False)
    model[0].weight.data = model[1].weight.data
    with frozen_away(device, model) as session:
        assert "parameter 0.weight stays on the device: it shares memory with another" in session.report()
        assert pinned(session)[0] == 2 * 16 * 4


def test_a_reader_outside_of_its_module_is_said(device: _C.Device) -> None:
    model = made("tied")
    with frozen_away(device, model) as session:
        train(model, "plain", steps=3)
        assert "parameter embedding.weight is read outside of its module" in session.report()
        assert torch.overrides._get_current_function_mode() is None  # it is known by now


def test_ctrl_c_while_parameters_leave_waits_until_all_have(device: _C.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    take = ManagedParameters._take_one_out

    def interrupted(self: ManagedParameters, *given: Any, **named: Any) -> None:
        if not self._away:
            signal.raise_signal(signal.SIGINT)
        take(self, *given, **named)

    model = made("low-rank")
    values = values_of(model)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(ManagedParameters, "_take_one_out", interrupted)
        with pytest.raises(KeyboardInterrupt), frozen_away(device, model):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert same(values, values_of(model))


def test_each_host_allocation_refused_in_turn_leaves_parameters_on_the_device(fake_driver: FakeDriver) -> None:
    expected = train(made("low-rank"), "plain", steps=2)
    for nth in range(1, 4):
        device, model = open_fake_device(fake_driver), made("low-rank")
        fake_driver.fail_call("cuMemHostRegister", nth, OUT_OF_MEMORY)
        with frozen_away(device, model) as session:
            assert same(expected, train(model, "plain", steps=2))
            assert (pinned(session)[0] < frozen_bytes(model)) == ("memory of the host was refused" in session.report())
        fake_driver.reset()
        device.close()
