"""Reports on runs: text, an HTML page, figures and traces made from cells, recordings, plans and timelines.

Importing this package needs neither torch nor matplotlib. Functions that draw raise an error if matplotlib is missing.
"""

from __future__ import annotations

from vdnn.report.cell import Cell
from vdnn.report.chrome_trace import trace_of, write_trace
from vdnn.report.figures import write_figures
from vdnn.report.page import write_html
from vdnn.report.run_folder import Run, append_cells, read_run
from vdnn.report.text_summary import text_summary
from vdnn.report.trade_off import draw_trade_off

__all__ = [
    "Cell",
    "Run",
    "append_cells",
    "draw_trade_off",
    "read_run",
    "text_summary",
    "trace_of",
    "write_figures",
    "write_html",
    "write_trace",
]
