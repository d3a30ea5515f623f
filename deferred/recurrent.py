"""Recurrent layers of the same operations, in the same order, as torch's on the CPU, so that every bit is equal.

On an accelerator torch calls one fused operation for a cell (_thnn_fused_lstm_cell), which does not exist on the CPU.
These layers use only operations that the CPU has. Packed sequences are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# The weights for the input and for the hidden state, then the two biases if there are any.
_Weights = Sequence[Tensor]
# Runs a layer in one direction: returns the outputs and the last state.
_Layer = Callable[[Tensor, tuple[Tensor, ...], _Weights, bool], tuple[Tensor, tuple[Tensor, ...]]]
# Returns the next state, from the gates' contributions of the input and of the hidden state.
_Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def register_recurrent_layers(torch_key: str) -> Any:
    """Registers the layers with torch's dispatcher. They stay registered while the returned library lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    operations: dict[str, Callable[..., Any]] = {
        "lstm.input": _lstm,
        "gru.input": _gru,
        "rnn_tanh.input": _rnn_tanh,
        "rnn_relu.input": _rnn_relu,
        "lstm_cell": _lstm_cell,
        "gru_cell": _gru_cell,
    }
    for name, operation in operations.items():
        for key in (torch_key, f"Autograd{torch_key}"):
            library.impl(name, operation, key)  # type: ignore[no-untyped-call]
    return library


def _stacked(
    layer: _Layer,
    x: Tensor,
    states: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Runs the stacked layers: returns the outputs of the last layer, and the last states of all layers."""
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    per_layer = 4 if has_biases else 2
    initial_states = list(zip(*(part.unbind(0) for part in states), strict=True))
    last: list[tuple[Tensor, ...]] = []
    for number in range(layers):
        outputs = []
        for direction in range(directions):
            index = directions * number + direction
            own = weights[per_layer * index : per_layer * (index + 1)]
            output, state = layer(x, initial_states[index], own, direction == 1)
            outputs.append(output)
            last.append(state)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if dropout and train and number < layers - 1:
            x = functional.dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _layer_of(cell: _Cell) -> _Layer:
    def layer(x: Tensor, state: tuple[Tensor, ...], weights: _Weights, reverse: bool) -> Any:
        bias, hidden_bias = weights[2:] if len(weights) == 4 else (None, None)
        # One product for the inputs of all steps, as on the CPU: step by step the sums would differ in their order.
        steps = list(functional.linear(x, weights[0], bias).unbind(0))
        outputs = []
        for step in reversed(steps) if reverse else steps:
            state = cell(step, functional.linear(state[0], weights[1], hidden_bias), state)
            outputs.append(state[0])
        if reverse:
            outputs.reverse()
        return torch.stack(outputs), state

    return layer


def _gru_step(from_input: Tensor, from_hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    inputs, hiddens = from_input.unsafe_chunk(3, 1), from_hidden.unsafe_chunk(3, 1)
    reset = hiddens[0].add_(inputs[0]).sigmoid_()
    update = hiddens[1].add_(inputs[1]).sigmoid_()
    new = inputs[2].add(hiddens[2].mul_(reset)).tanh_()
    return ((state[0] - new).mul_(update).add_(new),)


def _lstm_step(from_input: Tensor, from_hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    gates = from_hidden.add_(from_input).unsafe_chunk(4, 1)
    into, forget, new, out = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[2].tanh_(), gates[3].sigmoid_()
    cell = (forget * state[1]).add_(into * new)
    return out * cell.tanh(), cell


def _lstm_layer_of_onednn(train: bool, x: Tensor, state: tuple[Tensor, ...], weights: _Weights, reverse: bool) -> Any:
    """The layer that the CPU uses for the dtypes that oneDNN supports."""
    has_biases = len(weights) == 4
    w, hidden_w = weights[:2]
    b, hidden_b = weights[2:] if has_biases else (torch.zeros_like(w), torch.zeros_like(hidden_w))
    hidden, cell = (part.contiguous() for part in state)
    width, lstm = hidden.size(-1), 2
    y, hidden, cell, _ = torch.mkldnn_rnn_layer(
        x.contiguous(), w, hidden_w, b, hidden_b, hidden, cell, reverse, [], lstm, width, 1,
        has_biases, False, False, train,
    )  # fmt: skip
    return y, (hidden, cell)


def _lstm(
    x: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, *how: Any
) -> tuple[Tensor, ...]:
    onednn = torch._C._get_mkldnn_enabled() and x.dtype in (torch.float32, torch.bfloat16) and x.numel() > 0
    _, _, train, *_ = how
    layer = functools.partial(_lstm_layer_of_onednn, train) if onednn else _layer_of(_lstm_step)
    if hx[0].size(2) != hx[1].size(2):
        raise NotImplementedError("the deferred accelerator does not support an LSTM with projections (proj_size)")
    return _stacked(layer, x, tuple(hx), weights, has_biases, *how)


def _gru(x: Tensor, hx: Tensor, weights: Sequence[Tensor], has_biases: bool, *how: Any) -> tuple[Tensor, ...]:
    return _stacked(_layer_of(_gru_step), x, (hx,), weights, has_biases, *how)


def _rnn_tanh(x: Tensor, hx: Tensor, weights: Sequence[Tensor], has_biases: bool, *how: Any) -> tuple[Tensor, ...]:
    layer = _layer_of(lambda from_input, from_hidden, state: (from_hidden.add_(from_input).tanh(),))
    return _stacked(layer, x, (hx,), weights, has_biases, *how)


def _rnn_relu(x: Tensor, hx: Tensor, weights: Sequence[Tensor], has_biases: bool, *how: Any) -> tuple[Tensor, ...]:
    layer = _layer_of(lambda from_input, from_hidden, state: (from_hidden.add_(from_input).relu(),))
    return _stacked(layer, x, (hx,), weights, has_biases, *how)


def _lstm_cell(
    x: Tensor,
    hx: Sequence[Tensor],
    w: Tensor,
    hidden_w: Tensor,
    b: Tensor | None = None,
    hidden_b: Tensor | None = None,
) -> tuple[Tensor, ...]:
    from_hidden = functional.linear(hx[0], hidden_w, hidden_b)
    return _lstm_step(functional.linear(x, w, b), from_hidden, tuple(hx))


def _gru_cell(
    x: Tensor, hx: Tensor, w: Tensor, hidden_w: Tensor, b: Tensor | None = None, hidden_b: Tensor | None = None
) -> Tensor:
    from_input = functional.linear(x, w, b)
    return _gru_step(from_input, functional.linear(hx, hidden_w, hidden_b), (hx,))[0]
