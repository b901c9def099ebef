"""Files that are either the old one or the whole new one, whenever the process dies."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: str | Path, data: bytes | memoryview | str) -> None:
    """Write a file beside its destination, flush it to disk, and move it there in one step."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace(source: Path, destination: Path) -> None:
    """Move a finished file over its destination in one step, and make the move itself durable."""
    os.replace(source, destination)
    if os.name != "posix":
        return
    folder = os.open(destination.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
