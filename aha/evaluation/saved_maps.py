"""Maps that somebody else computed, read from a folder by sample key: ``maps:FOLDER``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

SUFFIXES = (".npy", ".npz", ".safetensors")


class SavedMaps:
    """Saved attribution maps, one file per sample or many in one.

    A file ``<key>.npy``, ``<key>.npz`` or ``<key>.safetensors`` (in subfolders where the key has slashes; with or
    without the picture's own suffix) holds the map of one sample; an ``.npz`` or ``.safetensors`` file of any name may
    hold many, named by key. Pickles are never read.

    Args:
        folder: where the files are.

    Raises:
        ValueError: if there is no such folder or nothing in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        files = sorted(p for p in self.folder.rglob("*") if p.suffix in SUFFIXES) if self.folder.is_dir() else []
        if not files:
            msg = f"maps:{folder}: no {', '.join(SUFFIXES)} files there."
            raise ValueError(msg)
        self.places: dict[str, tuple[Path, str | None]] = {}
        for path in files:
            names = _names(path)
            if len(names) != 1:
                self.places.update({name: (path, name) for name in names})
            else:
                self.places[path.relative_to(self.folder).with_suffix("").as_posix()] = (path, names[0])
                if names[0] is not None:
                    self.places.setdefault(names[0], (path, names[0]))

    def get(self, key: str, size: tuple[int, int]) -> Tensor:
        """The map of one sample.

        Args:
            key: of the sample.
            size: ``(H, W)`` that it must have.

        Returns:
            ``(1, H, W)``, float32.

        Raises:
            LookupError: if there is no map for the sample, or one of another size or kind.
        """
        place = self.places.get(key) or self.places.get(str(Path(key).with_suffix("")))
        if place is None:
            msg = "no saved map"
            raise LookupError(msg)
        path, name = place
        try:
            array = torch.as_tensor(_load(path, name)).float()
        except (OSError, ValueError, TypeError, EOFError, SafetensorError) as error:
            msg = f"unreadable map ({type(error).__name__})"
            raise LookupError(msg) from error
        if tuple(array.shape) not in (size, (1, *size), (1, 1, *size)):
            msg = f"map of the wrong size {tuple(array.shape)}, expected {size}"
            raise LookupError(msg)
        return array.reshape(1, *size)


def _names(path: Path) -> list[str | None]:
    """Names of the arrays in a file; unreadable files count as one array, and fail when it is asked for."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return list(archive.files)
        if path.suffix == ".safetensors":
            return list(_safe(path))
    except (OSError, ValueError, EOFError, SafetensorError):
        pass
    return [None]


def _safe(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stream:
        return list(stream.keys())


def _load(path: Path, name: str | None) -> np.ndarray | Tensor:
    if path.suffix == ".safetensors":
        if name is None:
            return load_file(path)["map"]
        from safetensors import safe_open

        with safe_open(path, framework="pt") as stream:
            return stream.get_tensor(name)
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        return loaded[name]
