"""Pieces of a self-contained HTML page: style, text, tables, and line charts as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from data.printable import printable

_LARGEST = 1e300
COLORS = ("#1f5fa8", "#c2571a")
# Of a chart, and of the margins round its axes.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 250, 52, 16, 12, 40
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
    drawn = {
        name: [point for point in curve if _is_drawn(*point, log)] for name, curve in series.items()
    }
    points = [point for curve in drawn.values() for point in curve]
    if not points:
        return ""
    plot = _Plot.of(points, log)
    marks = [*plot.axes()]
    for index, (name, curve) in enumerate(drawn.items()):
        marks += plot.curve(name, curve, index, with_dots=len(series[name]) <= 24)
    marks.append(
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{text(x_label)}</text>"
    )
    return (
        f"<figure><figcaption>{text(y_label)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{text(y_label)} against {text(x_label)}" '
        f'font-size="12" font-family="sans-serif">'
        f"{''.join(marks)}</svg>"
        f"<figcaption>{_legend(series)}</figcaption></figure>"
    )


class _Plot(NamedTuple):
    """The area of a chart within its axes, and the values at its borders.

    Attributes:
      x_low, x_span: the axis's first value and length: logarithms to base 2 if it is logarithmic.
    """

    x_low: float
    x_span: float
    x_ticks: list[float]
    y_low: float
    y_span: float
    y_ticks: list[float]
    log: bool

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], log: bool) -> _Plot:
        """Returns the plot that these points fill."""
        scale = math.log2 if log else float
        xs, ys = [scale(x) for x, _ in points], [y for _, y in points]
        low, high = min(xs), max(xs)
        x_ticks = [x for x in ticks(low, high, whole=log) if low <= x <= high] or [low]
        y_ticks = ticks(min(ys), max(ys))
        span = y_ticks[-1] - y_ticks[0] or 1.0
        return cls(low, high - low or 1.0, x_ticks, y_ticks[0], span, y_ticks, log)

    def across(self, x: float) -> str:
        """Returns the horizontal coordinate of a value on the axis."""
        return f"{LEFT + (x - self.x_low) / self.x_span * (WIDTH - LEFT - RIGHT):.1f}"

    def down(self, y: float) -> str:
        """Returns the vertical coordinate of a value."""
        height = HEIGHT - BOTTOM - TOP
        return f"{HEIGHT - BOTTOM - (y - self.y_low) / self.y_span * height:.1f}"

    def axes(self) -> Iterator[str]:
        """Yields the ticks' lines and numbers."""
        for y in self.y_ticks:
            down = self.down(y)
            yield (
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down}" y2="{down}" stroke="#ddd"/>'
                f'<text x="{LEFT - 6}" y="{down}" text-anchor="end" dominant-baseline="middle">'
                f"{number(y)}</text>"
            )
        for x in self.x_ticks:
            yield (
                f'<text x="{self.across(x)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                f"{number(2**x if self.log else x)}</text>"
            )

    def curve(
        self, name: str, points: Sequence[tuple[float, float]], index: int, with_dots: bool
    ) -> Iterator[str]:
        """Yields a curve's line and, if it shows them, its points; `index` selects the style."""
        color = COLORS[index % 2]
        dash = ("", ' stroke-dasharray="6 4"', ' stroke-dasharray="2 3"')[index // 2 % 3]
        scale = math.log2 if self.log else float
        coordinates = [(self.across(scale(x)), self.down(y)) for x, y in points]
        path = " ".join(f"{across},{down}" for across, down in coordinates)
        yield (
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}>'
            f"<title>{text(name)}</title></polyline>"
        )
        for across, down in coordinates if with_dots else ():
            yield f'<circle cx="{across}" cy="{down}" r="3" fill="{color}"/>'


def _legend(names: Iterable[str]) -> str:
    marks = ("&#9632;", "&#9633;", "&#9675;")  # one per dash
    return " ".join(
        f'<span style="color:{COLORS[index % 2]}">{marks[index // 2 % 3]} {text(name)}</span>'
        for index, name in enumerate(names)
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
