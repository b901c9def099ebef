"""Which samples to show, and their pictures as data addresses."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from PIL import Image

from aha.evaluation.collect import Collected, StoredMap
from aha.evaluation.data import Samples
from aha.pictures import colour, scale_limit

PER_GROUP = 4
PICTURE_SIDE = 224
SMALL = 96  # pictures no larger than this are kept lossless


class Group(NamedTuple):
    """Samples shown together."""

    title: str
    about: str
    keys: list[str]


def choose(collected: Collected, labels: Sequence[str], *, count: int = PER_GROUP) -> list[Group]:
    """Best, median and worst samples of the first explainer, and those on which explainers disagree most.

    Only samples whose maps were kept can be shown; none is shown twice.
    """
    protocol, metric = collected.headline()
    sign = 1 if collected.directions[protocol, metric] else -1
    table = sign * np.stack([collected.columns[label, protocol, metric] for label in labels], 1)
    kept = [all((label, key) in collected.maps for label in labels) for key in collected.keys]
    usable = [i for i in np.argsort(-table[:, 0], kind="stable") if kept[i] and not np.isnan(table[i, 0])]
    used: set[int] = set()

    def take(order: Iterable[int]) -> list[str]:
        chosen = [int(i) for i in order if int(i) not in used][:count]
        used.update(chosen)
        return [collected.keys[i] for i in chosen]

    name = metric.replace("_minus_", " − ").replace("_", " ")
    middle = len(usable) / 2
    near_median = [usable[j] for j in sorted(range(len(usable)), key=lambda j: abs(j + 0.5 - middle))]
    groups = [
        Group("Worst", f"lowest {name} ({protocol}) of {labels[0]}", take(reversed(usable))),
        Group("Best", f"highest {name} ({protocol}) of {labels[0]}", take(usable)),
        Group("Median", f"in the middle by {name} ({protocol}) of {labels[0]}", take(near_median)),
    ]
    if len(labels) > 1:
        spread = np.fmax.reduce(table, 1) - np.fmin.reduce(table, 1)  # NaN passes by where a figure is there
        order = sorted(usable, key=lambda i: -spread[i])
        about = f"largest gap between two explainers' {name} ({protocol})"
        groups.append(Group("Most disagreement", about, take(order)))
    groups = [groups[i] for i in (1, 2, 0, *range(3, len(groups)))]
    return [group for group in groups if group.keys]


def load_pictures(samples: Samples, keys: Iterable[str]) -> dict[str, np.ndarray]:
    """The pictures of some samples, uint8 ``(H, W, 3)``; reading stops when all are found."""
    missing, found = set(keys), {}
    for key, load in samples.read():
        if not missing:
            break
        if key in missing:
            found[key] = load()["image"].permute(1, 2, 0).numpy()
            missing.discard(key)
    return found


def picture_address(picture: np.ndarray) -> str:
    """A picture as a ``data:`` address: PNG if small, else JPEG of at most 224 pixels a side."""
    image = Image.fromarray(picture)
    if max(image.size) <= SMALL:
        return _address(image, "PNG", optimize=True)
    image.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    return _address(image, "JPEG", quality=85)


def map_address(stored: StoredMap) -> str:
    """A map as a transparent picture to lay over its sample: hue says the sign, opacity the magnitude.

    A map of one sign is drawn from its own minimum: its zero separates nothing.
    """
    values = stored.values
    if stored.low >= 0 or stored.high <= 0:
        values = values - stored.low
    levels = np.rint(np.clip(values / scale_limit(values), -1, 1) * 127 + 128).astype(np.uint8)
    colours, opacity = _palette()
    image = Image.frombytes("P", levels.shape[::-1], levels.tobytes())
    image.putpalette(colours)
    return _address(image, "PNG", transparency=opacity, optimize=False)


@cache
def _palette() -> tuple[bytes, bytes]:
    """RGB and opacity of the levels 1…255, which stand for −1…1."""
    values = np.clip((np.arange(256) - 128) / 127, -1, 1)
    tint = colour((np.sign(values) * (1 + np.abs(values)) / 2)[None], limit=1.0)[0]
    return tint.tobytes(), np.rint(255 * np.abs(values) ** 0.75).astype(np.uint8).tobytes()


def _address(image: Image.Image, kind: str, **options: object) -> str:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"
