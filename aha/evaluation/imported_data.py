"""Pictures from anything importable: ``module:callable(option=value, …)`` returns a map-style data set."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aha.baselines.build import parse_spec

if TYPE_CHECKING:
    from aha.evaluation.data import Loader, Samples


def names_callable(data: str) -> bool:
    """Whether ``data`` reads ``module:callable`` or ``module:callable(…)`` and is no file of that name."""
    plain = re.fullmatch(r"\w[\w.]+:[A-Za-z_][\w.]*\s*(\(.*\))?", data, re.DOTALL) is not None
    return plain and not data.startswith("pipe:") and not Path(data).exists()


def open_imported(data: str, *, split: str, size: tuple[int, int]) -> Samples:
    """Call it; items are dicts with ``image`` uint8 ``(3, H, W)``, and perhaps ``label``, ``mask``.

    Args:
        data: the specification; values are Python literals, so text with ``/`` needs quotes.
        split: passed on where the callable has an argument of that name that ``data`` doesn't set.
        size: ``(H, W)`` that images must have.

    Raises:
        ImportError: no such module or name.
        ValueError: options that it doesn't take, no data set, or images of another size.
    """
    from aha.evaluation.data import Samples

    path, options = parse_spec(data)
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        known = inspect.signature(target).parameters
    except (ModuleNotFoundError, AttributeError) as error:
        msg = f"--data {path}: can't be imported ({error}). Folders and files must exist; 'demo' is the embedded set."
        raise ImportError(msg) from error
    if "split" in known:
        options = {"split": split} | options
    try:
        dataset = target(**options)
        count, first = len(dataset), dataset[0]
        image = first["image"]
    except (TypeError, LookupError) as error:
        msg = f"--data {path}({options}) is no data set of dicts with an 'image': {error}."
        raise ValueError(msg) from error
    if not isinstance(image, torch.Tensor) or image.dtype != torch.uint8:
        found = image.dtype if isinstance(image, torch.Tensor) else type(image).__name__
        msg = f"--data {path} gives images as {found}: they must be uint8 tensors (3, H, W), pixels from 0 to 255."
        raise ValueError(msg)
    if tuple(image.shape) != (3, *size):
        msg = (
            f"--data {path} gives images of shape {tuple(image.shape)}, the classifier takes {(3, *size)}: "
            "ask for that size in its options."
        )
        raise ValueError(msg)

    def read() -> Iterator[tuple[str, Loader]]:
        for i in range(count):
            yield f"{name}-{split}-{i:06d}", partial(dataset.__getitem__, i)

    return Samples(f"{data}/{split}", read, count, "label" in first)
