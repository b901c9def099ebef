"""Tiny pictures and tars for the tests of the data room."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def encode(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    picture.save(stream, kind, **options)
    return stream.getvalue()


def plain(value: int, size: tuple[int, int] = (9, 12)) -> np.ndarray:
    """A picture of one colour (value, 255 − value, 7)."""
    return np.broadcast_to(np.array([value, 255 - value, 7], np.uint8), (*size, 3)).copy()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_shards_of(folder: Path, lengths: Iterable[int], *, start: int = 0) -> list[str]:
    """Shards whose samples are numbered through: key ``s0007``, label 7, colour 7."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, number = [], start
    for index, length in enumerate(lengths):
        members = []
        for _ in range(length):
            members += [
                (f"s{number:04d}.cls", str(number).encode()),
                (f"s{number:04d}.png", encode(plain(number % 256))),
            ]
            number += 1
        shards.append(str(write_tar(folder / f"part-{index:03d}.tar", members)))
    return shards
