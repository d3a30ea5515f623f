"""Programs in examples/ for common trainings, tiny and on the CPU under a budget: the bits of plain PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vdnn
from tests.integrations import example_ranks
from tests.integrations.example_programs import Trained
from tests.integrations.ranks import Ranks
from tests.runtime.rigs.side_by_side import same_bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

OFFLOADED = r"offloaded (\d+) storages"
WITHIN = r"budget .*: all of (\d+) steps within"
FROZEN = r"frozen parameters: .*; (\d+) copies"


def test_lora_on_images_and_clips_trains_the_same_with_its_frozen_weights_on_the_host() -> None:
    pytest.importorskip("peft")
    plain = Trained("video_lora", is_plain=True, budget="12MiB", steps=9)
    ours = Trained("video_lora", budget="12MiB", steps=9)
    assert ours.differs_from(plain) == []
    assert ours.count(OFFLOADED)
    assert ours.count(FROZEN)
    assert ours.count(WITHIN) == 9


def test_grpo_trains_the_same_with_generation_and_evaluation_between_its_steps() -> None:
    for library in ("transformers", "peft"):
        pytest.importorskip(library)
    plain = Trained("grpo", is_plain=True, budget="2200KiB", steps=3)
    ours = Trained("grpo", budget="2200KiB", steps=3)
    assert ours.differs_from(plain) == []
    assert ours.count(OFFLOADED)
    assert ours.count(FROZEN)
    assert ours.count(WITHIN) == 7  # two steps for each of three sets of texts, and the last evaluation


def test_a_mixture_of_experts_trains_the_same_whatever_its_routes() -> None:
    pytest.importorskip("transformers")
    plain = Trained("mixture", is_plain=True, budget="8MiB", steps=6)
    ours = Trained("mixture", budget="8MiB", steps=6)
    assert ours.differs_from(plain) == []
    assert ours.count(OFFLOADED)
    assert ours.count(r"steps: (\d+) of \d+ followed a plan") == 5


def test_long_texts_under_fsdp2_train_the_same(two_ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    for facts in two_ranks.run(example_ranks.long_texts):
        assert facts["differing"] == []
        assert facts["offloaded"]
        assert facts["followed"]


# The libraries that the programs stand for.


def test_a_transformer_of_diffusers_trains_the_same() -> None:
    diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
    peft: Any = pytest.importorskip("peft")

    def trained(is_plain: bool) -> tuple[dict[str, torch.Tensor], str]:
        torch.manual_seed(0)
        sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
        axes = {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "pooled_projection_dim": 16, "in_channels": 16}
        base = diffusers.FluxTransformer2DModel(**sizes, **axes)
        adapters = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
        model = peft.get_peft_model(base, adapters)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
        if is_plain:
            return flux_steps(model, optimizer), ""
        with vdnn.VirtualMachine("titan-x", fake=False) as machine:
            options: dict[str, Any] = {"model": model, "parameters": "frozen", "device": machine, "min_bytes": "1KiB"}
            with vdnn.offload(budget="6MiB", **options) as session:
                values = flux_steps(model, optimizer)
            return values, session.report()

    (plain, _), (ours, report) = trained(is_plain=True), trained(is_plain=False)
    assert [name for name in plain if not same_bits(plain[name], ours[name])] == []
    assert "frozen parameters" in report


def flux_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    for side in (8, 12, 8, 12, 8):
        patches, text = torch.randn(2, side * side, 16), torch.randn(2, 8, 32)
        places = torch.zeros(side * side, 3)
        places[:, 1], places[:, 2] = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
        predicted = model(
            hidden_states=patches,
            encoder_hidden_states=text,
            pooled_projections=torch.randn(2, 16),
            timestep=torch.rand(2),
            img_ids=places,
            txt_ids=torch.zeros(8, 3),
        )[0]
        (predicted - torch.randn_like(patches)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")  # the libraries raise warnings of their own classes
@pytest.mark.parametrize("how", ["moves", "budget", "frozen"])
def test_trls_grpo_trainer_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    pytest.importorskip("trl", reason="trl is not installed: with datasets, pandas and pyarrow it takes 270 MB")
    pytest.importorskip("datasets")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    from vdnn.integrations.huggingface import OffloadCallback

    plain = grpo_trained(tmp_path, [], has_adapter=how == "frozen")
    if how == "budget":
        with vdnn.VirtualMachine("titan-x", fake=False) as machine:
            callback = OffloadCallback(budget="min", device=machine, min_bytes="1KiB")
            ours = grpo_trained(tmp_path, [callback], has_adapter=False)
    else:
        options: dict[str, Any] = {"parameters": "frozen", "offload_optimizer": True} if how == "frozen" else {}
        callback = OffloadCallback(device="sim", min_bytes="1KiB", **options)
        ours = grpo_trained(tmp_path, [callback], has_adapter=how == "frozen")
    assert [name for name in plain if not same_bits(plain[name], ours[name])] == []
    assert callback.session is not None
    assert callback.session.counters.storages


def grpo_trained(folder: Path, callbacks: list[Any], *, has_adapter: bool) -> dict[str, torch.Tensor]:
    """Four steps of GRPO with two passes over each set of texts, a penalty towards the reference, and evaluation."""
    import datasets
    import peft
    import tokenizers
    import transformers
    import trl

    words = {f"w{index}": index for index in range(64)}
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="w0", eos_token="w1")
    if not (folder / "base").exists():  # the trainer reads its reference from a folder
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=2, **sizes)
        ).save_pretrained(folder / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    prompts = [" ".join(f"w{(7 * row + word) % 60 + 3}" for word in range(3 + row % 5)) for row in range(16)]
    table = datasets.table.InMemoryTable.from_pydict({"prompt": prompts})
    rows = datasets.Dataset(table, fingerprint="prompts")
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    batches = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 2}
    steps = {"max_steps": 4, "num_iterations": 2, "max_completion_length": 16, "beta": 0.05, "bf16": False}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = trl.GRPOTrainer(
        model,
        lambda completions, **_: [0.1 * len(one.split()) + one.count("w7") for one in completions],
        args=trl.GRPOConfig(str(folder), seed=5, learning_rate=1e-3, **quiet, **batches, **steps, **evaluated),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        processing_class=tokenizer,
        callbacks=callbacks,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if has_adapter else None,
    )
    trainer.train()
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
