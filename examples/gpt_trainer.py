"""Fine-tuning a small GPT with the Trainer of transformers: its usual lines, and one callback, which logs its report.

python examples/gpt_trainer.py --output_dir build/gpt --vdnn_budget 12GiB
python examples/gpt_trainer.py --output_dir build/gpt --use_cpu true --vdnn_device sim --vdnn_min_bytes 4KiB
"""

from __future__ import annotations

import logging
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

from vdnn.integrations.huggingface import OffloadCallback
from vdnn.integrations.offload_arguments import OffloadArguments


def texts(count: int = 64, length: int = 32) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 256, (count, length))
    return [{"input_ids": one, "labels": one} for one in tokens]


def main() -> None:
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
    parser = HfArgumentParser((TrainingArguments, OffloadArguments))
    training, offloading = parser.parse_args_into_dataclasses()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    trainer = Trainer(model, training, train_dataset=texts(), callbacks=[OffloadCallback(offloading)])
    print(f"loss {trainer.train().training_loss}")


if __name__ == "__main__":
    main()
