"""A callback for the Trainer of transformers and its subclasses (TRL's SFTTrainer), which trains inside a session.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[OffloadCallback(budget="12GiB")])

accelerate, PEFT and your own loops need only `with vdnn.offload(...)`.
"""

from __future__ import annotations

from typing import Any

from vdnn.errors import CombinationError, LibraryMissingError
from vdnn.integrations.offload_arguments import OffloadArguments
from vdnn.integrations.training_run import TrainingRun, warn_of_whole_compile
from vdnn.runtime.session.session import Session
from vdnn.runtime.torch_internals.cuda_graphs import refuse_graphs_of

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise LibraryMissingError(what="vdnn.integrations.huggingface", library="transformers", extra="hf") from None

_OURS = "vdnn's OffloadCallback"


class OffloadCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # untyped where it is not installed
    """Takes OffloadArguments or the options of vdnn.offload, and `offload_optimizer=True` to keep the state of the
    Trainer's optimizer on the host, beside which `optimizer_on`, `gradients` and `parameters` work. Raises if something
    cannot work, when a trainer is made with this callback and when training begins."""

    def __init__(self, arguments: OffloadArguments | None = None, **options: Any) -> None:
        self._run = TrainingRun(arguments, options)

    @property
    def session(self) -> Session | None:
        """The session of the current run, or of the last one. None before the first."""
        return self._run.session

    @property
    def report(self) -> str:
        """The text of Session.report() for the last run."""
        return self._run.report

    def close(self) -> None:
        """Exits the session of a run that raised. The next run does so too."""
        self._run.end()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when a trainer with this callback has been made."""
        self._refuse(args, kwargs.get("model"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._refuse(args, kwargs.get("model"))
        if args.torch_compile:
            warn_of_whole_compile()
        optimizer = kwargs.get("optimizer")
        self._run.begin(args.device, [] if optimizer is None else [optimizer], kwargs.get("model"))

    def _refuse(self, args: Any, model: Any) -> None:
        refuse_what_cannot_work(args)
        if model is not None:
            self._run.look_into(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.end()


def refuse_what_cannot_work(args: Any) -> None:
    """Raises CombinationError for TrainingArguments that do not work in a session."""
    if args.n_gpu > 1:
        raise CombinationError(
            ours=_OURS,
            theirs=f"nn.DataParallel over {args.n_gpu} GPUs",
            reason="its replicas run on threads of their own, where the hooks of this thread are not called",
            way_out="Start one process for each GPU (torchrun), or make one GPU visible (CUDA_VISIBLE_DEVICES)",
        )
    if getattr(args, "activation_offloading", False):
        raise CombinationError(
            ours=_OURS,
            theirs="activation_offloading=True",
            reason="both move saved tensors, and torch calls only the innermost of nested hooks",
            way_out="Leave one of the two out",
        )
    if args.deepspeed or getattr(args, "deepspeed_plugin", None):  # `accelerate launch` sets the plugin
        raise CombinationError(
            ours=_OURS,
            theirs="DeepSpeed",
            reason="its engine has never been tested inside a session",
            way_out="Use FSDP2 (fsdp with version 2), or DDP",
        )
    if args.torch_compile:
        refuse_graphs_of(args.torch_compile_backend, args.torch_compile_mode)
