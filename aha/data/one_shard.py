"""One shard written aside, read back, and only then named."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import webdataset as wds
from PIL import Image

from aha.data.pictures import BadPicture, read_mask, read_sized

_KEPT = {".jpg": "jpg", ".jpeg": "jpg", ".png": "png", ".webp": "webp"}  # bytes go in unchanged; others become PNG


class ShardWriteError(RuntimeError):
    """Shards that can't be written or verified; what is finished stays and is taken up by the next call."""


@dataclass(frozen=True)
class ShardJob:
    """One shard to write."""

    path: str
    root: str
    samples: tuple[tuple[str, str, str | None, int, str | None], ...]  # key, picture, mask, label, class


@dataclass
class ShardDone:
    """One shard written and verified."""

    name: str
    samples: int
    sha256: str
    skipped: list[str]


def write_shard(job: ShardJob) -> ShardDone:
    """Write one shard aside, verify it, name it."""
    final, part = Path(job.path), Path(job.path + ".part")
    members: list[tuple[str, str]] = []
    skipped, count = [], 0
    try:
        with part.open("wb") as stream:
            with wds.TarWriter(stream, encoder=False, mtime=0, user="", group="", format="PAX_FORMAT") as tar:
                for key, name, mask, label, class_name in job.samples:
                    try:
                        sample = _sample(Path(job.root), key, name, mask, label, class_name)
                    except BadPicture as error:
                        skipped.append(f"{shown(name)}: {error}")
                        continue
                    tar.write(sample)
                    members += [(f"{key}.{k}", _sha(sample[k])) for k in sorted(sample) if k != "__key__"]
                    count += 1
            stream.flush()
            os.fsync(stream.fileno())
        with tarfile.open(part) as tar:
            read = [(member.name, _sha(tar.extractfile(member).read())) for member in tar]
        if read != members:
            msg = f"{final.name} doesn't read back as it was written; check the disk and run again."
            raise ShardWriteError(msg)
        digest = file_hash(part)
        os.replace(part, final)
    except OSError as error:
        msg = f"{final.name} could not be written ({error}); finished shards stay, run again to continue."
        raise ShardWriteError(msg) from error
    finally:
        part.unlink(missing_ok=True)
    return ShardDone(final.name, count, digest, skipped)


def _sample(root: Path, key: str, name: str, mask: str | None, label: int, class_name: str | None) -> dict[str, Any]:
    try:
        data = (root / name).read_bytes()
    except OSError as error:
        msg = f"unreadable file: {error.strerror}"
        raise BadPicture(msg) from error
    pixels, (height, width) = read_sized(data)
    suffix = _KEPT.get(Path(name).suffix.lower())
    if suffix is None:
        encoded = io.BytesIO()
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(encoded, "PNG")
        suffix, data = "png", encoded.getvalue()
    info = {"filename": shown(name), "label": label, "width": width, "height": height}
    sample: dict[str, Any] = {"__key__": key, suffix: data}
    if label >= 0:
        sample["cls"] = str(label).encode()
        info["class"] = shown(class_name or "")
    if mask is not None:
        read_mask(root / mask, of=(height, width))
        sample["mask.png"] = (root / mask).read_bytes()
    return {**sample, "json": json.dumps(info, ensure_ascii=False).encode()}


def file_hash(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def shown(name: str) -> str:
    """A file name as valid Unicode (names on disk may be any bytes)."""
    return os.fsencode(name).decode("utf-8", "replace")
