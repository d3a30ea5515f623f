"""The page's script: sorts tables by a click or a key on a column's heading, and shows one workload or all.

Cells carry the value that they are sorted by. Rows without a value come last in either order. The page is complete and
readable without the script.
"""

from __future__ import annotations

import base64
import hashlib

SCRIPT = """
"use strict";
function sortBy(button) {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const column = head.cellIndex, wasUp = head.getAttribute("aria-sort") === "ascending";
  const isNumber = head.classList.contains("number");
  for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", wasUp ? "descending" : "ascending");
  const way = wasUp ? -1 : 1;
  const valueOf = row => row.cells[column].dataset.value;
  const rows = Array.from(body.rows);
  rows.sort((one, other) => {
    const a = valueOf(one), b = valueOf(other);
    if (a === "" || b === "") return (a === "") - (b === "");
    return way * (isNumber ? a - b : a.localeCompare(b, "en", { numeric: true }));
  });
  body.append(...rows);
}
for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => sortBy(button));

const chooser = document.getElementById("workload");
if (chooser) {
  const parts = Array.from(document.querySelectorAll("[data-workload]"));
  const said = document.getElementById("shown");
  const show = () => {
    let rows = 0;
    for (const part of parts) {
      part.hidden = chooser.value !== "" && part.dataset.workload !== chooser.value;
      if (part.tagName === "TR" && !part.hidden) rows += 1;
    }
    said.textContent = rows + (rows === 1 ? " row" : " rows") + " of " + said.dataset.all;
  };
  chooser.addEventListener("change", show);
  show();
}
"""


def script_hash() -> str:
    """The hash with which the page's content policy allows this script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode("utf-8")).digest()).decode("ascii")
