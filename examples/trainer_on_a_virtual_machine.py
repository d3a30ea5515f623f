"""The Trainer of transformers under a budget, without a GPU: real tensors, and the clock and memory of a card.

python examples/trainer_on_a_virtual_machine.py --hardware h100 --budget min
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import vdnn
from vdnn.integrations.huggingface import OffloadCallback


def texts(count: int = 64, length: int = 64) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 256, (count, length))
    return [{"input_ids": one, "labels": one} for one in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h100", help="a hardware profile: h100, titan-x, ...")
    parser.add_argument("--budget", default="min", help="12GiB, 80%%, or min")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, vdnn.VirtualMachine(options.hardware, fake=False) as machine:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64))
        callback = OffloadCallback(budget=options.budget, device=machine, min_bytes="4KiB")
        arguments = TrainingArguments(folder, max_steps=options.steps, use_cpu=True, report_to="none")
        Trainer(model, arguments, train_dataset=texts(), callbacks=[callback]).train()
    session = callback.session
    if session is not None and session.recording is not None:
        print("with everything kept:", vdnn.format_bytes(session.recording.peak_bytes))


if __name__ == "__main__":
    main()
