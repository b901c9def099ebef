"""The embedded demo: a data set of handwritten digits on clutter, and two small frozen classifiers for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from aha.data.demo_scenes import SIZE, IndexedRandom, draw_scenes

if TYPE_CHECKING:
    from aha.classifier import FrozenClassifier

Split = Literal["train", "val", "test"]
DEMO_LENGTHS: dict[str, int] = {"train": 4096, "val": 512, "test": 512}
_SHARES: dict[str, tuple[float, float]] = {"train": (0.0, 0.7), "val": (0.7, 0.8), "test": (0.8, 1.0)}


def _check(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        msg = f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}."
        raise ValueError(msg)


@lru_cache(maxsize=3)
def digit_pool(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One split's share of scikit-learn's 1797 handwritten digits, sorted by label.

    The split is fixed: it depends on no seed, and no digit's picture is in two splits (70 / 10 / 20 %).

    Returns:
        pictures float32 (n, 8, 8) in [0, 1]; labels int64 (n,); and their rows in scikit-learn's set (n,).
    """
    from sklearn.datasets import load_digits

    _check("split", split, get_args(Split))
    data = load_digits()
    shuffled = np.argsort(IndexedRandom(0, range(len(data.target))).uniform(0, 1), kind="stable")
    start, stop = (round(share * len(shuffled)) for share in _SHARES[split])
    rows = shuffled[start:stop]
    rows = rows[np.argsort(data.target[rows], kind="stable")]
    return (data.images[rows] / 16).astype(np.float32), data.target[rows].astype(np.int64), rows


class DemoDataset(Dataset[dict[str, Any]]):
    """Digits on clutter, 64×64, with labels and exact object masks.

    Sample i depends on (split, digits, seed, i) alone: not on workers, order, length or global random state.
    An item is ``{"image": uint8 (3, 64, 64), "label": int, "mask": bool (1, 64, 64), "key": str}``; with two
    digits also ``"label2"`` and ``"mask2"``, of another class and not overlapping the first.

    Args:
        split: which digits to draw from; the splits share none.
        digits: number of digits in each picture, 1 or 2.
        length: number of samples; 4096 for training and 512 otherwise by default. Any length is possible, and
            a longer set starts with the samples of a shorter one.
        seed: another seed gives other pictures of the same digits.
        cache: draw everything now and keep it (16 KiB a sample, 0.5 ms each), else draw on every access.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        digits: Literal[1, 2] = 1,
        length: int | None = None,
        seed: int = 0,
        cache: bool = True,
    ) -> None:
        _check("split", split, get_args(Split))
        _check("digits", digits, (1, 2))
        length = DEMO_LENGTHS[split] if length is None else length
        if length < 1:
            msg = f"length must be at least 1, got {length}."
            raise ValueError(msg)
        self.split, self.digits, self.length, self.seed = split, digits, length, seed
        digest = hashlib.sha256(f"{split}/{digits}/{seed}".encode()).digest()
        self._stream = int.from_bytes(digest[:8], "little")
        self._cached = self._draw(range(length)) if cache else None

    def __len__(self) -> int:
        return self.length

    def _draw(self, indices: Sequence[int]) -> dict[str, Tensor]:
        pictures, labels, _ = digit_pool(self.split)
        scenes = draw_scenes(pictures, labels, seed=self._stream, indices=indices, digits=self.digits)
        columns = {"image": torch.from_numpy(scenes.images)}
        for k in range(self.digits):
            suffix = "" if k == 0 else str(k + 1)
            columns[f"label{suffix}"] = torch.from_numpy(scenes.labels[:, k])
            columns[f"mask{suffix}"] = torch.from_numpy(scenes.masks[:, k : k + 1])
        return columns

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """The samples of ``indices`` collated: tensors with a batch dimension, ``key`` a list of str."""
        rows = [range(self.length)[i] for i in indices]  # raises IndexError, understands negative indices
        columns = self._draw(rows) if self._cached is None else {k: v[rows] for k, v in self._cached.items()}
        return {**columns, "key": [f"demo-{self.split}-{self.digits}-{i:06d}" for i in rows]}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        batch = self.batch(indices)
        items = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        return [{k: v.item() if k.startswith("label") else v for k, v in item.items()} for item in items]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]


WEIGHTS_FOLDER = Path(__file__).parent / "demo_weights"
DEMO_WEIGHTS_SHA256: dict[str, str] = {
    "vit": "ed1220fa2bf1fd044b070cdc3a887b934752899e55a56fefcd4f503eb42b6d10",
    "convnext": "6597fd9b0df42b7ac829f93b09720ff3d76ed1bb849d2d32da0167b2e358e50a",
}
DEMO_CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": (
        "vit_tiny_patch16_224",
        {
            "num_classes": 10,
            "img_size": SIZE,
            "patch_size": 8,
            "embed_dim": 96,
            "depth": 4,
            "num_heads": 4,
            "mlp_ratio": 2.0,
        },
    ),
    "convnext": (
        "convnext_atto",
        {
            "num_classes": 10,
            "patch_size": 2,
            "output_stride": 8,
            "depths": [1, 1, 2, 1],
            "dims": [24, 48, 96, 96],
            "kernel_sizes": [7, 7, 3, 3],
        },
    ),
}


def load_demo_classifier(name: Literal["vit", "convnext"]) -> FrozenClassifier:
    """One of the two shipped classifiers of ten digits, frozen; its weights are made by ``train_demo_classifier``.

    Args:
        name: ``"vit"`` (patch 8, class token, 8×8 tokens) or ``"convnext"`` (8×8 final map).

    Raises:
        FileNotFoundError: the weights are not there.
        ValueError: unknown name, or a weights file that is not the shipped one.
    """
    from aha.classifier import FrozenClassifier

    _check("name", name, tuple(DEMO_CLASSIFIERS))
    verify_weights(WEIGHTS_FOLDER / f"{name}.safetensors", DEMO_WEIGHTS_SHA256[name])
    architecture, options = DEMO_CLASSIFIERS[name]
    return FrozenClassifier.from_timm(
        architecture,
        pretrained=False,
        checkpoint_path=f"package:aha/data/demo_weights/{name}.safetensors",
        image_size=SIZE,
        class_names=[str(digit) for digit in range(10)],
        **options,
    )


def verify_weights(path: Path, sha256: str) -> None:
    """Raises unless the file is there and has the given hash."""
    if not path.is_file():
        msg = f"The demo's weights {path} are missing: reinstall the package."
        raise FileNotFoundError(msg)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        msg = (
            f"{path} is not the file that was shipped (sha256 {found[:12]}…, expected {sha256[:12]}…): "
            "reinstall the package, or record the new hash in DEMO_WEIGHTS_SHA256 if you trained it anew."
        )
        raise ValueError(msg)
