"""Folders of pictures: class folders (label = the first level, sorted) or a flat folder (labels unknown)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from aha.data.pictures import SUFFIXES, Resize
from aha.data.pipeline import UNKNOWN, RawSample, Recipe, Slot, decode, stream_seed

MASK = ".mask.png"


class FolderDataset(Dataset):
    """Pictures below a folder, in sorted order.

    ``root/<class>/…/picture.jpg`` has the label of its class folder; a picture directly in ``root`` has label -1. An
    object mask may stand beside its picture as ``picture.mask.png``. A sample's key is its path below ``root``, with
    ``/`` and the suffix, so keys are unique. Hidden files and folders are passed over.

    Args:
        root: the folder.
        image_size: ``(height, width)`` or one side.
        resize: as in :func:`aha.data.pictures.read_picture`.
        classes: class folders in the order of their labels; default: those found, sorted.

    Raises:
        ValueError: if there is no picture, or a class folder that ``classes`` doesn't name.

    Example:
        >>> dataset = FolderDataset("photos")  # doctest: +SKIP
        >>> dataset[0]["image"].shape  # doctest: +SKIP
        torch.Size([3, 224, 224])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        image_size: int | tuple[int, int] = 224,
        resize: Resize = "squash",
        classes: Sequence[str] | None = None,
    ) -> None:
        self.root = Path(root).expanduser()
        size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        self.recipe = Recipe(image_size=size, batch_size=1, resize=resize)
        self.files = sorted(_walk(self.root))
        if not self.files:
            msg = f"no picture below {str(self.root)!r}; looked for {', '.join(SUFFIXES)}."
            raise ValueError(msg)
        found = sorted({name.split("/", 1)[0] for name in self.files if "/" in name})
        self.classes = list(found if classes is None else classes)
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            msg = f"folders {unknown[:5]} below {str(self.root)!r} are not among the {len(self.classes)} known classes."
            raise ValueError(msg)
        self._labels = {name: label for label, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One decoded sample; raises :class:`~aha.data.pictures.BadPicture` if its file can't be read."""
        return decode(self.raw(index), self.recipe)

    def raw(self, index: int) -> RawSample:
        """One sample, its file not yet read."""
        name = self.files[index]
        path = self.root / name
        mask = path.with_name(path.stem + MASK)
        label = self._labels.get(name.split("/", 1)[0], UNKNOWN) if "/" in name else UNKNOWN
        key = os.fsencode(name).decode("utf-8", "replace")
        return RawSample(key=key, image=path, label=label, mask=mask if mask.is_file() else None)

    def train(self, position: tuple[int, int, int], slot: Slot, skip: int) -> Iterator[RawSample]:
        """Endless: one permutation of all pictures after another, each shared out among the slots."""
        turn = 0
        while True:
            order = list(range(len(self)))
            random.Random(stream_seed(*position, turn)).shuffle(order)
            for index in order[slot.index % len(self) :: slot.total]:
                if skip:
                    skip -= 1
                else:
                    yield self.raw(index)
            turn += 1

    def evaluate(self, slot: Slot) -> Iterator[RawSample]:
        """Every picture once over all slots, in sorted order."""
        return map(self.raw, range(slot.index, len(self), slot.total))


def _walk(root: Path) -> Iterator[str]:
    """Paths of pictures below ``root``, relative, with ``/``."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(SUFFIXES) and not name.startswith(".") and not name.endswith(MASK):
                yield (Path(folder) / name).relative_to(root).as_posix()
