"""Trainers whose optimizer's state is on the host, by `offload_optimizer=True`: the real libraries, on the CPU, with
the same weights and the same state bit for bit. And loops as public programs have them: nanoGPT, and LoRA by peft."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.runtime.training_state.loops import same
from vdnn.integrations.training_run import TrainingRun
from vdnn.runtime.torch_internals.gradient_reads import native_gradient
from vdnn.runtime.training_state.optimizer_state import state_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

NARROW = vdnn.Limits(offload_window="4KiB", reload_window="4KiB")
ON_SIM: dict[str, Any] = {"device": "sim", "min_bytes": 0, "limits": NARROW}
OPTIONS: dict[str, Any] = {**ON_SIM, "offload_optimizer": True}


@contextlib.contextmanager
def managing(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    session = vdnn.offload("vdnn-all", optimizer=optimizer, **ON_SIM)
    with contextlib.closing(session), session:
        yield
        assert state_of(optimizer).moved.host_bytes == state_bytes(optimizer) > 0


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(one.nbytes for state in optimizer.state.values() for one in state.values() if one.dim())


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


# transformers.


def trained_by_transformers(folder: Path, callbacks: list[Any], *, is_resumed: bool = False, **options: Any) -> Any:
    pytest.importorskip("accelerate")
    from tests.integrations.test_huggingface import arguments, gpt, texts

    transformers = pytest.importorskip("transformers")
    trainer = transformers.Trainer(
        gpt(), arguments(folder, **options), train_dataset=texts(), eval_dataset=texts(8), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=is_resumed)
    return values_of(trainer.model), trainer.optimizer.state_dict()["state"]


@pytest.mark.parametrize("options", [{}, {"bf16": True, "max_grad_norm": 0.5}, {"optim": "adafactor"}], ids=str)
def test_the_trainer_of_transformers_trains_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from vdnn.integrations.huggingface import OffloadCallback

    callback = OffloadCallback(**OPTIONS)
    assert same(
        trained_by_transformers(tmp_path, [], **options), trained_by_transformers(tmp_path, [callback], **options)
    )
    assert "optimizer state of" in callback.report
    assert " 0 B on the host" not in callback.report


def test_the_trainer_of_transformers_resumes_from_a_checkpoint_saved_inside(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from vdnn.integrations.huggingface import OffloadCallback
    from vdnn.integrations.offload_arguments import OffloadArguments

    saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
    plain = trained_by_transformers(tmp_path / "plain", [])
    given = OffloadArguments(vdnn_device="sim", vdnn_min_bytes="0", vdnn_offload_optimizer=True)
    trained_by_transformers(
        tmp_path / "ours", [OffloadCallback(given)], **saving, max_steps=3, lr_scheduler_type="constant"
    )
    resumed = trained_by_transformers(
        tmp_path / "ours", [OffloadCallback(**OPTIONS)], is_resumed=True, lr_scheduler_type="constant"
    )
    constant = trained_by_transformers(tmp_path / "plain", [], lr_scheduler_type="constant")
    assert same(constant, resumed)
    assert not same(plain, resumed)


def test_the_trainer_of_transformers_leaves_the_state_where_it_is_unless_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from vdnn.integrations.huggingface import OffloadCallback

    callback = OffloadCallback(**ON_SIM)
    trained_by_transformers(tmp_path, [callback])
    assert "optimizer state of" not in callback.report


@pytest.mark.parametrize("option", [{"optimizer_on": "cpu"}, {"gradients": True}], ids=str)
def test_options_of_the_optimizer_reach_the_session_of_a_run(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Give offload_optimizer=True as well"):
        TrainingRun(None, {**ON_SIM, **option})
    run = TrainingRun(None, {**OPTIONS, **option})
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    run.look_into(model)
    run.begin(torch.device("cpu"), [optimizer])
    model(torch.ones(2, 32)).sum().backward()
    gradient_is_away = native_gradient(model.weight) is None
    optimizer.step()
    assert isinstance(run.session, vdnn.Session)
    assert run.session._steps_on_cpu == ("optimizer_on" in option)
    run.end()
    assert gradient_is_away == ("gradients" in option), run.report  # which says if the host refused it


WHOLE: dict[str, Any] = {**OPTIONS, "parameters": "all", "gradients": True}


def test_a_run_that_keeps_parameters_on_the_host_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="parameters: those of the optimizer, too. Give offload_optimizer=True"):
        TrainingRun(None, {**ON_SIM, "parameters": "all"})
    with pytest.raises(ValueError, match="parameters: expected 'frozen', 'all' or None, got 'most'"):
        TrainingRun(None, {**ON_SIM, "parameters": "most"})


@pytest.mark.parametrize("options", [{}, {"bf16": True, "max_grad_norm": 0.5, "gradient_checkpointing": True}], ids=str)
def test_the_whole_training_state_is_on_the_host_in_the_trainer_of_transformers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    from vdnn.integrations.huggingface import OffloadCallback
    from vdnn.integrations.offload_arguments import OffloadArguments

    callback = OffloadCallback(**WHOLE)
    plain = trained_by_transformers(tmp_path, [], **options)
    assert same(plain, trained_by_transformers(tmp_path, [callback], **options))
    for what in ("optimizer state of AdamW", "gradients of AdamW", "parameters: "):
        assert f"  {what}" in callback.report
    given = OffloadArguments(vdnn_offload_optimizer=True, vdnn_parameters="all", vdnn_gradients=True)
    assert {"parameters": "all", "gradients": True}.items() <= given.options().items()


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_adapters_by_peft_train_the_same_beside_a_frozen_model_on_the_host(use_reentrant: bool | None) -> None:
    """Frozen parameters, gradients and state at once, under autocast with a scaler, and with checkpoints."""
    peft: Any = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from tests.integrations.test_huggingface import gpt, texts

    def trained(is_managed: bool) -> tuple[list[Any], str]:
        model = peft.get_peft_model(gpt(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        given: dict[str, Any] = {"model": model, "optimizer": optimizer, "parameters": "frozen", "gradients": True}
        session = vdnn.offload("vdnn-all", **ON_SIM, **given) if is_managed else None
        with contextlib.nullcontext() if session is None else session:
            for one in texts(4):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(**{name: value[None] for name, value in one.items()}).loss
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        report = "" if session is None else session.report()
        if session is not None:
            session.close()
        return [values_of(model), optimizer.state_dict()], report

    plain, (ours, report) = trained(False)[0], trained(True)
    assert same(plain, ours)
    for what in ("optimizer state of AdamW", "gradients of AdamW", "frozen parameters: "):
        assert f"  {what}" in report


def test_another_value_than_true_or_false_is_refused() -> None:
    pytest.importorskip("transformers")
    from vdnn.integrations.huggingface import OffloadCallback

    with pytest.raises(TypeError, match="offload_optimizer: expected True or False, got 'cpu'"):
        OffloadCallback(device="sim", offload_optimizer="cpu")


# Under a plan, and several ranks that agree on one.


def test_a_budget_of_the_trainer_is_planned_without_the_state(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from vdnn.integrations.huggingface import OffloadCallback

    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        callback = OffloadCallback(
            policy="prefix-cut", budget="min", device=machine, min_bytes=0, limits=NARROW, offload_optimizer=True
        )
        ours = trained_by_transformers(tmp_path, [callback])
    assert same(trained_by_transformers(tmp_path, []), ours)
    assert callback.session is not None
    assert callback.session.plan is not None


# Loops of public programs.


def test_a_loop_as_nanogpt_has_it_trains_the_same() -> None:
    """Two groups, fused AdamW, a scaler, micro-batches, clipping, a learning rate that is written to the groups."""

    def trained(inside: Any) -> list[Any]:
        pytest.importorskip("transformers")
        from tests.integrations.test_huggingface import gpt, texts

        model = gpt()
        decayed = [one for one in model.parameters() if one.dim() >= 2]
        others = [one for one in model.parameters() if one.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        tokens = torch.stack([one["input_ids"] for one in texts()])
        losses = []
        with inside(optimizer):
            for step in range(8):
                for group in optimizer.param_groups:
                    group["lr"] = 6e-4 * min(1.0, (step + 1) / 4)
                for micro_step in range(4):
                    batch = tokens[8 * ((step + micro_step) % 8) :][:8]
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = model(input_ids=batch, labels=batch).loss / 4
                    losses.append(loss.detach().clone())
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
            return [losses, values_of(model), optimizer.state_dict()]

    assert same(trained(lambda _: contextlib.nullcontext()), trained(managing))
