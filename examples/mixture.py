"""A mixture of experts under a budget: every step routes other numbers of tokens to each expert.

python examples/mixture.py                    # on a GPU
python examples/mixture.py --device titan-x   # on the CPU, as if it were that card

`mixtral` is a whole-size case, LoRA on a frozen mixture, to be planned without a GPU and without weights:

vdnn plan examples/mixture.py:mixtral --batch 1 --training --optimizer adamw --hardware rtx-4090 --host 128GiB
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import vdnn

WORDS = 256


def experts() -> MixtralForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4, **sizes)
    config.output_router_logits = True  # adds the loss that balances the experts
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


def mixtral(batch: int) -> Any:
    """Mixtral 8x7B in bfloat16 with LoRA on its attention, on texts of 4,096 tokens."""
    import peft

    config = MixtralConfig()
    config._experts_implementation = "eager"
    base = MixtralForCausalLM(config).to(torch.bfloat16)
    adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    tokens = torch.randint(config.vocab_size, (batch, 4096))
    return peft.get_peft_model(base, adapters), {"input_ids": tokens, "labels": tokens}


def train(options: argparse.Namespace) -> torch.nn.Module:
    on_gpu = options.device == "cuda"
    place = "cuda" if on_gpu else "cpu"
    card: Any = "cuda" if on_gpu else vdnn.VirtualMachine(options.device, fake=False)
    with contextlib.nullcontext() if on_gpu else card:
        torch.manual_seed(0)
        model: Any = experts().to(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with vdnn.offload(budget=options.budget, device=card, min_bytes="4KiB", optimizer=optimizer) as session:
            for step in range(options.steps):
                tokens = torch.randint(WORDS, (8, 128), device=place)
                with torch.autocast(place, torch.bfloat16):
                    loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {step}: loss {loss.item():.4f}")
        print(session.report())
    return model  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or the name of a card to be simulated on the CPU")
    parser.add_argument("--budget", default="80%", help="12GiB, 80%%, min")
    parser.add_argument("--steps", type=int, default=5)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
