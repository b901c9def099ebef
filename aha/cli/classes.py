"""Classes by name: what a classifier's outputs are called, and which one a user means."""

from __future__ import annotations

from aha.classifier import FrozenClassifier
from aha.nearest import nearest


def class_names(classifier: FrozenClassifier) -> list[str]:
    """One name per class: the classifier's own, else timm's for the ImageNet label sets, else ``class 0`` …"""
    if classifier.class_names is not None:
        return classifier.class_names
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(classifier.model) if hasattr(classifier.model, "num_classes") else None
    if subset is not None:
        info = ImageNetInfo(subset)
        if info.num_classes() == classifier.num_classes:
            return [info.index_to_description(index) for index in range(classifier.num_classes)]
    return [f"class {index}" for index in range(classifier.num_classes)]


def find_class(text: str, names: list[str]) -> int:
    """The index of the class that a user means by a number or a name.

    Args:
        text: an index, a whole name, or one of a name's synonyms (``"tabby"`` for ``"tabby, tabby cat"``); any case.
        names: one per class.

    Raises:
        ValueError: out of range, ambiguous (all candidates are listed), or unknown (the nearest are offered).
    """
    text = text.strip()
    if text.lstrip("+-").isdecimal():
        index = int(text)
        if not 0 <= index < len(names):
            msg = f"target {index} is out of range: the classes are 0…{len(names) - 1}."
            raise ValueError(msg)
        return index
    wanted = text.casefold()
    whole = [index for index, name in enumerate(names) if name.casefold() == wanted]
    synonyms: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        for part in {part.strip().casefold() for part in name.split(",")}:
            synonyms.setdefault(part, []).append(index)
    found = whole or synonyms.get(wanted, [])
    if len(found) == 1:
        return found[0]
    if found:
        options = "; ".join(f"{index}: {names[index]}" for index in found)
        msg = f"{text!r} names {len(found)} classes ({options}): give the index."
        raise ValueError(msg)
    near = nearest(wanted, synonyms, count=4, cutoff=0.5)
    near += [part for part in synonyms if wanted in part.split() and part not in near][:3]
    hint = ", ".join(f"{part} ({synonyms[part][0]})" for part in near) or "none"
    msg = f"There is no class {text!r}. Nearest: {hint}."
    raise ValueError(msg)


def short(name: str) -> str:
    """The first of a name's synonyms."""
    return name.split(",")[0].strip()
