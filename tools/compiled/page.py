"""The report of a compiled step as one HTML page that needs no other file."""

import html

from tools.compiled.memory import KINDS
from tools.compiled.report import Report, Table

COLORS = {
    "masters": "#0072b2",
    "moments": "#56b4e9",
    "gradients": "#009e73",
    "slots": "#f0e442",
    "activations": "#e69f00",
    "exchange": "#d55e00",
    "temporaries": "#999999",
}
"""Colors of Okabe and Ito."""
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem;
       padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
pre { white-space: pre-wrap; font-size: 12.5px; color: #444; }
.bar { position: relative; display: flex; height: 2.4rem; border: 1px solid #888;
       background: #f4f4f4; }
.bar div { overflow: hidden; color: #111; font-size: 12px; padding: .55rem 0;
           text-indent: .3rem; box-sizing: border-box; white-space: nowrap; }
.bar .limit { position: absolute; top: -.3rem; bottom: -.3rem; width: 0; padding: 0;
              border-left: 2px dashed #c00; }
.legend { margin: .6rem 0; font-size: 13px; }
.legend i { display: inline-block; width: .9rem; height: .9rem; margin: 0 .3rem 0 1rem;
            vertical-align: -.12rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; vertical-align: top;
         border-bottom: 1px solid #ddd; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.warning { background: #fff2cc; border-left: 4px solid #e69f00; padding: .5rem .8rem; }
"""


def page(report: Report, title: str) -> str:
    """Return the HTML of a report."""
    record = report.record
    head = f"{title}: {record['peak_gib']:.1f} GiB of {record['usable_gib']:.1f} GiB"
    warnings = "".join(
        f'<p class="warning">{html.escape(line)}</p>' for line in report.warnings
    )
    tables = "".join(_table(table) for table in report.tables)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(head)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(head)}</h1>{warnings}{_bar(record)}{tables}"
        f"<h2>how it was compiled</h2><pre>{_escaped(report.lines)}</pre>"
        f"<pre>{_escaped(report.notes)}</pre></body></html>\n"
    )


def _bar(record: dict) -> str:
    """Return a bar of the memory by kind, with a line at what a run may use."""
    whole = max(record["peak_gib"], record["usable_gib"])
    parts = "".join(
        f'<div style="width:{100 * size / whole:.3f}%;background:{COLORS[kind]}" '
        f'title="{kind} {size:.2f} GiB">{kind if size > whole / 12 else ""}</div>'
        for kind, size in record["memory_gib"].items()
    )
    limit = 100 * record["usable_gib"] / whole
    legend = "".join(
        f'<i style="background:{COLORS[kind]}"></i>{kind} '
        f"{record['memory_gib'][kind]:.2f}"
        for kind in KINDS
    )
    return (
        f'<div class="bar">{parts}<div class="limit" style="left:{limit:.3f}%"></div>'
        f'</div><div class="legend">GiB:{legend}; the dashed line is what a run may '
        f"use, {record['usable_gib']:.1f} GiB</div>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'<h2>{html.escape(table.title)}</h2><div class="scroll"><table><tr>{head}</tr>'
        f"{rows}</table></div>"
    )


def _cell(text: str) -> str:
    is_number = text[:1].isdigit()
    return f"<td{' class=n' if is_number else ''}>{html.escape(text)}</td>"


def _escaped(lines) -> str:
    return html.escape("\n".join(lines))
