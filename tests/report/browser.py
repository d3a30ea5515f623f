"""A headless browser for tests: finds one, shows it a page in a window of a given width, and returns its findings.

The page is shown in a frame of the given width inside another page that inspects it, so that it needs no code for
tests. The inspecting page writes its findings into itself, and the browser prints them. A server on this machine serves
both pages and logs the requests; the browser can resolve no other address.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

_LOOKING = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><link rel="icon" href="data:,"><style>
body {{ margin: 0 }}
iframe {{ border: 0; width: {width}px; height: 900px }}
</style></head><body><iframe id="frame" src="{address}"></iframe><pre id="findings"></pre>
<script>
const frame = document.getElementById("frame");
frame.addEventListener("load", () => {{
  let found;
  try {{
    found = (function (win, doc) {{ {script} }})(frame.contentWindow, frame.contentDocument);
  }} catch (error) {{
    found = {{ error: String(error) + " " + error.stack }};
  }}
  document.getElementById("findings").textContent = JSON.stringify(found);
}});
</script></body></html>
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """`findings` is the script's result, `asked` are the page's other requests to the server, and `complaints` is the
    output of the browser's console."""

    findings: Any
    asked: tuple[str, ...]
    complaints: tuple[str, ...]


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Logs the requests, and prints nothing."""

    def __init__(self, *arguments: Any, asked: list[str], **options: Any) -> None:
        self._asked = asked
        super().__init__(*arguments, **options)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._asked.append(self.path)
        super().do_GET()


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


def look_at(browser: str, page: Path, width: int, script: str, profile: Path) -> Seen:
    """`script` is a function's body: it gets the page's window `win` and document `doc`, and returns its findings."""
    looking = page.with_name(f"looking_{width}.html")
    looking.write_text(_LOOKING.format(width=width, address=page.name, script=script), encoding="utf-8")
    asked: list[str] = []
    handler = functools.partial(_Handler, directory=str(page.parent), asked=asked)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/{looking.name}"
            done = _run(browser, address, width, profile)
        finally:
            server.shutdown()
            serving.join()
    written = re.search(r'<pre id="findings">(.*?)</pre>', done.stdout, re.DOTALL)
    assert written is not None, f"the browser printed no findings: {done.stdout[-500:]} {done.stderr[-2000:]}"
    assert written[1], f"the page was never loaded: {done.stderr[-2000:]}"
    complaints = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    own = {f"/{looking.name}", f"/{page.name}"}
    return Seen(json.loads(html.unescape(written[1])), tuple(path for path in asked if path not in own), complaints)


def _run(browser: str, address: str, width: int, profile: Path) -> subprocess.CompletedProcess[str]:
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",  # a container on which tests run may lack user namespaces
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={profile}",
        f"--window-size={max(width, 800)},1000",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        "--dump-dom",
        address,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
