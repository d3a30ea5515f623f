"""How the site is made of docs/: Sphinx, with pages in Markdown (MyST) and the theme furo. `make docs` builds it.

Pages link to files outside of docs/ by their path, so that the links work in the repository too. On the site copies of
them lie under files/; the changes and the commands are pages.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import vdnn  # noqa: E402

project = "vdnn"
author = "The vdnn authors"
copyright = author
version = release = vdnn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# The libraries of integrations are not needed to read what the integrations say of themselves.
autodoc_mock_imports = ["transformers", "lightning"]
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
default_role = "code"
smartquotes = False  # quoted messages are as they are printed

html_theme = "furo"
html_title = f"vdnn {version}"
html_static_path = ["site_style"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072b2", "color-brand-content": "#0072b2"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
}


_PAGE_LINK = re.compile(r"\]\((?:\.\./)+(CHANGELOG|CONTRIBUTING)\.md")
_FILES = "files"


def _link_pages(app: Any, docname: str, source: list[str]) -> None:
    """Files outside of docs/ that are pages on the site."""
    up = "../" * docname.count("/")
    source[0] = _PAGE_LINK.sub(lambda found: f"]({up}{found[1].lower()}.md", source[0])


def _plain_markdown(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: an indented block is code, an asterisk is an asterisk."""
    made: list[str] = []
    for line in lines:
        indented = line.startswith("    ")
        if indented and made and not made[-1].strip() and (len(made) < 2 or not made[-2].startswith("    ")):
            made += [".. code-block:: python", ""]
        made.append(line if indented else line.replace("*", r"\*"))
    lines[:] = made


def _link_outside_files(app: Any, doctree: Any) -> None:
    """What would be downloads of files outside of docs/ become links to copies that lie where they do in the tree."""
    docname = app.env.docname
    for node in list(doctree.findall(download_reference)):
        path = Path(os.path.normpath(ROOT / "docs" / Path(docname).parent / node["reftarget"]))
        inside = path.relative_to(ROOT)
        target = Path(app.outdir, _FILES, inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        address = f"{'../' * docname.count('/')}{_FILES}/{inside.as_posix()}"
        node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=address))


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _link_pages)
    app.connect("autodoc-process-docstring", _plain_markdown)
    app.connect("doctree-read", _link_outside_files, priority=100)  # before downloads are collected
    return {"parallel_read_safe": True, "parallel_write_safe": True}
