"""The pieces of a self-contained HTML page: its style, text, tables, and line charts as SVG. Nothing loads anything."""
from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

COLORS = ("#1f5fa8", "#c2571a")
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; } h3 { font-size: 1rem; }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.2rem; }
.side > * { min-width: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #e3e3e3; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.map td { text-align: center; border: 1px solid #fff; }
svg { width: 100%; height: auto; display: block; }
figure { margin: 0; } figcaption, .note { font-size: .85rem; color: #555; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: .6rem; font-size: .8rem; }
@media print { body { max-width: none; font-size: 11px; padding: 0; } details > * { display: block; } h2 { break-after: avoid; }
  figure, table, pre { break-inside: avoid; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

Series = dict[str, list[tuple[float, float]]]


def text(value: object) -> str:
    """Returns a value as HTML text."""
    return html.escape(str(value))


def chart(series: Series, x_label: str, y_label: str, log: bool = False) -> str:
    """Returns a line chart as SVG: curves of points (x, y), by their names.

    Args:
      log: the x axis is logarithmic.
    """
    width, height, left, bottom, top, right = 640, 360, 62, 46, 14, 12
    points = [point for curve in series.values() for point in curve if math.isfinite(point[1]) and (point[0] > 0 or not log)]
    if not points:
        return ""
    scale = math.log2 if log else float
    x_low, x_high = (bound(scale(x) for x, _ in points) for bound in (min, max))
    y_low, y_high = (bound(y for _, y in points) for bound in (min, max))
    x_span, y_span = x_high - x_low or 1.0, y_high - y_low or 1.0

    def place(x: float, y: float) -> str:
        across = left + (scale(x) - x_low) / x_span * (width - left - right)
        down = height - bottom - (y - y_low) / y_span * (height - bottom - top)
        return f"{across:.1f},{down:.1f}"

    marks = []
    for i in range(5):
        y = y_low + y_span * i / 4
        _, down = place(points[0][0], y).split(",")
        marks.append(f'<line x1="{left}" x2="{width - right}" y1="{down}" y2="{down}" stroke="#ddd"/>'
                     f'<text x="{left - 6}" y="{down}" text-anchor="end" dominant-baseline="middle">{y:.3g}</text>')
        x = x_low + x_span * i / 4
        across = left + (x - x_low) / x_span * (width - left - right)
        marks.append(f'<text x="{across:.1f}" y="{height - bottom + 16}" text-anchor="middle">'
                     f"{2 ** x if log else x:,.0f}</text>")
    for number, (name, curve) in enumerate(series.items()):
        color, dash = COLORS[number % 2], ("", ' stroke-dasharray="6 4"', ' stroke-dasharray="2 3"')[number // 2 % 3]
        path = " ".join(place(x, y) for x, y in curve if math.isfinite(y) and (x > 0 or not log))
        marks.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}>'
                     f"<title>{text(name)}</title></polyline>")
        marks += [f'<circle cx="{dot.split(",")[0]}" cy="{dot.split(",")[1]}" r="3" fill="{color}"/>' for dot in path.split()
                  if len(curve) <= 24]
    marks.append(f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">{text(x_label)}</text>')
    squares = ("&#9632;", "&#9633;")
    legend = " ".join(f'<span style="color:{COLORS[number % 2]}">{squares[number > 1]} {text(name)}</span>'
                      for number, name in enumerate(series))
    return (f'<figure><figcaption>{text(y_label)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{text(y_label)} against {text(x_label)}" font-size="12" font-family="sans-serif">'
            f'{"".join(marks)}</svg>'
            f"<figcaption>{legend}</figcaption></figure>")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table; cells are text."""
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{text(cell)}</th>" for cell in head)}</tr>{body}</table></div>'
