"""From raw samples to batches, the same for shards and folders: decoding, collating, counting the bad ones."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from aha.data.pictures import BadPicture, Resize, read_mask, read_sized

UNKNOWN = -1
MIN_SIDE = 2  # a picture of one pixel is a placeholder, not a picture
MIN_JUDGED = 100  # samples seen before a rate of bad ones means anything


class BadRateError(RuntimeError):
    """More bad samples than ``max_bad_rate`` allows."""


@dataclass
class RawSample:
    """One undecoded sample; ``image`` and ``mask`` are encoded bytes or a path, ``error`` says why it is bad."""

    key: str
    image: bytes | Path | None = None
    label: bytes | int | None = None
    info: bytes | None = None
    mask: bytes | Path | None = None
    error: str | None = None


@dataclass(frozen=True)
class Slot:
    """One reader among all: ``worker`` of ``workers`` on ``rank`` of ``world``."""

    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1

    @property
    def index(self) -> int:
        return self.worker * self.world + self.rank  # neighbouring shares go to different ranks

    @property
    def total(self) -> int:
        return self.world * self.workers


class Source(Protocol):
    """Where raw samples come from: :class:`~aha.data.shards.ShardSource`, :class:`~aha.data.folder.FolderDataset`."""

    def train(self, position: tuple[int, int, int], slot: Slot, skip: int) -> Iterator[RawSample]:
        """Endless, after ``skip`` samples; ``position`` is (seed, epoch, global step at the epoch's start)."""

    def evaluate(self, slot: Slot) -> Iterator[RawSample]:
        """Each sample once over all slots."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the workers do with a raw sample."""

    image_size: tuple[int, int]
    batch_size: int
    resize: Resize = "squash"
    max_bad_rate: float = 0.01


@dataclass
class Tally:
    """Samples seen, and the bad ones by reason (with the key of the first)."""

    seen: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        return sum(count for count, _ in self.reasons.values())

    def add(self, other: Tally) -> Tally:
        self.seen += other.seen
        for reason, (count, example) in other.reasons.items():
            known, first = self.reasons.get(reason, (0, example))
            self.reasons[reason] = (known + count, first)
        return self

    def __str__(self) -> str:
        reasons = sorted(self.reasons.items(), key=lambda item: -item[1][0])
        named = "; ".join(f"{count} × {reason} (first: {example})" for reason, (count, example) in reasons[:5])
        rest = f"; {len(reasons) - 5} other reasons" if len(reasons) > 5 else ""
        return f"{self.bad} of {self.seen} samples ({self.bad / max(1, self.seen):.3%}): {named}{rest}"

    def judge(self, limit: float, *, final: bool = False) -> None:
        """Raise :class:`BadRateError` above the limit: at the end by the count, before it only where chance can't be
        the reason (three standard deviations above the limit)."""
        allowed = limit * self.seen
        if self.bad > allowed + (0 if final else 3 * math.sqrt(allowed)) and (final or self.seen >= MIN_JUDGED):
            msg = f"unreadable: {self}. That is above max_bad_rate={limit}; repair the data or raise max_bad_rate."
            raise BadRateError(msg)


def stream_seed(*parts: int) -> int:
    """A 64-bit seed that any change of any part changes."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def decode(sample: RawSample, recipe: Recipe) -> dict[str, Any]:
    """One sample as ``image`` uint8 (3,H,W), ``label`` int, ``key``, and ``mask`` bool (1,H,W) if it has one.

    Raises:
        BadPicture: if the sample can't be used.
    """
    if sample.error is not None:
        raise BadPicture(sample.error)
    size, resize = recipe.image_size, recipe.resize
    image, own = read_sized(sample.image, size=size, resize=resize)
    if min(own) < MIN_SIDE:
        msg = f"picture of {own[1]}×{own[0]} pixels"
        raise BadPicture(msg)
    item = {"image": image, "label": _label(sample), "key": sample.key}
    if sample.mask is not None:
        mask = read_mask(sample.mask, size=size, resize=resize, of=own)
        item["mask"] = torch.from_numpy(np.array(mask)).unsqueeze(0)
    return item


def _label(sample: RawSample) -> int:
    value: Any = sample.label
    try:
        if value is None and sample.info is not None:
            info = json.loads(sample.info)
            value = info.get("label") if isinstance(info, Mapping) else None
        label = UNKNOWN if value is None else int(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        msg = "label is not an integer"
        raise BadPicture(msg) from error
    if not UNKNOWN <= label < 2**31:
        msg = "label is out of range"
        raise BadPicture(msg)
    return label


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack samples; ``mask`` is kept only if every sample of the batch has one."""
    batch = {
        "image": default_collate([item["image"] for item in items]),  # in a worker, straight into shared memory
        "label": torch.tensor([item["label"] for item in items], dtype=torch.long),
        "key": [item["key"] for item in items],
    }
    if all("mask" in item for item in items):
        batch["mask"] = torch.stack([item["mask"] for item in items])
    return batch
