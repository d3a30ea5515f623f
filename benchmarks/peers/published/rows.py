"""Published measurements of peers: which training, which way, on which card, and the time and memory of a step.

Each figure was read in its source. Threads were read as stored excerpts, whose ends are often missing: a row has what
was seen. A row's `base` is the row of its table that a ratio is taken over; ratios need less to be known than times.

[Note: axolotl] Neither thread names the card. axolotl's own benchmarks of that time (`tests/integrations/kernels/
scattermoe_lora/*_results.md`) ran on an RTX PRO 6000 Blackwell Max-Q, which is taken here, with the figures of the
card without Max-Q. The optimizer is not named either. In #3776 the memory beside the model, 17.16 GB, leaves room for
the gradients, 16.4 GB, and one layer: so no optimizer, and no logits of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.published.trainings import LLAMA_3B, LLAMA_8B, QWEN3_8B, Shape, Training

AXOLOTL_3776 = "axolotl-ai-cloud/axolotl#3776"
AXOLOTL_3733 = "axolotl-ai-cloud/axolotl#3733"
DEEPSPEED = "deepspeedai/DeepSpeed#8282 and #8287"
TRANSFORMERS = "huggingface/transformers#48444"
TORCHTUNE = "pytorch/torchtune README at bd2a0fc7, Optimization flags"
TORCHTUNE_CARDS = "pytorch/torchtune README at bd2a0fc7, Memory and training speed"

# What a row's memory is.
PEAK, GROWTH, AFTER_TRUNK = "peak", "peak over the model", "after the trunk, over the model"

CARD = "the card is not stated: a Max-Q card has the same memory and link, and computes more slowly"
NO_COMPILER = "published with torch.compile, which fuses what the virtual step runs and saves one by one"
RETAINED = (
    "its hooks leave on the card each save of a storage that is still being copied; how many those are depends on the "
    "kernels, and what else makes the published step longer is not known here"
)


@dataclass(frozen=True, slots=True)
class Row:
    """`step_ms` and `memory_bytes` as published, where they are; `over_base` is published instead of a time."""

    source: str
    name: str
    training: Training
    card: str
    way: str
    step_ms: float | None = None
    memory_bytes: int | None = None
    memory: str = PEAK
    base: str = ""
    over_base: float | None = None
    why: str = ""

    @property
    def key(self) -> str:
        return f"{self.source.split()[0]}: {self.name}"


def _gb(value: float) -> int:
    return round(value * 1e9)


def _gib(value: float) -> int:
    return round(value * 2**30)


def _mib(value: float) -> int:
    return round(value * 2**20)


def _qwen(tokens: int) -> Training:
    return Training(QWEN3_8B, 1, tokens, "fused")


def _axolotl(name: str, way: str, step_ms: float, growth: float, why: str = CARD) -> Row:
    key = f"{AXOLOTL_3776}: 8,192 gc"
    return Row(
        AXOLOTL_3776,
        f"8,192 {name}",
        _qwen(8192),
        "rtx-pro-6000",
        way,
        step_ms,
        _gb(growth),
        GROWTH,
        "" if name == "gc" else key,
        why=why,
    )


def _transformers(layers: int, width: int, tokens: int, kept: float, away: float) -> tuple[Row, Row]:
    shape = Shape("qwen3", layers, width, width // 128, width // 256, 3 * width, 151936)
    training = Training(shape, 1, tokens, "none")
    name = f"{layers} x {width:,} x {tokens // 1024}k"
    plain = Row(TRANSFORMERS, f"{name} plain", training, "h100", "checkpoint", None, _mib(kept), AFTER_TRUNK)
    blocking = Row(
        TRANSFORMERS,
        f"{name} offload",
        training,
        "h100",
        "checkpoint, inputs away, blocking",
        None,
        _mib(away),
        AFTER_TRUNK,
        plain.key,
    )
    return plain, blocking


def _torchtune(name: str, way: str, training: Training, gib: float, per_s: float, base: str, why: str) -> Row:
    step_ms = training.batch * training.tokens / per_s * 1e3
    return Row(TORCHTUNE, name, training, "a100-80", way, step_ms, _gib(gib), PEAK, base, why=why)


def _llama_3b(loss: str, optimizer: str = "adamw", *, in_backward: bool = False, lora_rank: int = 0) -> Training:
    return Training(LLAMA_3B, 2, 4096, loss, optimizer, in_backward, lora_rank)


_CHUNKED = "pytorch/torchtune: + chunked cross entropy"
_CHECKPOINTED = "pytorch/torchtune: + activation checkpointing"
_LLAMA_8B_FULL = Training(LLAMA_8B, 2, 2048, "chunks", "adamw-8bit-paged", in_backward=True)
_LLAMA_8B_LORA = Training(LLAMA_8B, 2, 2048, "chunks", "adamw", lora_rank=8)

ROWS: tuple[Row, ...] = (
    _axolotl("gc", "checkpoint", 2677.7, 17.16),
    _axolotl("checkpoint_hs", "checkpoint, inputs away", 2665.9, 17.09),
    _axolotl("alst", "checkpoint, inputs away, one ahead", 2836.9, 17.22),
    _axolotl("trl_gc", "checkpoint, saves away", 2758.3, 17.16),
    _axolotl("trl_all", "saves away", 4956.2, 32.50, f"{CARD}; {RETAINED}"),
    Row(AXOLOTL_3776, "16,384 gc", _qwen(16384), "rtx-pro-6000", "checkpoint", 6417.9, why=CARD),
    Row(AXOLOTL_3733, "16k gc", _qwen(16384), "rtx-pro-6000", "checkpoint", 16384 / 2.325, why=CARD),
    Row(
        AXOLOTL_3733,
        "16k hidden_states",
        _qwen(16384),
        "rtx-pro-6000",
        "checkpoint, inputs away, one ahead",
        16384 / 2.243,
        base=f"{AXOLOTL_3733}: 16k gc",
        why=CARD,
    ),
    Row(AXOLOTL_3733, "32k gc", _qwen(32768), "rtx-pro-6000", "checkpoint", 32768 / 1.954, why=CARD),
    Row(DEEPSPEED, "32k", _qwen(32768), "h200", "checkpoint"),
    Row(
        DEEPSPEED,
        "32k, inputs away",
        _qwen(32768),
        "h200",
        "checkpoint, inputs away, last kept",
        base="deepspeedai/DeepSpeed#8282: 32k",
        over_base=1.02,
        why='published as "within ~2 %"',
    ),
    *_transformers(8, 1024, 8192, 194.1, 66.1),
    *_transformers(16, 1024, 16384, 644.2, 132.2),
    *_transformers(28, 2048, 32768, 4112.4, 528.4),
    _torchtune("packed", "plain", _llama_3b("whole"), 60.0, 7075, "", ""),
    _torchtune("+ chunked cross entropy", "plain", _llama_3b("chunks"), 42.9, 9174, "", NO_COMPILER),
    _torchtune("+ activation checkpointing", "checkpoint", _llama_3b("chunks"), 24.9, 7210, _CHUNKED, NO_COMPILER),
    _torchtune(
        "+ optimizer in backward",
        "checkpoint",
        _llama_3b("chunks", in_backward=True),
        23.1,
        7309,
        _CHECKPOINTED,
        NO_COMPILER,
    ),
    _torchtune(
        "+ activation offloading",
        "checkpoint, saves away",
        _llama_3b("chunks", in_backward=True),
        21.8,
        7301,
        _CHECKPOINTED,
        NO_COMPILER,
    ),
    _torchtune(
        "+ 8-bit AdamW",
        "checkpoint, saves away",
        _llama_3b("chunks", "adamw-8bit", in_backward=True),
        17.6,
        6960,
        _CHECKPOINTED,
        NO_COMPILER,
    ),
    _torchtune(
        "LoRA", "checkpoint, saves away", _llama_3b("chunks", lora_rank=64), 8.5, 8210, _CHECKPOINTED, NO_COMPILER
    ),
    Row(
        TORCHTUNE_CARDS,
        "Llama 3.1 8B in full, RTX 4090",
        _LLAMA_8B_FULL,
        "rtx-4090",
        "checkpoint",
        4096 / 1.650,
        _gib(18.9),
        why=NO_COMPILER,
    ),
    Row(
        TORCHTUNE_CARDS,
        "Llama 3.1 8B, LoRA, RTX 4090",
        _LLAMA_8B_LORA,
        "rtx-4090",
        "checkpoint",
        4096 / 3.083,
        _gib(16.2),
        why=NO_COMPILER,
    ),
)

# Published measurements that lack a fact, and which one.
MISSING = (
    ("DeepSpeed#8282, peak at 32k (up to -14 %)", "the optimizer, and with it the peak that the share is of"),
    ("DeepSpeed#8282, micro-benchmark (-58 % at 1.057 x; blocking 6.8 x)", "the model"),
    ("axolotl#3776, other lengths", "the end of the thread's table was not to be had"),
    ("axolotl#3733, peaks (63.3 and 58.9 GB at 16k, 73.1 and 64.3 at 32k)", "the optimizer, and what the loss keeps"),
    ("axolotl#3733, speed of hidden_states at 32k", "the end of the thread's table was not to be had"),
    ("accelerate#4175 (79.43 / 24.73 / 24.73 GB, 1.08 / 1.38 / 1.86 s)", "the model beyond 24 layers, and the card"),
    ("musubi-tuner#537 (HunyuanVideo 42.7 to 31.9 GB, Wan2.2 46.4 to 34.4 GB)", "the card, the rank, swapped blocks"),
    ("pytorch#197838, memory budget .05 to .35", "width, batch and length of the model; torch.compile as well"),
    ("pytorch#167880 (9,160 to 7,534 MB at 1.022 x)", "the model and the card"),
    ("torchtune, + compile", "the virtual machine compiles nothing"),
    ("torchtune, QLoRA on an A100 and an RTX 4090", "kernels of 4-bit weights have no price in the virtual machine"),
    ("torchtune, Llama 3.1 8B on an RTX A6000 (two rows)", "no hardware profile of that card"),
    ("torchao, CPUOffloadOptimizer and 8-bit AdamW of two ViTs", "no hardware profile of an RTX 4070 Ti SUPER"),
    ("torchao, 8-bit AdamW of Llama2-7B", "the lengths of Alpaca's samples, which were not packed"),
    ("Megatron-Bridge, recompute of Moonlight-16B by module", "exchange of experts between eight cards"),
    ("Megatron-LM#7474, #1752, Kimi K2, MaxText, Unsloth", "the model, the card, or any time"),
)
