"""Draws the demo's pictures: handwritten digits, tinted and placed on clutter, with exact masks.

Every number of scene ``i`` comes from a counter-based generator keyed by (seed, i), and every operation works
on each scene by itself, so a scene is the same bit for bit whatever batch, worker or order it is drawn in.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray

SIZE = 64  # side of a scene in pixels
WINDOW = 44  # side of the window in which one stamp (digit, fragment or patch) is drawn
PAD = 32  # canvas beyond the scene, so that windows may stick out
CHUNK = 32  # scenes drawn at once: keeps the canvases in the cache
NUM_PATCHES, NUM_FRAGMENTS = 4, 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al. 2014): a bijection of 64 bits that looks random."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class IndexedRandom:
    """One random stream per index, all drawn at once: row b depends on ``seed`` and ``indices[b]`` only."""

    def __init__(self, seed: int, indices: ArrayLike) -> None:
        with np.errstate(over="ignore"):
            key = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
            self._keys = _mix(key ^ _mix(np.asarray(indices, dtype=np.uint64) * _GOLDEN + _GOLDEN))
        self._drawn = 0

    def __len__(self) -> int:
        return len(self._keys)

    def uniform(self, low: float, high: float, *shape: int) -> NDArray[np.float64]:
        """The next numbers of every stream, uniform on [low, high). Shape: (batch, \\*shape)."""
        count = prod(shape)
        steps = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        with np.errstate(over="ignore"):
            bits = _mix(self._keys[:, None] + steps * _GOLDEN)
        numbers = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return (low + (high - low) * numbers).reshape(len(self._keys), *shape)

    def integer(self, high: ArrayLike, *shape: int) -> NDArray[np.int64]:
        """The next whole numbers of every stream, in 0 … high − 1 (``high`` may differ by row)."""
        return np.floor(self.uniform(0.0, 1.0, *shape) * high).astype(np.int64)


def _colour(hue: NDArray, luminance: NDArray, vividness: ArrayLike = 1.0) -> NDArray[np.float32]:
    """RGB colours of given hue and Rec. 709 luminance. Shape: (batch,) → (batch, 3, 1, 1)."""
    hue, luminance = hue[:, None], luminance[:, None]
    vivid = np.clip(np.abs((hue * 6 + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1, 0, 1)
    own = vivid[:, :1] * 0.2126 + vivid[:, 1:2] * 0.7152 + vivid[:, 2:] * 0.0722
    whiter = vivid + (1 - vivid) * ((luminance - own) / (1 - own + 1e-9))
    colour = np.where(luminance < own, vivid * (luminance / own), whiter)
    colour = luminance + (colour - luminance) * np.broadcast_to(vividness, hue.shape[:1])[:, None]
    return colour.astype(np.float32)[:, :, None, None]


@lru_cache(maxsize=1)
def _noise() -> NDArray[np.float32]:
    """A fixed tile of white noise that scenes take their texture from. Shape: (256, 256), range [−1, 1)."""
    return IndexedRandom(0, range(256)).uniform(-1, 1, 256).astype(np.float32)


@lru_cache(maxsize=1)
def _patches() -> NDArray[np.float32]:
    """Plain shapes for clutter: disc, square, triangle, bar. Shape: (4, 8, 8), range [0, 1]."""
    y, x = np.mgrid[:8, :8] - 3.5
    inside = [x**2 + y**2 < 12, np.maximum(abs(x), abs(y)) < 3, abs(x) * 2 - 3.2 < y, abs(y) < 1]
    edge = np.maximum(abs(x), abs(y)) < 3.4
    return np.stack([(shape & edge) for shape in inside]).astype(np.float32)


def _stamp(pictures: NDArray, rng: IndexedRandom, *, size: tuple[float, float], turn: float) -> NDArray[np.float32]:
    """Opacity of 8×8 pictures drawn at a random size, rotation, shear, aspect and stroke width.

    Shape: (batch, 8, 8) → (batch, WINDOW, WINDOW), range [0, 1], zero outside the strokes.
    """
    scale = WINDOW / rng.uniform(*size)
    angle, shear, aspect = (
        rng.uniform(-turn, turn),
        rng.uniform(-0.15, 0.15),
        np.exp(rng.uniform(-0.12, 0.12)),
    )
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    axis = (np.arange(WINDOW) * 2 + 1) / WINDOW - 1
    x, y = axis[None, None, :], axis[None, :, None]
    rows = [v[:, None, None] for v in (aspect * (cos + shear * sin), aspect * (shear * cos - sin), sin, cos)]
    grid = np.stack([rows[0] * x + rows[1] * y, (rows[2] * x + rows[3] * y) / aspect[:, None, None]], axis=-1)
    drawn = F.grid_sample(
        torch.from_numpy(np.ascontiguousarray(pictures[:, None], dtype=np.float32)),
        torch.from_numpy(grid.astype(np.float32)),
        mode="bicubic",
        align_corners=False,
    )
    threshold = rng.uniform(0.33, 0.47).astype(np.float32)[:, None, None]
    return np.clip((drawn[:, 0].numpy() - threshold) * np.float32(4.0), 0, 1)


def _paste(canvas: NDArray, opacity: NDArray, colour: NDArray, top: NDArray, left: NDArray) -> None:
    """Blends one coloured stamp into each scene, in place; its window starts at pixel (top, left)."""
    for b in range(len(canvas)):
        y, x = top[b] + PAD, left[b] + PAD
        area = canvas[b, :, y : y + WINDOW, x : x + WINDOW]
        area += opacity[b] * (colour[b] - area)


def _placed(
    opacity: NDArray, rng: IndexedRandom, half: NDArray | None, axis: NDArray | None
) -> tuple[NDArray, NDArray]:
    """Random window corners that keep the ink inside the scene, or inside one half of it along ``axis``."""
    corners = []
    for k, other in ((0, 2), (1, 1)):
        ink = opacity.max(axis=other) > 0
        first, last = ink.argmax(axis=1), WINDOW - 1 - ink[:, ::-1].argmax(axis=1)
        low, high = np.ones(len(ink)), np.full(len(ink), SIZE - 1.0)
        if half is not None:
            split = axis == k
            low = np.where(split & (half == 1), SIZE / 2, low)
            high = np.where(split & (half == 0), SIZE / 2, high)
        room = np.maximum(high - low - (last - first + 1), 0)
        corners.append(low.astype(np.int64) + rng.integer(room + 1) - first)
    return corners[0], corners[1]


class Scenes(NamedTuple):
    """A batch of pictures with D digits each (D = 0, 1 or 2)."""

    images: NDArray[np.uint8]  # (batch, 3, 64, 64)
    masks: NDArray[np.bool_]  # (batch, D, 64, 64): exactly the pixels that each digit was painted on
    labels: NDArray[np.int64]  # (batch, D), all different within a scene
    sources: NDArray[np.int64]  # (batch, D): rows of the pool that were used
    backgrounds: NDArray[np.uint8]  # (batch, 3, 64, 64): the same scenes before the digits were painted


def draw_scenes(pictures: NDArray, labels: NDArray, *, seed: int, indices: ArrayLike, digits: int) -> Scenes:
    """Draws scenes: a soft coloured background, patches, fragments of strokes, then ``digits`` whole digits.

    Each scene is dark with light digits or light with dark digits; fragments come in any brightness, so that
    only the shape tells a digit from clutter.

    Args:
        pictures: pool of digits to draw from, range [0, 1], sorted by label. Shape: (pool, 8, 8).
        labels: their classes 0 … 9, ascending. Shape: (pool,).
        seed: names the stream of scenes.
        indices: which scenes of that stream. Shape: (batch,).
        digits: number of whole digits in a scene, 0, 1 or 2; two are of different classes and never overlap.
    """
    indices = np.asarray(indices, dtype=np.uint64)
    chunks = [indices[i : i + CHUNK] for i in range(0, max(len(indices), 1), CHUNK)]
    drawn = [_draw_chunk(pictures, labels, IndexedRandom(seed, chunk), digits) for chunk in chunks]
    return Scenes(*(np.concatenate(parts) for parts in zip(*drawn, strict=True)))


def _draw_chunk(pictures: NDArray, labels: NDArray, rng: IndexedRandom, digits: int) -> Scenes:
    batch = len(rng)
    night = rng.uniform(0, 1) < 0.55
    base_hue, spread, vividness = rng.uniform(0, 1), rng.uniform(0.05, 0.3), rng.uniform(0.2, 0.8)

    def clutter_colour() -> NDArray[np.float32]:
        hue = (base_hue + spread * rng.uniform(-1, 1)) % 1
        return _colour(hue, np.where(night, rng.uniform(0.05, 0.34), 1 - rng.uniform(0.08, 0.4)), vividness)

    # background: three colours melting into each other, and a fine grain
    blobs = torch.from_numpy(rng.uniform(-0.6, 1.6, 2, 5, 5).astype(np.float32))
    weight = F.interpolate(blobs, size=(SIZE, SIZE), mode="bicubic", align_corners=True).clamp(0, 1).numpy()
    first, second, third = (clutter_colour() for _ in range(3))
    rows, columns = (rng.integer(256 - SIZE)[:, None] + np.arange(SIZE) for _ in range(2))
    grain = _noise()[rows[:, :, None], columns[:, None, :]]
    canvas = np.zeros((batch, 3, SIZE + 2 * PAD, SIZE + 2 * PAD), dtype=np.float32)
    view = canvas[:, :, PAD:-PAD, PAD:-PAD]
    view[:] = first + weight[:, :1] * (second - first)
    view += weight[:, 1:] * (third - view)
    view += (grain * rng.uniform(0, 0.07, 1, 1).astype(np.float32))[:, None]

    def paste_clutter(opacity: NDArray, colour: NDArray, strength: tuple[float, float]) -> None:
        opacity = opacity * rng.uniform(*strength, 1, 1).astype(np.float32)
        _paste(canvas, opacity, colour, *(rng.integer(SIZE) - WINDOW // 2 for _ in range(2)))

    for _ in range(NUM_PATCHES):
        opacity = _stamp(_patches()[rng.integer(4)], rng, size=(10.0, 34.0), turn=np.pi)
        paste_clutter(opacity, clutter_colour(), (0.3, 0.9))
    cells = np.arange(8)
    for _ in range(NUM_FRAGMENTS):
        parts = pictures[rng.integer(len(pictures))]
        for shape in ((batch, 8, 1), (batch, 1, 8)):
            start = rng.integer(6)[:, None]
            parts = parts * ((cells >= start) & (cells < start + 3)).reshape(shape)
        opacity = _stamp(parts, rng, size=(22.0, 36.0), turn=np.pi)
        paste_clutter(opacity, _colour(rng.uniform(0, 1), rng.uniform(0.1, 0.9), 0.8), (0.5, 1.0))
    np.clip(view, 0, 1, out=view)
    backgrounds = _to_bytes(view)

    starts, counts = np.searchsorted(labels, np.arange(10)), np.bincount(labels, minlength=10)
    half, axis = (rng.integer(2), rng.integer(2)) if digits == 2 else (None, None)
    classes = np.zeros((batch, digits), dtype=np.int64)
    sources = np.zeros((batch, digits), dtype=np.int64)
    masks = np.zeros((batch, digits, SIZE, SIZE), dtype=bool)
    size = (26.0, 38.0) if digits == 1 else (25.0, 31.0)
    for k in range(digits):
        classes[:, k] = rng.integer(10) if k == 0 else (classes[:, 0] + 1 + rng.integer(9)) % 10
        sources[:, k] = starts[classes[:, k]] + rng.integer(counts[classes[:, k]])
        opacity = _stamp(pictures[sources[:, k]], rng, size=size, turn=0.22)
        corner = _placed(opacity, rng, half if k == 0 else 1 - half, axis)
        painted = np.zeros((batch, 1, *canvas.shape[2:]), dtype=np.float32)
        _paste(painted, opacity, np.ones(batch, dtype=np.float32), *corner)
        alpha = painted[:, 0, PAD:-PAD, PAD:-PAD] * ~masks.any(axis=1)
        masks[:, k] = alpha > 0
        tint = _colour(rng.uniform(0, 1), np.where(night, rng.uniform(0.6, 0.95), rng.uniform(0.02, 0.25)))
        view += alpha[:, None] * (tint - view)
    return Scenes(_to_bytes(view), masks, classes, sources, backgrounds)


def _to_bytes(images: NDArray) -> NDArray[np.uint8]:
    return (images * np.float32(255) + np.float32(0.5)).astype(np.uint8)
