"""What an evaluation has computed, on disk the moment it is computed.

Every finished piece of work is one line of JSON, appended by the process that did it to a file of its own. A line is
whole or it doesn't count: a run that is killed, out of memory or out of disk loses the piece it was working on and
nothing else, and the next run with the same settings goes on from there.
"""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class ResultStore:
    """Append-only records in ``<folder>/parts/``.

    Args:
        folder: the evaluation's output folder.
        rank: of the writing process; each writes files of its own.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0) -> None:
        self.parts = Path(folder) / "parts"
        self.rank = rank
        self._file: int | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; it has reached the operating system when this returns."""
        if self._file is None:
            self.parts.mkdir(parents=True, exist_ok=True)
            path = self.parts / f"{time.time_ns()}-{self.rank}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        line = memoryview(json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        while line:
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Flush to disk."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def read(self) -> Iterator[dict[str, Any]]:
        """All whole records of all runs and processes, oldest file first; torn lines are passed over."""
        for path in sorted(self.parts.glob("*.jsonl")):
            with path.open("rb") as stream:
                for line in stream:
                    try:
                        record = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(record, dict):
                        yield record


def encode_floats(values: np.ndarray) -> list[float | None]:
    """A row of floats for JSON, exact, NaN as null."""
    return [None if np.isnan(v) else float(v) for v in np.asarray(values, dtype=np.float64)]


def decode_floats(values: list[float | None]) -> np.ndarray:
    """The inverse of :func:`encode_floats`."""
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def encode_bytes(array: np.ndarray) -> dict[str, Any]:
    """A uint8 array for JSON: compressed, exact."""
    data = zlib.compress(np.ascontiguousarray(array, dtype=np.uint8).tobytes(), 1)
    return {"shape": list(array.shape), "data": base64.b64encode(data).decode()}


def decode_bytes(record: dict[str, Any]) -> np.ndarray:
    """The inverse of :func:`encode_bytes`."""
    data = zlib.decompress(base64.b64decode(record["data"]))
    return np.frombuffer(data, np.uint8).reshape(record["shape"])
