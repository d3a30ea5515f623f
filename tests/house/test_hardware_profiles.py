"""Hardware profiles: every shipped one is valid and has sources, and an invalid file is refused in one sentence."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vdnn.errors import InvalidArgumentError
from vdnn.hardware import HardwareProfile, LinkFigures, load_profile, profile_names

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "vdnn" / "hardware" / "profiles"
NAMES = (
    "a100-40",
    "a100-80",
    "a10g",
    "b200",
    "gb200",
    "gb300",
    "gh200",
    "gh200-x4",
    "h100",
    "h100-pcie",
    "h200",
    "k40c",
    "l40s",
    "mi300x",
    "p100",
    "rtx-2080ti",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "rtx-pro-6000",
    "t4",
    "titan-x",
    "v100-16",
    "v100-32",
)
# One card of each generation that has trained networks, oldest first.
GENERATIONS = ("titan-x", "p100", "v100-32", "a100-80", "h200")


@pytest.fixture(autouse=True)
def no_folders_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VDNN_HARDWARE_PATH", raising=False)


def content_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SHIPPED / f"{name}.json").read_text())
    return content


def written(folder: Path, content: object, name: str = "mine") -> Path:
    path = folder / f"{name}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_names_are_those_of_the_files() -> None:
    assert profile_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_loads_and_every_figure_has_a_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.description.startswith("AMD " if name == "mi300x" else "NVIDIA ")
    for figure in profile.figure_names:
        # A source is a document with a figure, or an assumption with its reason: more than a word or two.
        assert len(profile.source_of(figure).split()) >= 3, figure
        assert profile.source_of(figure).isascii()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_is_plausible(name: str) -> None:
    profile = load_profile(name)
    assert 10 * 2**30 < profile.memory_bytes < 288 * 2**30
    # A link attains less than its nominal rate, in GB/s in each direction.
    links = {"PCIe gen 3": 16e9, "PCIe gen 4": 32e9, "PCIe gen 5": 64e9, "NVLink-C2C": 450e9}
    nominal = next(rate for link, rate in links.items() if link in profile.description)
    for attained in (profile.to_host_bytes_per_s, profile.to_device_bytes_per_s):
        # Several superchips in one node reach less to the host than one alone does, or more from it.
        assert (0.6 if nominal < 100e9 else 0.35) * nominal < attained < (0.9 if nominal < 100e9 else 0.92) * nominal
    assert profile.duplex_bytes_per_s <= profile.to_host_bytes_per_s + profile.to_device_bytes_per_s
    # The card's own memory is about 20 to 150 times as fast as PCIe.
    least = 10 if nominal > 100e9 else 20
    assert least < profile.memory_bytes_per_s / profile.to_host_bytes_per_s < 150
    if profile.host:
        # The host's memory is slower than the card's, and its cores do not use more than there is.
        assert profile.host["step_bytes_per_s"] <= profile.host["memory_bytes_per_s"] < profile.memory_bytes_per_s / 5
        assert profile.host["memory_bytes"] > profile.memory_bytes
    peaks = profile.flop_per_s
    assert peaks["float32"] <= peaks.get("tf32", peaks["float32"]) <= peaks.get("float16", peaks["float32"])
    assert peaks.get("bfloat16") in (None, peaks.get("float16"))
    assert peaks["float64"] <= peaks["float32"] / 2 * 1.02  # at most half; datasheets round


def test_cards_since_ampere_have_tf32_and_earlier_ones_do_not() -> None:
    with_tf32 = {name for name in NAMES if "tf32" in load_profile(name).flop_per_s}
    without = {"k40c", "mi300x", "p100", "rtx-2080ti", "t4", "titan-x", "v100-16", "v100-32"}
    assert with_tf32 == set(NAMES) - without


def test_four_superchips_in_one_node_have_another_link_than_one() -> None:
    one, four = load_profile("gh200"), load_profile("gh200-x4")
    assert (one.to_device_bytes_per_s, one.to_host_bytes_per_s) == (346_000_000_000, 300_000_000_000)
    assert (four.to_device_bytes_per_s, four.to_host_bytes_per_s) == (411_000_000_000, 170_000_000_000)
    assert "Megatron-LM#6491" in four.source_of("to_host_bytes_per_s")
    assert "vllm#6496" in one.source_of("to_host_bytes_per_s")


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [
        ("duplex_bytes_per_s", 90e9, "at most 25600000000, both directions together"),
        ("memory_bytes_per_s", 12e9, "at least 12800000000, the rate of the link"),
        ("flop_per_s.float64", 8e12, "at most 7000000000000, the rate of float32"),
        ("host.step_bytes_per_s", 50e9, "at most 40000000000, what the host's memory reaches"),
        ("libraries.context_bytes", 12 * 2**30, "less than 12884901888, the card's memory"),
    ],
)
def test_an_impossible_figure_is_refused_in_one_sentence(tmp_path: Path, figure: str, value: float, said: str) -> None:
    content = content_of("titan-x")
    figures = content["figures"]
    figures["host"] = {"memory_bytes_per_s": {"value": 40e9, "source": "as measured on this machine"}}
    group, _, key = figure.rpartition(".")
    place = figures.setdefault(group, {}) if group else figures
    place[key] = {"value": value, "source": "a slip of the pen"}
    with pytest.raises(InvalidArgumentError) as refused:
        load_profile(written(tmp_path, content))
    message = str(refused.value)
    assert said in message
    assert figure in message
    assert "\n" not in message


def test_arithmetic_outgrows_the_link_from_generation_to_generation() -> None:
    def flop_per_link_byte(name: str) -> float:
        profile = load_profile(name)
        return max(profile.flop_per_s.values()) / profile.to_host_bytes_per_s

    ratios = [flop_per_link_byte(name) for name in GENERATIONS]
    assert ratios == sorted(ratios)
    assert ratios[0] == pytest.approx(547, abs=1)  # 7 TFLOP/s over 12.8 GB/s
    assert ratios[-1] > 30 * ratios[0]


def test_the_titan_x_is_the_machine_of_the_vdnn_paper() -> None:
    profile = load_profile("titan-x")
    assert profile.memory_bytes == 12 * 2**30
    assert profile.flop_per_s["float32"] == 7_000_000_000_000
    assert profile.memory_bytes_per_s == 336_000_000_000
    assert profile.to_host_bytes_per_s == profile.to_device_bytes_per_s == 12_800_000_000


def test_a_profile_is_a_value() -> None:
    profile = load_profile("h200")
    assert profile == load_profile("h200")
    assert hash(profile) == hash(load_profile("h200"))
    assert pickle.loads(pickle.dumps(profile)) == copy.deepcopy(profile) == profile
    with pytest.raises(AttributeError):
        profile.memory_bytes = 1  # type: ignore[misc]


def test_link_figures_are_where_they_were() -> None:
    assert LinkFigures.__module__ == "vdnn.hardware.link_figures"


def test_a_profile_loads_from_a_path(tmp_path: Path) -> None:
    content = content_of("titan-x")
    content["name"] = "my workstation"
    content["figures"]["memory_bytes_per_s"]["value"] = 336e9  # as people write it
    path = written(tmp_path, content, "anything")
    for given in (path, str(path)):
        profile = load_profile(given)
        assert profile.name == "my workstation"
        assert profile.memory_bytes_per_s == 336_000_000_000
        assert isinstance(profile.memory_bytes_per_s, int)


def test_the_folders_of_the_user_go_first_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, memory_bytes in ((first, 2**30), (second, 2**31)):
        folder.mkdir()
        content = content_of("h100")
        content["figures"]["memory_bytes"] = {"value": memory_bytes, "source": "measured on this machine"}
        written(folder, content, "h100")
    written(second, {**content_of("h100"), "name": "bench"}, "bench")
    monkeypatch.setenv("VDNN_HARDWARE_PATH", f"{first}:{second}")
    assert load_profile("h100").memory_bytes == 2**30
    assert (
        load_profile("bench").memory_bytes
        == json.loads((SHIPPED / "h100.json").read_text())["figures"]["memory_bytes"]["value"]
    )
    assert profile_names() == tuple(sorted((*NAMES, "bench")))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load_profile("gtx-9090")
    assert str(caught.value) == (
        f"hardware profile: expected one of {', '.join(NAMES)} or the path of a JSON file, got 'gtx-9090'."
    )


def test_an_unknown_figure_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"source_of: expected one of memory_bytes, .*convolution.float32, got 'speed'"
    ):
        load_profile("titan-x").source_of("speed")


Change = Callable[[dict[str, Any]], object]


def set_value(figure: str, value: object) -> Change:
    return lambda content: content["figures"][figure].update(value=value)


def set_source(figure: str, source: object) -> Change:
    return lambda content: content["figures"][figure].update(source=source)


def drop(figure: str) -> Change:
    return lambda content: content["figures"].pop(figure)


WHOLE = "a whole number above zero"
BAD_CONTENT: dict[str, tuple[Change, str]] = {
    "zero": (set_value("memory_bytes", 0), f"memory_bytes: expected {WHOLE}, got 0."),
    "negative": (set_value("link_latency_ns", -5), f"link_latency_ns: expected {WHOLE}, got -5."),
    "nan": (set_value("to_host_bytes_per_s", float("nan")), f"to_host_bytes_per_s: expected {WHOLE}, got nan."),
    "infinite": (set_value("memory_bytes_per_s", float("inf")), f"memory_bytes_per_s: expected {WHOLE}, got inf."),
    "text": (set_value("kernel_launch_ns", "5 us"), f"kernel_launch_ns: expected {WHOLE}, got '5 us'."),
    "bool": (set_value("kernel_launch_ns", True), f"kernel_launch_ns: expected {WHOLE}, got True."),
    "half a byte": (set_value("memory_bytes", 1.5), f"memory_bytes: expected {WHOLE}, got 1.5."),
    "percent": (
        set_value("compute_efficiency", 79),
        "compute_efficiency: expected a fraction above 0 and at most 1, got 79.",
    ),
    "nan fraction": (
        set_value("bandwidth_efficiency", float("nan")),
        "bandwidth_efficiency: expected a fraction above 0 and at most 1, got nan.",
    ),
    "missing": (drop("memory_bytes"), "memory_bytes: expected a value and its source, got nothing."),
    "bare value": (
        lambda content: content["figures"].update(memory_bytes=12),
        "memory_bytes: expected a value and its source, got 12.",
    ),
    "no source": (set_source("memory_bytes", "  "), "memory_bytes: expected a source in words, got none."),
    "source is a number": (set_source("memory_bytes", 7), "memory_bytes: expected a source in words, got none."),
    "slow duplex": (
        set_value("duplex_bytes_per_s", 12_000_000_000),
        "duplex_bytes_per_s: expected at least 12800000000, the rate of the faster direction alone, got 12000000000.",
    ),
    "misspelt": (
        lambda content: content["figures"].update(memory_byte={"value": 1, "source": "s"}),
        "figures: expected only figures that a profile has, got memory_byte.",
    ),
    "no peaks": (drop("flop_per_s"), "flop_per_s: expected an object of figures by dtype, got None."),
    "no float32": (
        lambda content: content["figures"]["flop_per_s"].pop("float32"),
        "flop_per_s: expected a figure for float32, got float64.",
    ),
    "unknown dtype": (
        lambda content: content["figures"]["flop_per_s"].update(fp8={"value": 1, "source": "s"}),
        "flop_per_s: expected dtypes among float64, float32, tf32, float16, bfloat16, got 'fp8'.",
    ),
    "wrong version": (lambda content: content.update(version=2), "version: expected 1, got 2."),
    "no version": (lambda content: content.pop("version"), "version: expected 1, got None."),
    "other form": (
        lambda content: content.update(form="vdnn plan"),
        "form: expected 'vdnn hardware profile', got 'vdnn plan'.",
    ),
    "no name": (lambda content: content.pop("name"), "name: expected a text, got None."),
    "no figures": (lambda content: content.pop("figures"), "figures: expected an object, got None."),
}


@pytest.mark.parametrize("fault", sorted(BAD_CONTENT))
def test_a_bad_profile_is_refused_in_one_sentence(fault: str, tmp_path: Path) -> None:
    change, sentence = BAD_CONTENT[fault]
    content = content_of("titan-x")
    change(content)
    path = written(tmp_path, content)
    with pytest.raises(InvalidArgumentError) as caught:
        load_profile(path)
    assert isinstance(caught.value, ValueError)
    said = str(caught.value)
    assert said.endswith(sentence)
    assert said.removesuffix(sentence) in (f"{path}, ", "hardware profile 'titan-x', ")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, (SHIPPED / "titan-x.json").read_text()[:500])
    with pytest.raises(ValueError, match=r"mine.json, file: expected complete JSON, got .* line \d+ column \d+"):
        load_profile(path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine.json, file: expected an object, got list."):
        load_profile(written(tmp_path, []))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.json, file: expected a readable profile, got No such file"):
        load_profile(tmp_path / "none.json")


def test_a_file_under_another_name_than_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, content_of("h100"), "h300")
    monkeypatch.setenv("VDNN_HARDWARE_PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"h300.json, name: expected 'h300', the name of the file, got 'h100'."):
        load_profile("h300")


def test_figures_made_in_a_program_are_checked_too() -> None:
    whole = dict.fromkeys(
        (
            "memory_bytes",
            "memory_bytes_per_s",
            "to_host_bytes_per_s",
            "to_device_bytes_per_s",
            "duplex_bytes_per_s",
            "link_latency_ns",
            "kernel_launch_ns",
        ),
        1,
    )
    with pytest.raises(
        ValueError, match=r"hardware profile 'made', memory_bytes: expected a source in words, got none."
    ):
        HardwareProfile(
            name="made",
            description="of ones",
            flop_per_s={"float32": 1},
            compute_efficiency=1.0,
            bandwidth_efficiency=1.0,
            sources={},
            **whole,
        )


def with_classes(figure: str, key: str, value: object) -> dict[str, Any]:
    content = content_of("v100-16")
    content["figures"].setdefault(figure, {})[key] = {"value": value, "source": "a source for this test"}
    return content


def test_figures_by_class_have_sources_and_stand_for_narrower_classes() -> None:
    profile = load_profile("v100-16")
    assert "DeepBench" in profile.source_of("efficiency.convolution.float16")
    assert profile.compute_efficiency_of(("convolution_grouped", "convolution"), "float16") == 0.45
    assert profile.compute_efficiency_of(("attention",), "float16") == profile.compute_efficiency
    assert profile.bandwidth_efficiency_of("elementwise") == profile.bandwidth_efficiency


@pytest.mark.parametrize(
    ("figure", "key", "value", "said"),
    [
        ("efficiency", "convolution.float32", 5, "efficiency.convolution.float32: expected a fraction above 0 and at"),
        ("efficiency", "batch_normalization", 1.5, "efficiency.batch_normalization: expected a fraction above 0 and"),
        ("efficiency", "recurrence.float32", 0.5, "efficiency: expected a class and a dtype of flop_per_s, as in conv"),
        ("efficiency", "product.int8", 0.5, "efficiency: expected a class and a dtype of flop_per_s, as in conv"),
        ("fill_ns", "product.float32", 0, "fill_ns.product.float32: expected a whole number above zero, got 0"),
        ("fill_ns", "batch_normalization", 10, "fill_ns: expected a class and a dtype of flop_per_s, as in conv"),
        ("tile_overhead", "product.float16", 0, "tile_overhead.product.float16: expected a whole number above zero"),
        ("tile_overhead", "convolution.float16", 9, "tile_overhead: expected a class and a dtype of flop_per_s"),
    ],
)
def test_a_wrong_figure_by_class_is_refused(tmp_path: Path, figure: str, key: str, value: object, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        load_profile(written(tmp_path, with_classes(figure, key, value)))
    assert said in str(caught.value)


def test_figures_of_the_host_are_optional_and_checked(tmp_path: Path) -> None:
    content = content_of("rtx-4090")
    profile = load_profile(written(tmp_path, content))
    assert profile.host["memory_bytes"] == 128 * 2**30
    assert profile.source_of("host.memory_bytes_per_s").startswith("assumption: ")
    del content["figures"]["host"]
    assert load_profile(written(tmp_path, content)).host == {}
    content["figures"]["host"] = {"sockets": {"value": 2, "source": "a look under the desk"}}
    with pytest.raises(InvalidArgumentError, match="expected figures among memory_bytes, .*, got 'sockets'"):
        load_profile(written(tmp_path, content))
