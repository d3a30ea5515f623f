"""Models of transformers that read values while they are made or run, and are converted as their docs convert them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vdnn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
WORDS = 512


def of_tokens(kind: str, **options: Any) -> Any:
    def build(batch: int) -> Any:
        config = getattr(transformers, f"{kind}Config")(**SMALL, vocab_size=WORDS, pad_token_id=0, **options)
        config.bos_token_id, config.eos_token_id = 1, 2
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
        tokens = torch.randint(WORDS, (batch, 64))
        return model, {"input_ids": tokens, "labels": tokens}

    return build


def classified(kind: str, **options: Any) -> Any:
    def build(batch: int) -> Any:
        config = getattr(transformers, f"{kind}Config")(**SMALL, vocab_size=WORDS, pad_token_id=0, **options)
        model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
        tokens = torch.randint(1, WORDS, (batch, 64))
        mask = torch.ones(batch, 64, dtype=torch.long)
        return model, {"input_ids": tokens, "attention_mask": mask, "labels": torch.zeros(batch, dtype=torch.long)}

    return build


def images(batch: int) -> Any:
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=64)).cuda()
    return model, {"pixel_values": torch.randn(batch, 3, 64, 64).cuda(), "labels": torch.zeros(batch).long().cuda()}


def stages(batch: int) -> Any:
    config = transformers.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 128], drop_path_rate=0.1)
    return transformers.ConvNextForImageClassification(config), torch.randn(batch, 3, 64, 64)


def speech(batch: int) -> Any:
    config = transformers.Wav2Vec2Config(**SMALL, vocab_size=32, num_conv_pos_embeddings=16)
    labels = torch.randint(1, 32, (batch, 8))
    return transformers.Wav2Vec2ForCTC(config), {"input_values": torch.randn(batch, 16000), "labels": labels}


ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "output_router_logits": True}
MODELS = {
    "Llama": of_tokens("Llama", num_key_value_heads=2),
    "Qwen2Moe": of_tokens("Qwen2Moe", num_key_value_heads=2, shared_expert_intermediate_size=64, **ROUTED),
    "Mixtral": of_tokens("Mixtral", num_key_value_heads=2, num_local_experts=4),
    "DebertaV2": classified("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "ModernBert": classified("ModernBert", cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    "Longformer": classified("Longformer", attention_window=16, sep_token_id=2),
    "ViT": images,
    "ConvNext": stages,
    "Wav2Vec2": speech,
}
LONG = ("Longformer", "Wav2Vec2")


@pytest.mark.drawn(of=3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in MODELS]
)
def test_a_model_is_planned_and_runs_as_predicted(name: str) -> None:
    report = vdnn.plan(MODELS[name], 64, hardware="a100-80", budget="min", min_bytes="64KiB")
    assert report.executed is not None
    assert report.executed.step_ns == report.planned.timeline.step_ns
    assert report.executed.peak_bytes == report.planned.timeline.peak_bytes
