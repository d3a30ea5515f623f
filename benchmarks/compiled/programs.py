"""Models of public programs, built from clones of their repositories. None of their code is here.

A directory holds the clones, each by the name of its repository. The models are small, and have layers of every kind
that the program's own have.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

_TOKENS, _WORDS, _BATCH, _SIDE, _CLASSES = 32, 64, 2, 32, 10


class _Program(NamedTuple):
    """A repository, the file of its model, the model and its inputs from that file, and the loss of both."""

    repository: str
    file: str
    build: Callable[[Any], tuple[nn.Module, tuple[Tensor, ...]]]
    loss: Callable[[Any, tuple[Tensor, ...]], Tensor]


class ProgramStep(nn.Module):
    """The model and its loss in one region."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, tuple[Tensor, ...]], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        given = inputs if self.loss is _its_own else inputs[:1]
        return self.loss(self.model(*given), inputs)


def _its_own(output: Any, _inputs: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = output[1]
    return loss


def _of_classes(output: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(output, inputs[1])


def _of_words(output: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), inputs[1].flatten())


def _of_pixels(output: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    return functional.mse_loss(output, inputs[1])


def _words() -> tuple[Tensor, Tensor]:
    return torch.randint(_WORDS, (_BATCH, _TOKENS)), torch.randint(_WORDS, (_BATCH, _TOKENS))


def _labelled() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, _SIDE, _SIDE), torch.randint(_CLASSES, (4,))


def _mingpt(module: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = module.GPT.get_default_config()
    config.model_type, config.n_layer, config.n_head, config.n_embd = None, 2, 2, 32
    config.vocab_size, config.block_size = _WORDS, _TOKENS
    return module.GPT(config), _words()


def _nanogpt(module: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = module.GPTConfig(_TOKENS, _WORDS, n_layer=2, n_head=2, n_embd=32, dropout=0.1)
    return module.GPT(config), _words()


class _LastLoss(nn.Module):
    """llama2.c keeps its loss in an attribute, and returns the logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(tokens, targets)
        return logits, self.model.last_loss  # type: ignore[return-value]


def _llama2c(module: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    arguments = module.ModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=_WORDS, multiple_of=8, max_seq_len=_TOKENS, dropout=0.1
    )
    return _LastLoss(module.Transformer(arguments)), _words()


def _transformer(module: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return module.TransformerModel(_WORDS, 32, 2, 64, 1), _words()


def _upscaling(module: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return module.Net(2), (torch.randn(_BATCH, 1, _SIDE, _SIDE), torch.randn(_BATCH, 1, 2 * _SIDE, 2 * _SIDE))


def _unet(module: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return module.UNet(3, 2), (torch.randn(1, 3, _SIDE, _SIDE), torch.randint(2, (1, _SIDE, _SIDE)))


PROGRAMS = {
    "minGPT": _Program("minGPT", "mingpt/model.py", _mingpt, _its_own),
    "nanoGPT": _Program("nanoGPT", "model.py", _nanogpt, _its_own),
    "llama2.c": _Program("llama2.c", "model.py", _llama2c, _its_own),
    "examples: transformer": _Program("examples", "word_language_model/model.py", _transformer, _of_words),
    "examples: super resolution": _Program("examples", "super_resolution/model.py", _upscaling, _of_pixels),
    "pytorch-cifar: resnet": _Program(
        "pytorch-cifar", "models/resnet.py", lambda module: (module.ResNet18(), _labelled()), _of_classes
    ),
    "pytorch-cifar: senet": _Program(
        "pytorch-cifar", "models/senet.py", lambda module: (module.SENet18(), _labelled()), _of_classes
    ),
    "pytorch-cifar: mobilenetv2": _Program(
        "pytorch-cifar", "models/mobilenetv2.py", lambda module: (module.MobileNetV2(), _labelled()), _of_classes
    ),
    "Pytorch-UNet": _Program("Pytorch-UNet", "unet/unet_model.py", _unet, _of_classes),
}


def found_in(directory: Path) -> list[str]:
    """The programs whose repositories are in `directory`."""
    return [name for name, program in PROGRAMS.items() if (directory / program.repository / program.file).exists()]


def made(name: str, directory: Path) -> tuple[ProgramStep, tuple[Tensor, ...]]:
    """The step of a program, and its inputs."""
    program = PROGRAMS[name]
    model, inputs = program.build(_loaded(directory / program.repository, program.file))
    return ProgramStep(model.train(), program.loss), inputs


def _loaded(repository: Path, file: str) -> Any:
    """The module of a file. One in a package is imported as its part, because it may import its neighbours."""
    folder = (repository / file).parent
    if (folder / "__init__.py").exists() and "models" not in folder.parts:
        sys.path.insert(0, str(repository))
        return importlib.import_module(".".join(Path(file).with_suffix("").parts))
    name = f"program_{repository.name}_{Path(file).stem}".replace(".", "_").replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, repository / file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} of {repository.name} cannot be read as a module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
