"""Curves with bands and time against faithfulness, as inline SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from aha.evaluation.collect import Curve

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 38
LETTER, LINE = 6.6, 13  # width of a letter and height of a line in the scatter's labels


def curve_figure(curves: Sequence[Curve | None], labels: Sequence[str], title: str, better: str) -> str:
    """Mean curves of several explainers with 95 % bands.

    Args:
        curves: one per explainer, None where there is none.
        labels: of the explainers.
        title: of the figure.
        better: how to read it.
    """
    shown = [curve for curve in curves if curve is not None]
    top = max(float(np.max(curve.mean + 1.96 * curve.error)) for curve in shown)
    high = _round_up(max(top, 0.05))
    right = max(float(curve.fractions[-1]) for curve in shown)
    plot = _Plot((0, right), (0, high))
    parts = [plot.axes("share of pixels", [0, 0.25, 0.5, 0.75, 1])]
    for i, curve in reversed(list(enumerate(curves))):  # the first explainer on top
        if curve is None:
            continue
        upper = np.minimum(curve.mean + 1.96 * curve.error, high)
        lower = np.maximum(curve.mean - 1.96 * curve.error, 0)
        band = plot.path(np.r_[curve.fractions, curve.fractions[::-1]], np.r_[upper, lower[::-1]]) + "Z"
        line = plot.path(curve.fractions, curve.mean)
        name = f"<title>{escape(labels[i])}, n = {curve.n}</title>"
        parts.append(
            f'<g class="series s{i % 10}" data-explainer="{i}">{name}<path class="band" d="{band}"/>'
            f'<path class="line{" first" if i == 0 else ""}{" dashed" if i >= 10 else ""}" d="{line}"/></g>'
        )
    described = f"{title}: " + "; ".join(
        f"{label} from {c.mean[0]:.2f} to {c.mean[-1]:.2f}" for label, c in zip(labels, curves, strict=True) if c
    )
    return _figure(parts, title, better, described)


def scatter_figure(
    seconds: Sequence[float], rows: Sequence[dict], labels: Sequence[str], title: str, better: str
) -> str:
    """Time per image (logarithmic) against a metric with its interval.

    Args:
        seconds: per image, one per explainer; NaN where unknown.
        rows: of ``results.json``, one per explainer.
        labels: of the explainers.
        title: of the figure.
        better: how to read it.
    """
    points = [
        (i, math.log10(max(s, 1e-6)), row)
        for i, (s, row) in enumerate(zip(seconds, rows, strict=True))
        if math.isfinite(s) and row["value"] is not None
    ]
    if not points:
        return ""
    low_x, high_x = math.floor(min(x for _, x, _ in points)), math.ceil(max(x for _, x, _ in points) + 1e-9)
    high_x = max(high_x, low_x + 1)
    lows, highs = [row["low"] for *_, row in points], [row["high"] for *_, row in points]
    pad = 0.08 * ((max(highs) - min(lows)) or 1)
    plot = _Plot((low_x, high_x), (min(min(lows) - pad, 0), max(highs) + pad), width=760, height=300)
    ticks = list(range(low_x, high_x + 1))
    parts = [plot.axes("time per image", ticks, [_duration(10.0**t) for t in ticks])]
    placed: list[tuple[float, float, float]] = []  # left, right, baseline of labels so far
    for i, x, row in sorted(points, key=lambda point: -point[2]["value"]):
        px, py, text = plot.x(x), plot.y(row["value"]), escape(labels[i])
        size = LETTER * len(labels[i])
        end = px + 10 + size > plot.width
        left, y = (px - 10 - size, py + 4) if end else (px + 10, py + 4)
        while any(left < r and left + size > k and abs(y - other) < LINE for k, r, other in placed):
            y += 1
        placed.append((left, left + size, y))
        parts.append(
            f'<g class="series s{i % 10}" data-explainer="{i}"><title>{text}: {row["value"]:.3f} in '
            f"{_duration(seconds[i])} per image</title>"
            f'<path class="line thin" d="M{px:.1f} {plot.y(row["low"]):.1f}V{plot.y(row["high"]):.1f}"/>'
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{6 if i == 0 else 4.5}"/>'
            f'<text class="label" x="{px + (-10 if end else 10):.1f}" y="{y:.1f}" '
            f'text-anchor="{"end" if end else "start"}">{text}</text></g>'
        )
    described = f"{title}: " + "; ".join(
        f"{labels[i]} {row['value']:.3f} in {_duration(seconds[i])}" for i, _, row in points
    )
    return _figure(parts, title, better, described, width=760, height=300)


class _Plot:
    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], *, width: int = WIDTH, height: int = HEIGHT
    ) -> None:
        self.x_range, self.y_range, self.width, self.height = x, y, width, height

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)

    def path(self, xs: np.ndarray, ys: np.ndarray) -> str:
        points = [f"{self.x(a):.1f} {self.y(b):.1f}" for a, b in zip(xs, ys, strict=True)]
        return "M" + "L".join(points)

    def axes(self, x_label: str, x_ticks: Sequence[float], x_texts: Sequence[str] | None = None) -> str:
        low, high = self.x_range
        ticks = [t for t in x_ticks if low <= t <= high + 1e-9]
        texts = [f"{t:.0%}" for t in ticks] if x_texts is None else x_texts
        bottom, parts = self.height - BOTTOM, []
        for value in _y_ticks(*self.y_range):
            y = self.y(value)
            strong = " zero" if abs(value) < 1e-12 else ""
            parts.append(f'<path class="grid{strong}" d="M{LEFT} {y:.1f}H{self.width - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        for tick, text in zip(ticks, texts, strict=True):
            parts.append(f'<text x="{self.x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
        middle = (LEFT + self.width - RIGHT) / 2
        parts.append(f'<text x="{middle:.0f}" y="{self.height - 5}" text-anchor="middle" class="axis">{x_label}</text>')
        return "".join(parts)


def _figure(
    parts: list[str], title: str, better: str, described: str, *, width: int = WIDTH, height: int = HEIGHT
) -> str:
    return (
        f'<figure class="{"wide" if width > WIDTH else ""}"><figcaption>{escape(title)} '
        f'<span class="better">{escape(better)}</span></figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(described)}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _y_ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 2))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= 5.5:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _round_up(value: float) -> float:
    step = 0.05 if value <= 0.3 else 0.1
    return math.ceil(value / step - 1e-9) * step


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
