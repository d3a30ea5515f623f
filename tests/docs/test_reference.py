"""The reference has every public name, and every public name says what it is.

That what it names is there is seen when the site is built: autodoc warns of a name that it does not find.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
ROOMS = ("vdnn.report", "vdnn.hardware", "vdnn.testing.deferred")
# By the directives of autodoc; of a whole module all that it names in __all__.
NAMED = re.compile(r"^\.\. auto(\w+):: ([\w.]+)", re.MULTILINE)


def documented(page: str) -> set[str]:
    names = set()
    for kind, name in NAMED.findall(page):
        names |= {f"{name}.{one}" for one in public_names(name)} if kind == "module" else {name}
    return names


def public_names(module: str) -> list[str]:
    """What it lists; else the classes that are its own."""
    loaded = importlib.import_module(module)
    own = [name for name, one in vars(loaded).items() if inspect.isclass(one) and one.__module__ == module]
    return list(getattr(loaded, "__all__", own))


def unlisted(module: str, page: str) -> list[str]:
    """A name may be listed where it is defined."""
    listed, found = documented(page), []
    for name in public_names(module):
        one = getattr(importlib.import_module(module), name)
        home = f"{getattr(one, '__module__', module)}.{name}"
        if f"{module}.{name}" not in listed and home not in listed:
            found.append(name)
    return found


def mute(module: str) -> list[str]:
    """Names without a docstring of their own: a dataclass has its signature for one. Values cannot have any."""
    found = []
    for name in public_names(module):
        one = getattr(importlib.import_module(module), name)
        text = inspect.getdoc(one)
        if (inspect.isclass(one) or callable(one)) and (not text or text.startswith(f"{name}(")):
            found.append(name)
    return found


@pytest.mark.parametrize("module", ["vdnn", *ROOMS])
def test_every_public_name_is_in_the_reference(module: str) -> None:
    assert unlisted(module, PAGE.read_text()) == []


@pytest.mark.parametrize("module", ["vdnn", "vdnn.errors", *ROOMS])
def test_every_public_name_says_what_it_is(module: str) -> None:
    assert mute(module) == []


def test_a_name_that_is_missing_is_found() -> None:
    page = PAGE.read_text()
    without = page.replace(".. autofunction:: vdnn.keep\n", "")
    assert set(unlisted("vdnn", without)) - set(unlisted("vdnn", page)) == {"keep"}
