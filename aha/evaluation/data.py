"""The pictures of an evaluation: demo, folder or shards, in one fixed order, decoded only by whoever needs them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.evaluation.imported_data import names_callable, open_imported

Loader = Callable[[], dict[str, Any]]


class Samples(NamedTuple):
    """Where pictures come from.

    Attributes:
        name: for the results.
        read: starts a pass over ``(key, load)`` in a fixed order; ``load`` decodes one sample to ``image`` uint8
            ``(3, H, W)``, ``label`` (−1 unknown), and ``mask`` bool ``(1, H, W)`` where there is one.
        count: number of samples, where known without reading everything.
        labelled: whether samples have labels that mean the classifier's classes.
    """

    name: str
    read: Callable[[], Iterator[tuple[str, Loader]]]
    count: int | None
    labelled: bool = True


@dataclass
class Block:
    """Consecutive samples that are computed together: the same whatever the number of processes.

    Attributes:
        index: place in the order of blocks.
        start: place of its first sample in the order of samples.
        keys: of the samples wanted.
        loaders: decode them.
        failed: key and reason of samples that can't take part.
    """

    index: int
    start: int
    keys: list[str]
    loaders: list[Loader]
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class Batch:
    """A decoded block.

    Attributes:
        keys: of the samples that could be decoded.
        images: uint8 ``(batch, 3, H, W)``.
        labels: ``(batch,)``, −1 unknown.
        masks: bool ``(batch, 1, H, W)``, empty where a sample has none.
    """

    keys: list[str]
    images: Tensor
    labels: Tensor
    masks: Tensor


def open_data(data: str | None, classifier: FrozenClassifier, *, split: str = "test", digits: int = 1) -> Samples:
    """Open ``"demo"``, an image folder, WebDataset shards (a ``.tar``, a pattern, a folder of them, an address), or a
    data set by ``module:callable(option=value, …)``.

    Class folders count as labels if they bear the classifier's class names, or if there are as many as it has classes
    (in sorted order then).

    Args:
        data: what to open.
        classifier: pictures are resized to the size it takes.
        split: of the demo, or of a data set by ``module:callable``.
        digits: in each picture of the demo, 1 or 2.

    Raises:
        ValueError: nothing there that could be read.
    """
    if not data:
        msg = "data: name demo, a folder of pictures, shards, or module:callable(option=value)."
        raise ValueError(msg)
    if data == "demo":
        from aha.data.demo import SIZE, DemoDataset

        demo = DemoDataset(split, digits=digits)
        if classifier.image_size != (SIZE, SIZE):
            height, width = classifier.image_size
            msg = (
                f"The demo's pictures are {SIZE}×{SIZE}, the classifier takes {height}×{width}: pass image_size={SIZE}."
            )
            raise ValueError(msg)

        def read_demo() -> Iterator[tuple[str, Loader]]:
            for i in range(len(demo)):
                yield f"demo-{split}-{digits}-{i:06d}", lambda i=i: demo[i]

        return Samples(f"demo/{split}" + ("/2" if digits == 2 else ""), read_demo, len(demo))

    if names_callable(data):
        return open_imported(data, split=split, size=classifier.image_size)

    from aha.data.pipeline import RawSample, Recipe, Slot, decode

    path = Path(data).expanduser()
    names = classifier.class_names
    if path.is_dir() and not any(path.glob("*.tar")):
        from aha.data.folder import FolderDataset

        source = FolderDataset(path)
        if source.classes and names is not None and set(source.classes) <= set(names):
            source = FolderDataset(path, classes=names)
        labelled = len(source.classes) == classifier.num_classes
        count = len(source)
    else:
        from aha.data.shards import ShardSource
        from aha.data.sources import expand_urls, info_samples, is_local

        shards = expand_urls(data)
        source = ShardSource(shards=tuple(shards))
        count = info_samples(shards)
        if count is None and all(is_local(shard) for shard in shards):
            count = sum(1 for _ in source.evaluate(Slot()))
        first = next(iter(source.evaluate(Slot())), None)
        labelled = first is not None and (first.label is not None or first.info is not None)
    recipe = Recipe(image_size=tuple(classifier.image_size), batch_size=1)

    def load(sample: RawSample) -> dict[str, Any]:
        return decode(sample, recipe)

    def read() -> Iterator[tuple[str, Loader]]:
        for sample in source.evaluate(Slot()):
            yield sample.key, lambda sample=sample: load(sample)

    return Samples(data, read, count, labelled)


def read_keys(path: str | Path) -> set[str]:
    """Keys from ``hard.csv`` (or any CSV file with a column ``key``), or from a text file with one key a line.

    Raises:
        ValueError: if there are none.
    """
    with Path(path).open(newline="") as stream:
        lines = stream.read().splitlines()
    header = next(csv.reader(lines[:1]), [])
    if "key" in header:
        keys = {row["key"] for row in csv.DictReader(lines)}
    else:
        keys = {line.strip() for line in lines if line.strip()}
    if not keys:
        msg = f"{path} names no samples: expected a column 'key' (as in hard.csv), or one key a line."
        raise ValueError(msg)
    return keys


def blocks(samples: Samples, size: int, *, limit: int | None = None, only: set[str] | None = None) -> Iterator[Block]:
    """Cut the order of samples into blocks; a key that comes again counts as a failed sample of its block.

    Args:
        samples: the data.
        size: samples per block.
        limit: stop after so many samples.
        only: keys to keep.

    Raises:
        ValueError: if nothing is left, or if keys in ``only`` don't occur.
    """
    seen: set[str] = set()

    def wanted() -> Iterator[tuple[str, Loader | None]]:
        for key, load in samples.read():
            if only is not None and key not in only:
                continue
            yield key, None if key in seen else load
            seen.add(key)

    stream, index, start = islice(wanted(), limit), 0, 0
    while part := list(islice(stream, size)):
        good = [(key, load) for key, load in part if load is not None]
        twice = {f"{key} (again)": "duplicate key" for key, load in part if load is None}
        yield Block(index, start, [key for key, _ in good], [load for _, load in good], twice)
        index, start = index + 1, start + len(part)
    if only is not None and limit is None and len(only - seen):
        missing = sorted(only - seen)
        msg = f"{len(missing)} keys asked for are not in {samples.name}, for instance {missing[0]!r}."
        raise ValueError(msg)
    if start == 0:
        msg = f"{samples.name} holds no samples to evaluate."
        raise ValueError(msg)


def decode_block(block: Block, pool: ThreadPoolExecutor | None = None) -> Batch | None:
    """Decode a block; samples that can't be decoded are moved to ``block.failed`` with the reason.

    Returns:
        The batch, or None if no sample is left.
    """

    def attempt(load: Loader) -> dict[str, Any] | str:
        try:
            return load()
        except (ValueError, OSError) as error:  # BadPicture is a ValueError
            return str(error) or type(error).__name__

    loaded = list(pool.map(attempt, block.loaders) if pool else map(attempt, block.loaders))
    items = []
    for key, item in zip(block.keys, loaded, strict=True):
        if isinstance(item, str):
            block.failed[key] = item
        else:
            items.append((key, item))
    if not items:
        return None
    images = torch.stack([item["image"] for _, item in items])
    blank = torch.zeros(1, *images.shape[-2:], dtype=torch.bool)
    masks = torch.stack([item.get("mask", blank) for _, item in items])
    labels = torch.tensor([int(item.get("label", -1)) for _, item in items])
    return Batch([key for key, _ in items], images, labels, masks)
