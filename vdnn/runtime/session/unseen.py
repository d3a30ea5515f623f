"""Says once, with the way out, that a session cannot see a part of the training.

Torch's saved-tensor hooks belong to a thread. Hooks on modules and on optimizers are called on all threads, so they
show what happens elsewhere. They compare the thread only at the call of a model and at the step of an optimizer.
"""

from __future__ import annotations

import torch

from vdnn.runtime.torch_internals.backward_ends import in_backward
from vdnn.user_warnings import warn

_WAY_OUT = (
    "Enter the same session there as well (`with session:` inside of the function that the thread runs, or the session "
    "as its decorator), or run this on the thread that entered it."
)
_WITHOUT_END = 2  # steps of optimizers elsewhere, without a call of session.step()


class Unseen:
    """Saves, forwards and steps that the sessions of one engine cannot see."""

    def __init__(self) -> None:
        self._has_warned = False
        self._steps_elsewhere = 0
        self.are_steps_marked = False  # session.step() was called

    def model_begins_elsewhere(self, model: torch.nn.Module) -> None:
        """Warns if a model is called, with gradients, on a thread that has not entered a session of this engine."""
        if self._has_warned or in_backward() or _saves_have_hooks():
            return
        self._has_warned = True
        warn(
            f"{type(model).__name__} is called on a thread that has not entered the session. What it saves there stays "
            f"on the device, in no plan and in no count of the session. {_WAY_OUT}"
        )

    def optimizer_stepped_elsewhere(self, optimizer: torch.optim.Optimizer) -> None:
        """Warns if an optimizer keeps stepping on such a thread. Its parameters are those of a model that was
        called."""
        if self._has_warned or self.are_steps_marked or in_backward() or _saves_have_hooks():
            return
        self._steps_elsewhere += 1
        if self._steps_elsewhere < _WITHOUT_END:
            return
        self._has_warned = True
        warn(
            f"{type(optimizer).__name__} steps on a thread that has not entered the session, which does not see where "
            f"a step ends. Call session.step() at its end. {_WAY_OUT}"
        )

    def nothing_was_saved(self, steps: int) -> None:
        """Called when a session is left. Warns if optimizers stepped inside it and nothing was saved."""
        if self._has_warned or steps < _WITHOUT_END:
            return
        self._has_warned = True
        warn(
            f"{steps} steps of optimizers ran inside the session, and nothing was saved in it: nothing is moved, and "
            "no budget holds. Let the session be around the forward pass as well, on the thread that runs it."
        )


def _saves_have_hooks() -> bool:
    """True if hooks are installed on this thread, such as those of another session or of checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
