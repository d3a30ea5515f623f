"""`vdnn doctor`: reports what this machine has for vdnn, and what each missing thing means.

examine() reads the facts, render_text() and render_json() show them. All work without torch, a GPU, a driver or the
native core.
"""

from __future__ import annotations

from vdnn.doctor.examination import examine
from vdnn.doctor.facts import Report
from vdnn.doctor.rendering import render_json, render_text
from vdnn.doctor.sources import Sources

__all__ = ["Report", "Sources", "examine", "render_json", "render_text"]
