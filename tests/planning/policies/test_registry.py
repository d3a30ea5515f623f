"""The registry of policies: names it refuses, messages for unknown names, and policies that other packages install."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from vdnn.planning.catalogue import (
    has_online,
    has_planner,
    make_planner,
    make_policy,
    planner_names,
    policy_names,
    register_policy,
)
from vdnn.planning.policies import registry
from vdnn.planning.policies.keep_all import KeepAll, KeepAllPlan

PUBLISHED = (
    "keep",
    "vdnn-all",
    "vdnn-conv",
    "vdnn-dyn",
    "largest-first",
    "prefix-cut",
    "capuchin",
    "capuchin-full",
    "chen-sqrt",
    "chen-recursive",
    "megengine-sublinear",
    "dtr",
    "tflms",
    "autoswap-doa",
    "autoswap-aoa",
    "autoswap-wdoa",
    "autoswap-swdoa",
    "swapadvisor",
)


@pytest.fixture(autouse=True)
def list_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(registry, "_are_entry_points_loaded", registry._are_entry_points_loaded)


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(registry, "_are_entry_points_loaded", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: [one for one in points if one.group == group])


def test_the_published_policies_are_there() -> None:
    assert set(PUBLISHED) <= set(planner_names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_planner_goes_by_the_name_it_is_listed_under_and_names_its_source(name: str) -> None:
    planner = make_planner(name)
    assert planner.name == name
    assert planner.source


def test_only_some_need_no_recording() -> None:
    assert [name for name in PUBLISHED if has_online(name)] == ["keep", "vdnn-all", "vdnn-conv"]
    with pytest.raises(
        ValueError, match="'capuchin' needs a recording; policies that work without one are .*'vdnn-all'"
    ):
        make_policy("capuchin")


def test_a_registered_policy_is_found_by_its_name() -> None:
    register_policy("theirs", planner=KeepAllPlan)
    assert "theirs" in policy_names()
    assert has_planner("theirs")
    assert not has_online("theirs")
    assert isinstance(make_planner("theirs"), KeepAllPlan)


def test_a_policy_without_a_planner_says_who_has_one() -> None:
    register_policy("theirs", online=KeepAll)
    with pytest.raises(ValueError, match="'theirs' makes no plans: it decides at each save.* are .*'capuchin'"):
        make_planner("theirs")


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="there is a policy 'capuchin' already"):
        register_policy("capuchin", planner=KeepAllPlan)


@pytest.mark.parametrize("name", ["", " capuchin", "theirs "])
def test_a_name_that_nobody_could_write_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        register_policy(name, planner=KeepAllPlan)


def test_a_policy_that_nothing_makes_is_refused() -> None:
    with pytest.raises(ValueError, match="'theirs' needs a callable that makes it"):
        register_policy("theirs")


@pytest.mark.parametrize("ask", [make_planner, make_policy, has_planner, has_online])
def test_an_unknown_name_is_answered_with_the_known_ones(ask: object) -> None:
    assert callable(ask)
    with pytest.raises(ValueError, match="got 'capucin'") as refused:
        ask("capucin")
    for name in policy_names():
        assert repr(name) in str(refused.value)


def test_what_is_neither_a_name_nor_a_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="or a policy, got int"):
        make_planner(3)  # type: ignore[arg-type]


def test_a_policy_itself_is_taken_as_it_is() -> None:
    planner, online = KeepAllPlan(), KeepAll()
    assert make_planner(planner) is planner
    assert make_policy(online) is online


def test_an_installed_entry_point_is_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("installed", "vdnn.planning.policies.keep_all:KeepAllPlan", registry.ENTRY_POINTS))
    assert "installed" in planner_names()
    assert isinstance(make_planner("installed"), KeepAllPlan)


def test_an_entry_point_of_another_group_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("installed", "vdnn.planning.policies.keep_all:KeepAllPlan", "others.policies"))
    assert "installed" not in policy_names()


def test_an_entry_point_does_not_take_the_place_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("capuchin", "nowhere.to_be:found", registry.ENTRY_POINTS))
    assert make_planner("capuchin").name == "capuchin"
