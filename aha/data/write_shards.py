"""A folder of pictures to tar shards in the layout of timm/imagenet-1k-wds: ``aha shards FOLDER OUT``."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aha.data.folder import FolderDataset
from aha.data.one_shard import ShardDone, ShardJob, ShardWriteError, file_hash, shown, write_shard

log = logging.getLogger(__name__)
INFO = "_info.json"
MANY_BAD = 0.01


def write_shards(
    folder: str,
    output: str,
    *,
    split: str = "train",
    shard_size: int = 1000,
    workers: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    max_bad_rate: float = MANY_BAD,
    progress: bool = True,
) -> dict[str, Any]:
    """Write a folder of pictures as shards, with an ``_info.json`` that the data module and timm read.

    The same folder and options give the same bytes, whatever ``workers`` is. Each shard is written aside, read back,
    compared member by member with what went in, and only then named. A call that was interrupted is repeated with the
    same arguments: finished shards whose hash still holds are kept. Pictures that can't be decoded are left out and
    listed in ``_info.json``.

    Args:
        folder: pictures, in class folders or flat (:class:`aha.data.folder.FolderDataset`).
        output: folder for the shards; several splits may share it.
        split: name of the split, and start of the shards' names.
        shard_size: pictures per shard.
        workers: processes.
        shuffle: mix the pictures over the shards, so that no shard holds one class only.
        seed: of this mixing.
        max_bad_rate: share of unreadable pictures above which the result isn't declared complete.
        progress: show a progress bar.

    Returns:
        The split's entry in ``_info.json``.

    Raises:
        ShardWriteError: if ``output`` holds shards of this split from another folder or with other options, if a
            shard doesn't read back as written, or if too many pictures are unreadable.
        ValueError: for a folder without pictures, or options out of range.
    """
    if shard_size < 1 or workers < 1 or not split or "/" in split or split.startswith("_"):
        msg = f"shard_size and workers must be ≥ 1 and split a plain name; got {shard_size}, {workers}, {split!r}."
        raise ValueError(msg)
    dataset = FolderDataset(folder)
    target = Path(output)
    target.mkdir(parents=True, exist_ok=True)
    jobs = list(_plan(dataset, target, split, shard_size, shuffle, seed))
    plan = _fingerprint(dataset, jobs)
    record = target / f"_progress-{split}.jsonl"
    finished = _finished(target, record, split, plan)
    if not record.exists():
        _replace(record, json.dumps({"plan": plan}) + "\n")
    todo = [job for job in jobs if Path(job.path).name not in finished]
    if len(todo) < len(jobs):
        log.info("%s: %d of %d shards are there already", split, len(jobs) - len(todo), len(jobs))
    with record.open("a", encoding="utf-8") as lines, _bar(progress, split, len(dataset)) as advance:
        advance(sum(len(job.samples) for job in jobs) - sum(len(job.samples) for job in todo))
        for job, done in _run(todo, workers):
            lines.write(json.dumps(asdict(done)) + "\n")
            lines.flush()
            finished[done.name] = done
            advance(len(job.samples))
    return _complete(
        target, split, plan, dataset, [finished[Path(job.path).name] for job in jobs], max_bad_rate, record
    )


def _plan(
    dataset: FolderDataset, target: Path, split: str, shard_size: int, shuffle: bool, seed: int
) -> Iterator[ShardJob]:
    order = list(range(len(dataset)))
    if shuffle:
        random.Random(seed).shuffle(order)
    keys = _keys(dataset)
    for number, start in enumerate(range(0, len(order), shard_size)):
        samples = []
        for index in order[start : start + shard_size]:
            raw, name = dataset.raw(index), dataset.files[index]
            mask = None if raw.mask is None else raw.mask.relative_to(dataset.root).as_posix()
            samples.append((keys[index], name, mask, raw.label, name.split("/")[0] if raw.label >= 0 else None))
        yield ShardJob(str(target / f"{split}-{number:05d}.tar"), str(dataset.root), tuple(samples))


def _keys(dataset: FolderDataset) -> list[str]:
    """One key per picture: its path, without the suffix, dots and slashes (a key ends at its first dot)."""
    taken: set[str] = set()
    keys = []
    for name in dataset.files:
        stem = shown(name).rsplit(".", 1)[0].replace("/", "_").replace(".", "_").lstrip("_") or "picture"
        key, number = stem, 1
        while key in taken:
            number += 1
            key = f"{stem}-{number}"
        taken.add(key)
        keys.append(key)
    return keys


def _fingerprint(dataset: FolderDataset, jobs: list[ShardJob]) -> str:
    digest = hashlib.sha256()
    for job in jobs:
        for key, name, mask, label, _ in job.samples:
            size = (dataset.root / name).stat().st_size
            digest.update(os.fsencode(f"{Path(job.path).name}|{key}|{name}|{size}|{mask}|{label}\n"))
    return digest.hexdigest()


def _finished(target: Path, record: Path, split: str, plan: str) -> dict[str, ShardDone]:
    """Shards of this very plan that are on disk with the hash that was recorded."""
    known, lines = None, []
    info = _read_info(target)["splits"].get(split)
    if record.exists():
        rows = _json_lines(record)
        known, lines = rows[0]["plan"] if rows else None, [ShardDone(**row) for row in rows[1:]]
        if known is None:
            record.unlink()  # killed before its first line was whole
    elif info is not None:
        known = info.get("plan", "")
        skipped = info.get("skipped", [])
        fields = zip(info["filenames"], info["shard_lengths"], info.get("sha256", []), strict=False)
        lines = [ShardDone(*row, skipped if number == 0 else []) for number, row in enumerate(fields)]
    elif any(target.glob(f"{split}-*.tar")):
        known = ""
    if known is not None and known != plan:
        msg = (
            f"{str(target)!r} holds {split!r} shards of another folder, of changed pictures or with other options; "
            "choose another output or remove them."
        )
        raise ShardWriteError(msg)
    return {done.name: done for done in lines if file_hash(target / done.name) == done.sha256}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may have been cut by a kill; it is cut off so that the next starts clean."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as stream:
            stream.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _run(jobs: list[ShardJob], workers: int) -> Iterator[tuple[ShardJob, ShardDone]]:
    if workers == 1 or len(jobs) <= 1:
        yield from ((job, write_shard(job)) for job in jobs)
        return
    with ProcessPoolExecutor(workers) as pool:
        waiting = iter(jobs)
        running: dict[Future, ShardJob] = {}
        try:
            while True:
                for job in waiting:
                    running[pool.submit(write_shard, job)] = job
                    if len(running) >= 2 * workers:
                        break
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            msg = (
                "a writing process died (out of memory?); finished shards stay, run again, perhaps with fewer workers."
            )
            raise ShardWriteError(msg) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _complete(
    target: Path, split: str, plan: str, dataset: FolderDataset, shards: list[ShardDone], limit: float, record: Path
) -> dict[str, Any]:
    skipped = [line for shard in shards for line in shard.skipped]
    if skipped:
        log.warning("%s: left out %d of %d pictures, first: %s", split, len(skipped), len(dataset), skipped[0])
    if len(skipped) > limit * len(dataset):
        msg = (
            f"{len(skipped)} of {len(dataset)} pictures are unreadable, above max_bad_rate={limit}; the first are "
            f"{skipped[:3]}. Repair them, or run again with a higher max_bad_rate to accept the shards as they are."
        )
        raise ShardWriteError(msg)
    entry = {
        "name": split,
        "num_samples": sum(shard.samples for shard in shards),
        "filenames": [shard.name for shard in shards],
        "shard_lengths": [shard.samples for shard in shards],
        "sha256": [shard.sha256 for shard in shards],
        "classes": [shown(name) for name in dataset.classes],
        "skipped": skipped,
        "plan": plan,
    }
    info = _read_info(target)
    info["splits"][split] = entry
    _replace(target / INFO, json.dumps(info, indent=1, ensure_ascii=False) + "\n")
    record.unlink()
    return entry


def _read_info(target: Path) -> dict[str, Any]:
    path = target / INFO
    return {"splits": {}, **(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})}


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


class _bar:
    """A rich progress bar over pictures, or nothing."""

    def __init__(self, shown: bool, name: str, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, disable=not shown)
        self._task = self._progress.add_task(f"writing {name}", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._progress.start()
        return lambda count: self._progress.advance(self._task, count)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
