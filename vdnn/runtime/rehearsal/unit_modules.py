"""Finds the repeated blocks of a model: the modules whose bytes a plan of a whole training moves together.

A stack is a ModuleList, a Sequential or a ModuleDict with two children or more that have submodules of their own, such
as the layers of a decoder. Its children are blocks. A child that only lists others, such as a stage of a Sequential, is
searched for blocks in its turn. Blocks are not searched for other blocks, so experts of a layer are not blocks. A model
without a stack may be a Sequential of plain layers, which are blocks then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Block:
    """One block: its name in the model, its module, and the name of its stack."""

    name: str
    module: nn.Module
    stack: str


def blocks_of(model: nn.Module) -> list[Block]:
    """All blocks, in the order of the module tree. Empty if the model has no stack."""
    found = list(_blocks(model, ""))
    if len(found) > 1:
        return found
    plain = _plain_layers(model)
    return plain if len(plain) > 1 else []


def _blocks(module: nn.Module, name: str) -> Iterator[Block]:
    children = list(module.named_children())
    is_stack = isinstance(module, _LISTS) and sum(_has_children(child) for _, child in children) > 1
    for key, child in children:
        path = f"{name}.{key}" if name else key
        if is_stack and not (isinstance(child, _LISTS) and any(_has_children(one) for one in child.children())):
            yield Block(path, child, name)
        else:
            yield from _blocks(child, path)


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _plain_layers(model: nn.Module) -> list[Block]:
    """The layers of the Sequential with the most of them."""
    lists = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Sequential)]
    if not lists:
        return []
    name, longest = max(lists, key=lambda found: len(found[1]))
    return [Block(f"{name}.{key}" if name else key, child, name) for key, child in longest.named_children()]
