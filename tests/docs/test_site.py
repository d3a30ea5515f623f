"""The site builds without a warning, its links lead somewhere, and it loads nothing from other hosts.

A browser checks all pages at once, in frames as wide as a phone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.patience import run_to_its_end
from tests.report.browser import Seen, find_browser, look_at

pytest.importorskip("sphinx", reason="the site is made by Sphinx: pip install 'vdnn[docs]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
BROWSER = find_browser()
PHONE = 400
# The theme links to its own page at the foot of each page. A link loads nothing until somebody follows it.
ELSEWHERE = {"https://github.com/pradyunsg/furo"}


class _Addresses(HTMLParser):
    """Collects the links of a page, the files it loads, and the fragments that links may name."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loaded.append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


def read(page: Path) -> _Addresses:
    addresses = _Addresses()
    addresses.feed(page.read_text(encoding="utf-8"))
    return addresses


def faults(site: Path) -> Iterator[str]:
    """Returns the links and files that lead nowhere, and the requests to other hosts."""
    pages = {page: read(page) for page in sorted(site.rglob("*.html")) if "_static" not in page.parts}
    for page, addresses in pages.items():
        name = page.relative_to(site).as_posix()
        for address in [*addresses.links, *addresses.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in addresses.loaded or address not in ELSEWHERE:
                    yield f"{name} leaves the site for {address}"
                continue
            target = Path(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
            if not target.is_file():
                yield f"{name} links to {address}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{name} links to {address}: that page has no such place"


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site as `make docs` does."""
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", str(source), str(site)]
    return run_to_its_end(command, cwd=ROOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", site)
    assert done.returncode == 0, done.stderr[-4000:]
    return site


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 30
    assert [page for page in pages if not (site / page).is_file()] == []


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert list(faults(site)) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html">b</a><a href="#here">h</a><a id="there" href="#there">t</a>')
    (tmp_path / "c.html").write_text(
        '<a href="a.html#here">a</a><script src="https://elsewhere.example/x.js"></script>'
    )
    assert list(faults(tmp_path)) == [
        "a.html links to b.html, which is not there",
        "a.html links to #here: that page has no such place",
        "c.html links to a.html#here: that page has no such place",
        "c.html leaves the site for https://elsewhere.example/x.js",
    ]


def test_a_page_that_nobody_lists_or_that_links_nowhere_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "conf.py").write_text('"""A site."""\nextensions = ["myst_parser"]\n')
    (tmp_path / "index.md").write_text("# Site\n\n[a](missing.md)\n")
    (tmp_path / "lonely.md").write_text("# Lonely\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "missing" in done.stderr
    assert "lonely.md" in done.stderr


LOOK = r"""
  const frames = Array.from(doc.querySelectorAll("iframe"));
  const look = frame => {
    const page = frame.contentWindow, inner = frame.contentDocument;
    page.scrollTo(10000, 0);
    return {
      name: frame.getAttribute("src"), width: page.innerWidth, scrolled: page.scrollX,
      pictures: Array.from(inner.querySelectorAll("article img")).map(image => image.naturalWidth),
      asked: page.performance.getEntriesByType("resource").map(entry => new URL(entry.name).host),
    };
  };
  const search = frames.find(frame => frame.getAttribute("src") === "search.html").contentWindow;
  return {
    here: win.location.host, pages: frames.map(look),
    found: search.eval("Search._performSearch(...Search._parseQuery('pinned memory'))").map(result => result[0]),
    colours: ["light", "dark"].map(theme => {
      const body = frames[0].contentDocument.body;
      body.dataset.theme = theme;
      return frames[0].contentWindow.getComputedStyle(body).backgroundColor;
    }),
  };
"""


# This page is too wide, and its picture is missing and on another host.
FAULTY = '<!DOCTYPE html><article><p style="width: 900px">wide</p><img src="https://elsewhere.example/x.png"></article>'


@pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")
def test_on_a_phone_every_page_fits_shows_its_pictures_and_asks_nobody_else(site: Path, tmp_path: Path) -> None:
    """A faulty page is added to check that faults are found."""
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html") if "_static" not in page.parts)
    (site / "faulty.html").write_text(FAULTY)
    frames = "".join(f'<iframe src="{page}" width="{PHONE}" height="800"></iframe>' for page in [*pages, "faulty.html"])
    (site / "all.html").write_text(f'<!DOCTYPE html><link rel="icon" href="data:,">{frames}')
    assert BROWSER is not None
    seen: Seen = look_at(BROWSER, site / "all.html", 1400, LOOK, tmp_path / "profile")
    assert "error" not in seen.findings, seen.findings
    *looked_at, faulty = seen.findings["pages"]
    assert [page["name"] for page in looked_at] == pages
    assert {page["width"] for page in looked_at} == {PHONE}
    assert [page["name"] for page in looked_at if page["scrolled"]] == []
    assert {host for page in looked_at for host in page["asked"]} == {seen.findings["here"]}
    assert [page["name"] for page in looked_at if not all(page["pictures"])] == []
    assert sum(len(page["pictures"]) for page in looked_at) >= 6
    assert {"device", "how-it-works"} <= set(seen.findings["found"])
    assert len(set(seen.findings["colours"])) == 2
    assert faulty["scrolled"] > 0
    assert (faulty["asked"], faulty["pictures"]) == (["elsewhere.example"], [0])
    assert all("elsewhere.example" in complaint for complaint in seen.complaints), seen.complaints
