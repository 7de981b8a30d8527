"""Pieces of a self-contained HTML page: style, text, tables, and line charts as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from data.printable import printable

_LARGEST = 1e300
COLORS = ("#1f5fa8", "#c2571a")
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; }
h1 { font-size: 1.5rem; } h3 { font-size: 1rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
.side { display: grid; gap: 1.2rem; }
.side { grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
.side > * { min-width: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; }
th, td { border-bottom: 1px solid #e3e3e3; }
th:first-child, td:first-child { text-align: left; }
.map td { text-align: center; border: 1px solid #fff; }
svg { width: 100%; height: auto; display: block; }
figure { margin: 0; } figcaption, .note { font-size: .85rem; color: #555; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { background: #f5f5f5; padding: .6rem; font-size: .8rem; }
@media (max-width: 40rem) { table { font-size: .8rem; }
  th, td { padding: .2rem .25rem; white-space: normal; vertical-align: bottom; } }
@media print { body { max-width: none; font-size: 11px; padding: 0; }
  details > * { display: block; } h2 { break-after: avoid; }
  .wide { overflow: visible; } th, td { white-space: normal; vertical-align: bottom; }
  section { break-inside: auto; }
  details::details-content { content-visibility: visible; height: auto; }
  .side { grid-template-columns: 1fr 1fr; } figure, table, pre { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

Series = dict[str, list[tuple[float, float]]]


def text(value: object) -> str:
    """Returns a value as HTML text."""
    return html.escape(printable(str(value)))


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Returns two to six evenly spaced round numbers that cover `low` to `high`.

    Args:
      whole: they are whole numbers.
    """
    span = high - low or abs(low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(digit * power for digit in (1, 2, 5, 10) if span / (digit * power) <= 4.5)
    step = max(round(step), 1) if whole else step
    # A round number's float32 rounding must not add a tick.
    first, last = math.floor(low / step + 1e-5), math.ceil(high / step - 1e-5)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Returns a number for an axis: 1,500 and 0.0005 unchanged, others by powers of ten."""
    return f"{value:,.10g}" if value == 0 or 1e-5 <= abs(value) < 1e7 else f"{value:.3g}"


def chart(series: Series, x_label: str, y_label: str, log: bool = False) -> str:
    """Returns a line chart as SVG: curves of points (x, y), by name.

    Args:
      log: the x axis is logarithmic.
    """
    width, height, left, bottom, top, right = 400, 250, 52, 40, 12, 16
    points = [point for curve in series.values() for point in curve if _is_drawn(*point, log)]
    if not points:
        return ""
    scale = math.log2 if log else float
    scaled, values = [scale(x) for x, _ in points], [y for _, y in points]
    x_low, x_high = min(scaled), max(scaled)
    x_ticks = [x for x in ticks(x_low, x_high, whole=log) if x_low <= x <= x_high] or [x_low]
    y_ticks = ticks(min(values), max(values))
    y_low, y_high = y_ticks[0], y_ticks[-1]
    x_span, y_span = x_high - x_low or 1.0, y_high - y_low

    def place(x: float, y: float) -> str:
        across = left + (scale(x) - x_low) / x_span * (width - left - right)
        down = height - bottom - (y - y_low) / y_span * (height - bottom - top)
        return f"{across:.1f},{down:.1f}"

    marks = []
    for y in y_ticks:
        _, down = place(points[0][0], y).split(",")
        marks.append(
            f'<line x1="{left}" x2="{width - right}" y1="{down}" y2="{down}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{down}" text-anchor="end" dominant-baseline="middle">'
            f"{number(y)}</text>"
        )
    for x in x_ticks:
        across = left + (x - x_low) / x_span * (width - left - right)
        marks.append(
            f'<text x="{across:.1f}" y="{height - bottom + 16}" text-anchor="middle">'
            f"{number(2**x if log else x)}</text>"
        )
    for index, (name, curve) in enumerate(series.items()):
        color = COLORS[index % 2]
        dash = ("", ' stroke-dasharray="6 4"', ' stroke-dasharray="2 3"')[index // 2 % 3]
        path = " ".join(place(x, y) for x, y in curve if _is_drawn(x, y, log))
        marks.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}>'
            f"<title>{text(name)}</title></polyline>"
        )
        marks += [
            f'<circle cx="{dot.split(",")[0]}" cy="{dot.split(",")[1]}" r="3" fill="{color}"/>'
            for dot in path.split()
            if len(curve) <= 24
        ]
    marks.append(
        f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">'
        f"{text(x_label)}</text>"
    )
    squares = ("&#9632;", "&#9633;")
    legend = " ".join(
        f'<span style="color:{COLORS[index % 2]}">{squares[index > 1]} {text(name)}</span>'
        for index, name in enumerate(series)
    )
    return (
        f"<figure><figcaption>{text(y_label)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{text(y_label)} against {text(x_label)}" '
        f'font-size="12" font-family="sans-serif">'
        f"{''.join(marks)}</svg>"
        f"<figcaption>{legend}</figcaption></figure>"
    )


def _is_drawn(x: float, y: float, log: bool) -> bool:
    """Returns whether a point can be drawn; larger values would make infinite spans."""
    return abs(x) < _LARGEST and abs(y) < _LARGEST and (x > 0 or not log)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table; cells are text."""
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    header = "".join(f"<th>{text(cell)}</th>" for cell in head)
    return f'<div class="wide"><table><tr>{header}</tr>{body}</table></div>'
