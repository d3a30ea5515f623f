"""GRPO with LoRA in a loop of one's own: generates, trains and evaluates inside one session.

python examples/grpo.py                    # on a GPU
python examples/grpo.py --device titan-x   # on the CPU, as if it were that card

TRL's GRPOTrainer takes `callbacks=[OffloadCallback(budget="16GiB")]` instead. `qwen3` is one forward and backward pass
of a whole-size case, to be planned without a GPU and without weights:

vdnn plan examples/grpo.py:qwen3 --batch 4 --training --optimizer adamw --hardware rtx-4090 --host 64GiB
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import vdnn

WORDS = 256


def decoder() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, bos_token_id=2, eos_token_id=1, **sizes))


def likelihoods(model: Any, texts: Tensor, mask: Tensor, new: int) -> Tensor:
    """The log-likelihood of each of the last `new` tokens."""
    logits = model(input_ids=texts, attention_mask=mask).logits[:, -new - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, texts[:, -new:, None])[..., 0]  # type: ignore[no-any-return]


def qwen3(batch: int) -> Any:
    """Qwen3 8B in bfloat16 with LoRA: the pass over `batch` texts of 2,560 tokens, 2,048 of them generated."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    base = Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, num_key_value_heads=8, head_dim=128, **sizes))
    adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = peft.get_peft_model(base.to(torch.bfloat16), adapters)
    texts = torch.randint(3, 151936, (batch, 2560))

    def loss(output: Any) -> Tensor:
        chosen = output.logits[:, -2049:-1].float().log_softmax(-1).gather(-1, texts[:, -2048:, None])
        return -chosen.mean()

    return model, {"input_ids": texts}, loss


@torch.no_grad()
def sampled(model: Any, prompt: Tensor, longest: int) -> tuple[Tensor, ...]:
    """A group of texts for one prompt, with their advantages and their likelihoods under model and reference."""
    model.eval()
    texts = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=longest, do_sample=True)
    mask, new = (texts != 0).long(), texts.shape[1] - prompt.shape[1]
    reward = (texts[:, -new:] % 7 == 0).float().mean(1)  # put your own here
    advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
    old = likelihoods(model, texts, mask, new)
    with model.disable_adapter():
        reference = likelihoods(model, texts, mask, new)
    model.train()
    return texts, mask, advantage, old, reference


def grpo_loss(model: Any, texts: Tensor, mask: Tensor, advantage: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    now, weight = likelihoods(model, texts, mask, old.shape[1]), mask[:, -old.shape[1] :].float()
    ratio = (now - old).exp()
    gain = torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
    divergence = (reference - now).exp() - (reference - now) - 1
    return ((0.05 * divergence - gain) * weight).sum() / weight.sum()


def train(options: argparse.Namespace) -> torch.nn.Module:
    on_gpu = options.device == "cuda"
    place = "cuda" if on_gpu else "cpu"
    card: Any = "cuda" if on_gpu else vdnn.VirtualMachine(options.device, fake=False)
    with contextlib.nullcontext() if on_gpu else card:
        torch.manual_seed(0)
        model: Any = peft.get_peft_model(decoder(), peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).to(place)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
        with vdnn.offload(
            budget=options.budget, device=card, min_bytes="4KiB", model=model, parameters="frozen"
        ) as session:
            for step in range(options.steps):
                prompts = torch.randint(3, WORDS, (2, 1, 8 + step), device=place)
                groups = [sampled(model, prompt.repeat(4, 1), 24 + 16 * turn) for turn, prompt in enumerate(prompts)]
                for _ in range(2):  # steps on the same texts
                    for group in groups:  # accumulated
                        loss = grpo_loss(model, *group) / len(groups)
                        loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    text = prompts[:, 0]
                    print(f"step {step}: loss {loss.item():.4f}, held out {model(text, labels=text).loss.item():.4f}")
        print(session.report())
    return model  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or the name of a card to be simulated on the CPU")
    parser.add_argument("--budget", default="80%", help="12GiB, 80%%, min")
    parser.add_argument("--steps", type=int, default=3)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
