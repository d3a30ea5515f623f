"""The reference lists every public name, and every public name has a docstring.

Building the site checks that every listed name exists: autodoc warns of a name that it does not find.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
ROOMS = ("vdnn.report", "vdnn.hardware", "deferred")
# Names given to autodoc directives. For a whole module, these are the names in its __all__.
NAMED = re.compile(r"^\.\. auto(\w+):: ([\w.]+)", re.MULTILINE)


def documented(page: str) -> set[str]:
    names = set()
    for kind, name in NAMED.findall(page):
        names |= {f"{name}.{one}" for one in public_names(name)} if kind == "module" else {name}
    return names


def public_names(module: str) -> list[str]:
    """The names in `__all__`, or else the classes that the module defines."""
    loaded = importlib.import_module(module)
    own = [name for name, one in vars(loaded).items() if inspect.isclass(one) and one.__module__ == module]
    return list(getattr(loaded, "__all__", own))


def unlisted(module: str, page: str) -> list[str]:
    """Returns the public names that the page lacks. The page may list a name under the module that defines it."""
    listed, found = documented(page), []
    for name in public_names(module):
        one = getattr(importlib.import_module(module), name)
        home = f"{getattr(one, '__module__', module)}.{name}"
        if f"{module}.{name}" not in listed and home not in listed:
            found.append(name)
    return found


def mute(module: str) -> list[str]:
    """Names without their own docstring. A dataclass gets its signature as a default; values cannot have a
    docstring."""
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
