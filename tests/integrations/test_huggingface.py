"""transformers' Trainer, PEFT, accelerate and TRL: the real libraries, on the CPU, with the same weights bit for
bit."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import vdnn
from tests.integrations import trainer_ranks
from tests.integrations.parallel_training import moving
from tests.integrations.ranks import Ranks
from tests.runtime.rigs.side_by_side import same_bits
from vdnn.errors import CombinationError
from vdnn.integrations.offload_arguments import OffloadArguments

if TYPE_CHECKING:
    import transformers

    from vdnn.integrations.huggingface import OffloadCallback, refuse_what_cannot_work
elif not (find_spec("transformers") and find_spec("accelerate")):
    pytest.skip("the Trainer needs transformers and accelerate: pip install 'vdnn[hf]'", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Imports what takes three seconds here, and not in every collection."""
    global OffloadCallback, refuse_what_cannot_work, transformers
    import transformers

    from vdnn.integrations.huggingface import OffloadCallback, refuse_what_cannot_work


STEPS = 6
Values = dict[str, torch.Tensor]


def gpt() -> Any:
    import transformers  # ranks call this without the fixture

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def texts(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.randint(3, 64, (24,), generator=generator) for _ in range(count)]
    return [{"input_ids": one, "labels": one} for one in tokens]


def arguments(folder: Path, **options: Any) -> Any:
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    import transformers

    return transformers.TrainingArguments(output_dir=str(folder), **{**quiet, **batches, **options})


def values_of(model: torch.nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(plain: Values, ours: Values) -> None:
    assert list(plain) == list(ours)
    assert [name for name in plain if not same_bits(plain[name], ours[name])] == []


# The Trainer.


def train_plainly(folder: Path, model: Any, **options: Any) -> Values:
    args = arguments(folder, **options)
    trainer = transformers.Trainer(model, args, train_dataset=texts(), eval_dataset=texts(8))
    trainer.train()
    return values_of(model)


def train_with(callback: OffloadCallback, folder: Path, model: Any, **options: Any) -> Values:
    args = arguments(folder, **options)
    trainer = transformers.Trainer(model, args, train_dataset=texts(), eval_dataset=texts(8))
    trainer.add_callback(callback)
    trainer.train()
    return values_of(model)


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"gradient_checkpointing": True}, {"eval_strategy": "steps", "eval_steps": 2}],
    ids=["plain", "bf16", "checkpointing", "evaluating"],
)
def test_the_trainer_trains_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    callback = OffloadCallback(device="sim", min_bytes=0)
    assert_same(train_plainly(tmp_path, gpt(), **options), train_with(callback, tmp_path, gpt(), **options))
    session = callback.session
    assert session is not None
    assert session.counters.storages, callback.report
    assert session.num_steps == STEPS
    assert "offloaded" in callback.report


def test_the_trainer_follows_a_plan(tmp_path: Path) -> None:
    plain = train_plainly(tmp_path, gpt())
    with vdnn.VirtualMachine("titan-x", fake=False) as machine:
        callback = OffloadCallback(budget="min", policy="prefix-cut", device=machine, min_bytes=0)
        assert_same(plain, train_with(callback, tmp_path, gpt()))
    assert callback.session is not None
    assert callback.session.plan is not None
    assert callback.session.plan.offloaded_bytes


def test_the_callback_costs_one_line() -> None:
    plain, ours = (inspect.getsource(one).splitlines()[1:] for one in (train_plainly, train_with))
    assert len(ours) == len(plain) + 1


def test_a_training_that_raised_can_be_started_again(tmp_path: Path) -> None:
    callback, model = OffloadCallback(device="sim", min_bytes=0), gpt()

    def fail(*_: Any) -> None:
        raise RuntimeError("enough")

    handle = model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="enough"):
        train_with(callback, tmp_path, model)
    handle.remove()
    assert_same(train_plainly(tmp_path, gpt()), train_with(callback, tmp_path, gpt()))
    with vdnn.offload(device="sim"):
        pass  # the session of the failed run was closed, so another one can be entered


def test_the_session_of_a_training_that_raised_can_be_left(tmp_path: Path) -> None:
    callback, model = OffloadCallback(device="sim", min_bytes=0), gpt()
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_with(callback, tmp_path, model)
    callback.close()
    with vdnn.offload(device="sim"):
        pass


def test_options_come_from_a_command_line(tmp_path: Path) -> None:
    parser = transformers.HfArgumentParser((OffloadArguments,))
    (parsed,) = parser.parse_args_into_dataclasses(
        ["--vdnn_device", "sim", "--vdnn_min_bytes", "0", "--vdnn_recompute", "false", "--vdnn_policy", "vdnn-all"]
    )
    assert parsed == OffloadArguments.from_options(device="sim", min_bytes="0", recompute=False, policy="vdnn-all")
    callback = OffloadCallback(parsed)
    train_with(callback, tmp_path, gpt())
    assert callback.session is not None
    assert callback.session.counters.storages


# Options that are refused before training.


def test_a_model_on_the_cpu_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(CombinationError, match="vdnn.offload does not work with a model on cpu: .* device='sim'"):
        train_with(OffloadCallback(), tmp_path, gpt())


def test_a_wrong_option_is_refused_before_there_is_a_trainer() -> None:
    with pytest.raises(ValueError, match="device"):
        OffloadCallback(device="tpu")
    with pytest.raises(TypeError, match="got both"):
        OffloadCallback(OffloadArguments(), device="sim")
    with pytest.raises(TypeError, match="expected policy, budget, .*, got colour"):
        OffloadArguments.from_options(colour="blue")


class Args:
    n_gpu = 1
    deepspeed = deepspeed_plugin = None
    activation_offloading = torch_compile = False

    def __init__(self, **facts: Any) -> None:
        vars(self).update(facts)


@pytest.mark.parametrize(
    ("facts", "both_sides"),
    [
        ({"n_gpu": 2}, "OffloadCallback does not work with nn.DataParallel over 2 GPUs: .*torchrun"),
        (
            {"activation_offloading": True},
            "OffloadCallback does not work with activation_offloading=True: .* Leave one",
        ),
        ({"deepspeed": "zero3.json"}, "OffloadCallback does not work with DeepSpeed: .* Use FSDP2"),
        ({"deepspeed_plugin": object()}, "OffloadCallback does not work with DeepSpeed: .* Use FSDP2"),
    ],
)
def test_what_cannot_work_is_refused_naming_both_sides_and_the_way_out(facts: dict[str, Any], both_sides: str) -> None:
    refuse_what_cannot_work(Args())
    with pytest.raises(CombinationError, match=both_sides):
        refuse_what_cannot_work(Args(**facts))


@pytest.mark.slow
def test_a_model_that_the_trainer_compiles_as_a_whole_trains_the_same_and_is_warned_of(
    tmp_path: Path,
) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    plain = train_plainly(tmp_path, gpt(), **options)
    torch._dynamo.reset()
    callback = OffloadCallback(device="sim", min_bytes=0)
    with pytest.warns(
        vdnn.VdnnWarning, match="compiled as a whole needs all of its saved tensors .*Compile its layers"
    ):
        assert_same(plain, train_with(callback, tmp_path, gpt(), **options))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"torch_compile_mode": "reduce-overhead"}, "by backend='inductor', mode='reduce-overhead'"),
        ({"torch_compile_mode": "max-autotune"}, "by backend='inductor', mode='max-autotune'"),
    ],
)
def test_cuda_graphs_are_refused_when_a_trainer_is_made(tmp_path: Path, options: dict[str, Any], asked: str) -> None:
    args = arguments(tmp_path, torch_compile=True, **options)
    with pytest.raises(CombinationError, match=f"the CUDA graphs of torch.compile {asked}: .* mode='default'"):
        transformers.Trainer(gpt(), args, train_dataset=texts(), callbacks=[OffloadCallback(device="sim")])


def test_a_layer_with_cuda_graphs_is_refused_when_training_begins(tmp_path: Path) -> None:
    model = gpt()
    model.transformer.h[1].compile(mode="reduce-overhead")
    with pytest.raises(CombinationError, match=r"the CUDA graphs of torch.compile in 'transformer.h.1'"):
        train_with(OffloadCallback(device="sim"), tmp_path, model)


# Several processes.


def test_the_trainer_over_two_processes_trains_the_same(tmp_path: Path, two_ranks: Ranks) -> None:
    first, second = two_ranks.run(trainer_ranks.train, str(tmp_path))
    for facts in (first, second):
        assert facts["differing"] == []
        assert facts["storages"]
        assert facts["is_parallel"]
    assert first["digest"] == second["digest"]


def test_the_trainers_ranks_agree_on_one_plan_under_a_budget(tmp_path: Path, two_ranks: Ranks) -> None:
    first, second = two_ranks.run(trainer_ranks.train_under_a_budget, str(tmp_path))
    assert first["plan"] == second["plan"]
    for facts in (first, second):
        assert facts["differing"] == []
        assert facts["offloaded_bytes"]
        assert facts["is_parallel"]


# PEFT.


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_lora_trains_the_same_and_frozen_weights_stay(tmp_path: Path, kind: str) -> None:
    peft: Any = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=kind == "dora")
        return peft.get_peft_model(gpt(), config)

    callback = OffloadCallback(device="sim", min_bytes=0)
    assert_same(train_plainly(tmp_path, adapted()), train_with(callback, tmp_path, adapted()))
    session = callback.session
    assert session is not None
    assert session.counters.storages
    model = adapted()
    frozen = {one.untyped_storage()._cdata for one in model.parameters() if not one.requires_grad}
    left = []
    with vdnn.offload("vdnn-all", device="sim", min_bytes=0) as one_step:
        loss = model(**{name: value[None] for name, value in texts(1)[0].items()}).loss
        left = [key[0] for key in one_step._engine.saves.table.entries]
    assert left
    assert not frozen & set(left)
    loss.backward()


# accelerate.


def accelerated(precision: str) -> Values:
    accelerate: Any = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = torch.utils.data.DataLoader(texts(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return values_of(accelerator.unwrap_model(model))


@pytest.mark.drawn(of=2)
@pytest.mark.parametrize("how", ["moves", "prefix-cut"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_of_accelerate_trains_the_same(how: str, precision: str) -> None:
    plain = accelerated(precision)
    with moving(how) as session:
        ours = accelerated(precision)
    assert_same(plain, ours)
    assert session.counters.storages
    assert session.num_steps == 8


# TRL.


NO_TRL = "trl is not installed: with datasets, pandas and pyarrow it takes 270 MB"


def finetuned(folder: Path, callbacks: list[Any]) -> Values:
    trl: Any = pytest.importorskip("trl", reason=NO_TRL)
    datasets: Any = pytest.importorskip("datasets")
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": [one["input_ids"].tolist() for one in texts()]})
    rows = datasets.Dataset(table, fingerprint="texts")  # else it would hash the data by pickling pyarrow's classes
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    size: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 8, "max_length": 24, "bf16": False}
    size["dataset_kwargs"] = {"skip_prepare_dataset": True}  # the data is already tokens
    config = trl.SFTConfig(output_dir=str(folder), **{**quiet, **size})
    vocabulary: Any = pytest.importorskip("tokenizers")
    words = {f"w{index}": index for index in range(64)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary.Tokenizer(vocabulary.models.WordLevel(words, unk_token="w0")),
        pad_token="w0",
        eos_token="w1",
    )
    model = gpt()
    trainer = trl.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
    trainer.train()
    return values_of(model)


OF_TRL = pytest.mark.filterwarnings("ignore")  # the libraries raise warnings of their own classes


@OF_TRL
def test_trl_finetunes_the_same(tmp_path: Path) -> None:
    callback = OffloadCallback(device="sim", min_bytes=0)
    assert_same(finetuned(tmp_path, []), finetuned(tmp_path, [callback]))
    assert callback.session is not None
    assert callback.session.counters.storages


@OF_TRL
def test_trls_own_offloading_is_refused_beside_ours(tmp_path: Path) -> None:
    trl: Any = pytest.importorskip("trl", reason=NO_TRL)
    config = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, activation_offloading=True)
    with pytest.raises(CombinationError, match="activation_offloading=True"):
        OffloadCallback(device="sim").on_train_begin(config, None, None)
