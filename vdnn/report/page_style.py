"""The page's style sheet, light or dark by the preference of the reader's system.

Text is at least 14 px everywhere. Tables scroll in boxes of their own, so that the page never scrolls sideways. The
page has each figure twice, wide and narrow, and shows the one that fits the width of the window.
"""

from __future__ import annotations

from vdnn.report.palette import SHADES

# In a narrower window the text of wide figures would be smaller than 14 px.
WIDE_FROM = 1010


def style() -> str:
    light = "".join(f"--{shade.name}:{shade.light};" for shade in SHADES)
    dark = "".join(f"--{shade.name}:{shade.dark};" for shade in SHADES)
    schemes = f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
    return schemes + _RULES.replace("WIDE_FROM", str(WIDE_FROM))


_RULES = """
:root { color-scheme: light dark; }
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--surface); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 1056px; margin: 0 auto; padding: 16px 12px 48px; overflow-wrap: anywhere; }
h1 { font-size: 26px; line-height: 1.25; margin: 4px 0 12px; text-wrap: balance; }
h2 { font-size: 21px; line-height: 1.3; margin: 44px 0 8px; padding-top: 14px; border-top: 1px solid var(--grid); }
h3 { font-size: 17px; margin: 24px 0 6px; }
p, ul { margin: 8px 0; max-width: 75ch; }
ul { padding-left: 20px; }
.above { color: var(--muted); font-size: 15px; margin: 0; }
.note { color: var(--muted); font-size: 15px; }
.points { padding: 0; list-style: none; }
.points li { padding: 8px 0 8px 12px; border-left: 4px solid var(--green); margin: 8px 0; }
.bar {
  position: sticky; top: 0; z-index: 2; background: var(--surface); padding: 8px 0; margin-top: 16px;
  display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; border-bottom: 1px solid var(--grid);
}
select, th button, summary { font: inherit; color: inherit; }
select { min-height: 40px; max-width: 100%; padding: 4px 8px; background: var(--surface);
  border: 1px solid var(--muted); border-radius: 6px; }
.box { overflow-x: auto; max-width: 100%; border: 1px solid var(--grid); border-radius: 8px; margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 15px; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: 7px 8px; text-align: left; vertical-align: top; overflow-wrap: normal; }
td { border-top: 1px solid var(--grid); }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td.amounts, th.amounts { text-align: right; }
td.amounts { white-space: pre; }
td.short { white-space: nowrap; }
td.long { min-width: 160px; }
td.remark { min-width: 200px; }
td.name { min-width: 96px; }
th { vertical-align: bottom; padding: 0; font-weight: 600; }
th button { background: none; border: 0; padding: 9px 8px; width: 100%; text-align: inherit; cursor: pointer;
  font-weight: 600; }
th button::after { content: "\\a0\\2195"; color: var(--muted); }
th[aria-sort=ascending] button::after { content: "\\a0\\2191"; color: var(--ink); }
th[aria-sort=descending] button::after { content: "\\a0\\2193"; color: var(--ink); }
tr.own td:nth-child(2) { font-weight: 600; color: var(--green); }
.bad { color: var(--vermilion); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 8px 0; }
dt { color: var(--muted); }
dd { margin: 0; }
figure { margin: 14px 0 22px; }
figcaption { color: var(--muted); font-size: 15px; max-width: 75ch; margin-top: 6px; }
svg { display: block; width: 100%; height: auto; }
.wide { display: none; }
.narrow { max-width: 520px; }
@media (min-width: WIDE_FROMpx) {
  .wide { display: block; }
  .narrow { display: none; }
  main { padding: 28px 24px 64px; }
  h1 { font-size: 32px; }
  .full { max-width: none; width: min(100vw - 64px, 1600px); margin-left: 50%; transform: translateX(-50%); }
}
details { border: 1px solid var(--grid); border-radius: 8px; padding: 0 12px; margin: 12px 0; }
summary { cursor: pointer; padding: 12px 0; font-weight: 600; }
summary span { font-weight: 400; color: var(--muted); }
:focus-visible { outline: 3px solid var(--blue); outline-offset: 2px; }
[hidden] { display: none !important; }
@media print { details, .box { break-inside: avoid; } .bar { display: none; } }
"""
