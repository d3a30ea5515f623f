"""Published steps of peers in virtual time: the rows can be run, the ways do what their sources say, and the committed
table is that of the committed figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.peers.__main__ import main
from benchmarks.peers.published import optimizer_offload
from benchmarks.peers.published.fine_tune import PEERS, TRAINING, read_cells, readme_rows
from benchmarks.peers.published.optimizers import OnePassAdamW
from benchmarks.peers.published.reproduced import Figures, VdnnStep, least_peak, place_key, run_missing
from benchmarks.peers.published.rows import MISSING, PEAK, ROWS, Row
from benchmarks.peers.published.table import compared, known, render, row_named, said, slower_places, time_ratio
from benchmarks.peers.published.trainings import Shape, Training, make
from benchmarks.peers.published.virtual_step import VirtualStep, recorded, virtual_step
from benchmarks.peers.published.ways import WAYS, SavesAway
from vdnn.hardware import load_profile, profile_names
from vdnn.runtime.machine.virtual_machine import VirtualMachine
from vdnn.runtime.rehearsal.stage import stage

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FIGURES, TABLE = RESULTS / "peers.jsonl", RESULTS / "peers.txt"

LAYERS, WIDTH, TOKENS = 4, 512, 2048
TINY = Training(Shape("llama", LAYERS, WIDTH, 4, 2, 1024, 1000), 1, TOKENS, "fused")
INPUT_BYTES = WIDTH * TOKENS * 2
CARD = "a100-80"


def step(way: str, training: Training = TINY) -> VirtualStep:
    return virtual_step(training, CARD, way)


def test_at_least_25_published_rows_are_run_and_each_names_its_source_and_a_known_card() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {row.card for row in ROWS} <= set(profile_names())
    assert {row.way for row in ROWS} <= set(WAYS)
    assert all("#" in row.source or "README at" in row.source for row in ROWS)
    for row in ROWS:
        assert not row.base or row_named(row.base).training.shape == row.training.shape
    figures = Figures(FIGURES)
    assert known(figures) == list(ROWS)
    assert compared(figures) >= 25
    assert all(lacks for _, lacks in MISSING)


def test_vdnn_is_never_slower_than_a_way_that_saves_memory_at_the_least_of_their_peaks() -> None:
    figures = Figures(FIGURES)
    assert all(figures.vdnn_of(row) is not None for row in ROWS)
    assert slower_places(figures) == []


def test_the_committed_table_is_that_of_the_committed_figures() -> None:
    assert TABLE.read_text() == render(Figures(FIGURES)) + "\n"


def test_the_page_has_the_table_and_says_of_it_what_the_figures_say() -> None:
    page = (RESULTS.parents[1] / "docs" / "benchmarks.md").read_text()
    assert TABLE.read_text() in page
    text = " ".join(page.split())
    assert [fact for fact in said(Figures(FIGURES)) if fact not in text] == []


def test_the_readme_has_the_rows_of_the_fine_tune_and_they_are_those_of_the_table_of_peers() -> None:
    cells, figures = read_cells(RESULTS / "fine_tune.jsonl"), Figures(FIGURES)
    readme = (RESULTS.parents[1] / "README.md").read_text()
    assert [row for row in readme_rows(cells, figures) if row not in readme] == []
    steps = {row.way: figures.step_of(row) for row in ROWS if (row.training, row.card) == (TRAINING, "rtx-pro-6000")}
    same = [cell for cell in cells if PEERS.get(cell.peer) in steps]
    assert len(same) == 3
    for cell in same:
        step_of_way = steps[PEERS[cell.peer]]
        assert step_of_way is not None
        assert (cell.step_ns, cell.peak_bytes) == (step_of_way.step_ns, step_of_way.peak_bytes)


def test_a_committed_figure_is_the_one_that_the_program_computes() -> None:
    row = next(row for row in ROWS if "8 x 1,024 x 8k plain" in row.key)
    assert virtual_step(row.training, row.card, row.way) == Figures(FIGURES).step_of(row)


def test_checkpointing_has_a_smaller_peak_than_plain_and_a_longer_step() -> None:
    plain, checkpoint = step("plain"), step("checkpoint")
    assert checkpoint.peak_bytes < plain.peak_bytes
    assert checkpoint.step_ns > plain.step_ns


def test_no_mask_of_all_pairs_of_tokens_is_made() -> None:
    seen: list[object] = []
    with VirtualMachine(CARD) as machine, stage(machine):
        program = make(TINY)
        for layer in program.trunk.layers:
            layer.register_forward_pre_hook(
                lambda module, inputs, named: seen.append(named["attention_mask"]), with_kwargs=True
            )
        program.step()
    assert seen == [None] * LAYERS


def test_inputs_that_leave_are_gone_at_the_loss_but_for_the_window() -> None:
    kept = step("checkpoint").forward_bytes
    assert kept - step("checkpoint, inputs away, blocking").forward_bytes == LAYERS * INPUT_BYTES
    for way, staying in (("checkpoint, inputs away", 2), ("checkpoint, inputs away, last kept", 3)):
        # The two newest are still leaving, and the last one may not leave at all.
        assert kept - step(way).forward_bytes == (LAYERS - staying) * INPUT_BYTES


def test_blocking_copies_take_their_time_and_others_overlap() -> None:
    profile = load_profile(CARD)
    copies_ns = LAYERS * sum(
        round(INPUT_BYTES / rate * 1e9) + profile.link_latency_ns
        for rate in (profile.to_host_bytes_per_s, profile.to_device_bytes_per_s)
    )
    checkpoint_ns = step("checkpoint").step_ns
    assert step("checkpoint, inputs away, blocking").step_ns == checkpoint_ns + copies_ns
    assert step("checkpoint, inputs away").step_ns < checkpoint_ns + copies_ns


def test_offloading_every_save_is_slower_than_checkpointing_and_moves_more() -> None:
    assert step("saves away").step_ns > step("checkpoint, saves away").step_ns
    assert step("saves away").forward_bytes > step("checkpoint, saves away").forward_bytes  # what its hooks retain


def test_a_storage_that_is_saved_again_while_it_leaves_stays_and_is_copied_again_behind_the_window() -> None:
    with VirtualMachine(CARD) as machine:
        hooks = SavesAway(machine, torch.nn.Linear(1, 1))
        twice, later = torch.empty(1 << 20), torch.empty(1 << 20)
        assert not isinstance(hooks.pack(twice), torch.Tensor)
        assert hooks.pack(twice) is twice
        assert hooks.kept_bytes == 4 << 20
        assert not isinstance(hooks.pack(later), torch.Tensor)
        for _ in range(6):
            hooks.pack(torch.empty(1 << 20))
        assert not isinstance(hooks.pack(later), torch.Tensor)


def test_an_optimizer_in_backward_leaves_no_gradients() -> None:
    def left(in_backward: bool) -> int:
        training = Training(TINY.shape, 1, TOKENS, "fused", "adamw", in_backward)
        with VirtualMachine(CARD) as machine, stage(machine):
            program = make(training)
            program.step()
            return sum(one.grad is not None for one in program.model.parameters())

    assert left(in_backward=True) == 0
    assert left(in_backward=False) > 0


@pytest.mark.parametrize(("in_8_bits", "of_a_parameter"), [(False, 4), (True, 2 + 8 / 256)])
def test_the_state_of_an_optimizer_has_its_bytes(in_8_bits: bool, of_a_parameter: float) -> None:
    with VirtualMachine(CARD) as machine, stage(machine):
        parameters = list(make(TINY).model.parameters())
        before = machine.allocated_bytes
        held = OnePassAdamW(parameters, in_8_bits=in_8_bits)
        taken = machine.allocated_bytes - before
        assert held.state
        # Norms have as many scales as their length asks for, rounded up.
        assert taken == pytest.approx(of_a_parameter * sum(one.numel() for one in parameters), rel=1e-3)


def test_vdnn_at_the_peak_of_checkpointing_is_no_slower() -> None:
    checkpoint = step("checkpoint")
    planned_ns = recorded(TINY, CARD).planned_ns(CARD, checkpoint.peak_bytes)
    assert planned_ns is not None
    assert planned_ns <= checkpoint.step_ns


def test_vdnn_is_planned_for_the_least_peak_of_the_ways(tmp_path: Path) -> None:
    rows = [Row(f"one#{way}", way, TINY, CARD, way, 1.0) for way in ("plain", "checkpoint")]
    figures = Figures(tmp_path / "figures.jsonl")
    run_missing(rows, figures)
    again = Figures(tmp_path / "figures.jsonl")
    vdnn = again.vdnn_of(rows[0])
    assert vdnn is not None
    assert vdnn.budget_bytes == least_peak(rows, again) == step("checkpoint").peak_bytes
    assert time_ratio(rows[0], again) == step("plain").step_ns / 1e6


def test_a_way_that_is_faster_than_vdnn_is_named(tmp_path: Path) -> None:
    row = ROWS[0]
    figures = Figures(tmp_path / "figures.jsonl")
    figures.add_step(row, VirtualStep(1_000_000, 200, 0, 0))
    figures.add_vdnn(row, VdnnStep(100, 900_000))
    assert slower_places(figures) == []
    figures.add_vdnn(row, VdnnStep(100, 1_100_000))
    assert slower_places(figures) == [f"{row.key} has 2.00 of vdnn's peak, and vdnn takes 1.100 of it"]
    figures.add_vdnn(row, VdnnStep(100, None))
    assert "vdnn needs more memory" in slower_places(figures)[0]


def test_a_quarter_of_the_optimizer_has_a_quarter_of_the_moments_and_vdnn_is_faster() -> None:
    for row in optimizer_offload.ROWS:
        assert optimizer_offload.saved_bytes(row) / 1e9 == pytest.approx(row.saved_gb, rel=0.02)
        assert optimizer_offload.vdnn_step(row).step_ns / 1e6 < min(row.step_ms, optimizer_offload.bridge_ms(row))
    quarter, half = optimizer_offload.ROWS[:2]
    added = [optimizer_offload.bridge_ms(row) - optimizer_offload.BASE_MS for row in (quarter, half)]
    assert added[1] == pytest.approx(2 * added[0])


def test_the_command_refuses_a_row_that_nothing_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "figures.jsonl"), "--row", "no such row"])
    assert "a row is named as in" in capsys.readouterr().err


def test_places_differ_by_training_and_card() -> None:
    assert len({place_key(row.training, row.card) for row in ROWS}) >= 10
    assert {row.memory for row in ROWS} > {PEAK}
