"""Maps as pictures: one colour scale that is symmetric about zero, overlays, and sheets with a legend."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from torch import Tensor

QUANTILE = 0.995
GREYED = 0.9  # share of the colour taken out of the picture under an overlay, so that hues belong to the map
STRONGEST = 0.85  # opacity of an overlay at the end of the scale
CELL, GAP, MARGIN = 2.2, 0.12, 0.15  # inches
# Ends and middle in OKLab (Ottosson 2020): equal lightness and nearly equal chroma at both ends.
AGAINST, NEUTRAL, FOR = (0.44, -0.025, -0.165), (0.97, 0.0, 0.0), (0.44, 0.150, 0.080)


@cache
def diverging() -> ListedColormap:
    """Blue over near-white to red, in equal steps of lightness either way (straight lines in OKLab)."""
    t = np.linspace(-1, 1, 511)[:, None]
    ends = np.where(t < 0, np.array(AGAINST), np.array(FOR))
    lab = np.array(NEUTRAL) + np.abs(t) * (ends - np.array(NEUTRAL))
    lms = (lab @ np.array([[1, 1, 1], [0.3963377774, -0.1055613458, -0.0894841775], [0.2158037573, -0.0638541728, -1.2914855480]])) ** 3  # fmt: skip  # noqa: E501
    rgb = lms @ np.array([[4.0767416621, -1.2684380046, -0.0041960863], [-3.3077115913, 2.6097574011, -0.7034186147], [0.2309699292, -0.3413193965, 1.7076147010]])  # fmt: skip  # noqa: E501
    rgb = rgb.clip(0, 1)
    return ListedColormap(np.where(rgb <= 0.0031308, 12.92 * rgb, 1.055 * rgb ** (1 / 2.4) - 0.055), "aha_diverging")


def scale_limit(attribution: Tensor | np.ndarray) -> float:
    """Where the scale of a map ends, both ways: the 0.995 quantile of its magnitude; 1 for an all-zero map."""
    magnitude = np.abs(_plane(attribution))
    magnitude = magnitude[np.isfinite(magnitude)]
    limit = float(np.quantile(magnitude, QUANTILE)) if magnitude.size else 0.0
    return limit or float(magnitude.max(initial=0.0)) or 1.0


def colour(attribution: Tensor | np.ndarray, *, limit: float | None = None) -> np.ndarray:
    """A map in colour, zero at the neutral middle; non-finite values black.

    Args:
        attribution: ``(H, W)`` or ``(1, H, W)``, signed.
        limit: value at the ends of the scale; default :func:`scale_limit`.

    Returns:
        uint8 ``(H, W, 3)``.
    """
    values = _plane(attribution) / (limit or scale_limit(attribution))
    colours = diverging()(np.nan_to_num(values.clip(-1, 1)) * 0.5 + 0.5)[..., :3]
    colours[~np.isfinite(values)] = 0
    return (colours * 255).round().astype(np.uint8)


def overlay(image: Tensor | np.ndarray, attribution: Tensor | np.ndarray, *, limit: float | None = None) -> np.ndarray:
    """A map over its picture: hue says the sign, opacity the magnitude, and where the map is zero the picture shows.

    Args:
        image: RGB ``(3, H, W)`` or ``(H, W, 3)``, uint8 or float in [0, 1], of any size.
        attribution: ``(h, w)`` or ``(1, h, w)``, signed; resized to the picture.
        limit: value at the ends of the scale; default :func:`scale_limit`.

    Returns:
        uint8 ``(H, W, 3)``.
    """
    picture = _picture(image)
    limit = limit or scale_limit(attribution)
    values = torch.from_numpy(_plane(attribution))[None, None]
    values = F.interpolate(values, size=picture.shape[:2], mode="bilinear", align_corners=False)[0, 0].numpy()
    grey = (picture @ np.array([0.299, 0.587, 0.114], dtype=np.float32))[..., None]
    picture = picture + GREYED * (grey - picture)
    strength = np.nan_to_num((np.abs(values) / limit).clip(0, 1), nan=1.0)[..., None]
    tint = colour(np.sign(values) * (1 + strength[..., 0]) / 2, limit=1.0).astype(np.float32) / 255
    opacity = STRONGEST * strength
    return ((picture * (1 - opacity) + tint * opacity).clip(0, 1) * 255).round().astype(np.uint8)


def contact_sheet(
    images: Tensor | Sequence[Tensor | np.ndarray],
    maps: Mapping[str, Tensor | Sequence[Tensor]],
    *,
    titles: Sequence[str] | None = None,
) -> Figure:
    """A row per sample: the image, the first explainer's map and its overlay, then each other explainer's overlay.

    Args:
        images: RGB, ``(batch, 3, H, W)``, or a sequence of pictures.
        maps: attribution ``(batch, 1, H, W)`` by the explainer's name; each map has its own scale.
        titles: one per sample, for instance class and probability.

    Returns:
        A matplotlib figure: ``figure.savefig(path)``.
    """
    first, *others = maps
    heads = ["image", f"{first}: map", f"{first}: overlay", *others]
    rows = []
    for i, image in enumerate(images):
        cells = [(_picture(image), ""), (colour(maps[first][i]), "")]
        cells += [(overlay(image, maps[name][i]), "") for name in (first, *others)]
        rows.append((titles[i] if titles is not None else "", cells))
    return sheet(rows, heads)


def sheet(
    rows: Sequence[tuple[str, Sequence[tuple[np.ndarray, str] | None]]],
    heads: Sequence[str],
    *,
    cell: float = CELL,
) -> Figure:
    """A grid of pictures with column heads, a title per row, a caption per picture, and the legend below.

    Args:
        rows: for each row its title and its cells: ``(picture, caption)``, or None for an empty one.
        heads: a title per column.
        cell: width of a picture in inches.
    """
    shapes = [entry[0].shape for _, cells in rows for entry in cells if entry is not None]
    height = cell * min(max(max(h / w for h, w, *_ in shapes), 0.4), 2.0)
    caption = 0.22 if any(entry and entry[1] for _, cells in rows for entry in cells) else 0.0
    side = 0.3 if any(title for title, _ in rows) else 0.0
    top, bottom = 0.42, 0.62
    wide = 2 * MARGIN + side + len(heads) * (cell + GAP)
    tall = top + bottom + len(rows) * (height + caption + GAP)
    figure = Figure(figsize=(wide, tall), facecolor="white")
    FigureCanvasAgg(figure)
    for r, (title, cells) in enumerate(rows):
        low = tall - top - (r + 1) * (height + caption + GAP) + GAP + caption
        if title:
            room = max(int(height / 0.085), 8)
            if len(title) > 1.8 * room:  # the probability at the end matters more than a long name's middle
                title = f"{title[: int(1.8 * room) - 8]}… {title[-6:].strip()}"
            lines = "\n".join(textwrap.wrap(title, room)[:2])
            figure.text(
                (MARGIN + side / 2) / wide,
                (low + height / 2) / tall,
                lines,
                rotation=90,
                ha="center",
                va="center",
                size=8,
                linespacing=1.1,
            )
        for c, entry in enumerate(cells):
            if entry is None:
                continue
            left = MARGIN + side + c * (cell + GAP) + GAP / 2
            axes = figure.add_axes((left / wide, low / tall, cell / wide, height / tall))
            axes.imshow(entry[0], interpolation="nearest" if max(entry[0].shape[:2]) < 100 else "antialiased")
            axes.set_axis_off()
            if entry[1]:
                axes.text(0.5, -0.02, _shorten(entry[1], cell), transform=axes.transAxes, ha="center", va="top", size=8)
    for c, head in enumerate(heads):
        x = MARGIN + side + c * (cell + GAP) + GAP / 2 + cell / 2
        figure.text(x / wide, 1 - top * 0.72 / tall, _shorten(head, cell), ha="center", va="center", size=9)
    _legend(figure, wide, tall)
    return figure


def _legend(figure: Figure, wide: float, tall: float) -> None:
    """One bar for all maps: each has its own scale, symmetric about its zero."""
    length = min(3.2, 0.6 * wide)
    axes = figure.add_axes(((wide - length) / 2 / wide, 0.36 / tall, length / wide, 0.09 / tall))
    bar = figure.colorbar(ScalarMappable(Normalize(-1, 1), diverging()), cax=axes, orientation="horizontal")
    bar.set_ticks([-1, 0, 1], labels=["negative", "0", "positive"])
    bar.outline.set_visible(False)
    bar.ax.tick_params(size=0, labelsize=8, pad=2)


def _shorten(text: str, inches: float) -> str:
    room = max(int(inches / 0.068), 6)
    return text if len(text) <= room else text[: room - 1] + "…"


def _plane(attribution: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(attribution, Tensor):
        attribution = attribution.detach().float().cpu().numpy()
    values = np.asarray(attribution, dtype=np.float32)
    values = values[0] if values.ndim == 3 and values.shape[0] == 1 else values
    if values.ndim != 2:
        msg = f"A map must be (height, width) or (1, height, width), got {values.shape}."
        raise ValueError(msg)
    return values


def _picture(image: Tensor | np.ndarray) -> np.ndarray:
    """float32 ``(H, W, 3)`` in [0, 1]."""
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image if image.dtype == torch.uint8 else image.float()).numpy()
    picture = np.asarray(image)
    if picture.ndim == 3 and picture.shape[0] == 3 and picture.shape[-1] != 3:
        picture = picture.transpose(1, 2, 0)
    if picture.ndim != 3 or picture.shape[-1] != 3:
        msg = f"A picture must be RGB, (3, height, width) or (height, width, 3), got {picture.shape}."
        raise ValueError(msg)
    return picture.astype(np.float32) / 255 if picture.dtype == np.uint8 else picture.astype(np.float32).clip(0, 1)
