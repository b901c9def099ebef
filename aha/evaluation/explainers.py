"""From ``--explainers a,b,c`` to things that explain a batch."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.evaluation.saved_maps import SavedMaps
from aha.explainer import AmortizedExplainer, Explainer
from aha.refinement import RefineOptions, refine

OPEN, CLOSE = "([{", ")]}"


@dataclass
class Entry:
    """One explainer of an evaluation.

    Attributes:
        label: how results name it: the specification as given, or what stood before ``=`` in it.
        source: makes the maps.
        identity: what its maps depend on, apart from classifier and picture; another one means other results.
        base: label of the explainer whose maps this one refines, for before/after pictures.
        refinement: how maps are refined; None = not at all.
        refined_keys: samples whose maps are refined, the others keep their base's; None = all.
    """

    label: str
    source: Explainer | SavedMaps
    identity: str
    base: str | None = None
    refinement: RefineOptions | None = None
    refined_keys: frozenset[str] | None = None

    def refined(self, options: RefineOptions, keys: Iterable[str] | None = None) -> Entry:
        """This explainer with its maps refined at test time, on all samples or some.

        Raises:
            ValueError: for saved maps, which no explainer stands behind.
        """
        if not isinstance(self.source, Explainer):
            msg = f"{self.label}: saved maps can't be refined; put another explainer first."
            raise ValueError(msg)
        chosen = None if keys is None else frozenset(keys)
        which = "all" if chosen is None else zlib.crc32("\n".join(sorted(chosen)).encode())
        identity = f"{self.identity} refined {asdict(options)} {which}"
        label = f"{self.label} + {options.steps} steps"
        return Entry(label, self.source, identity, self.label, options, chosen)

    def explain(
        self, keys: Sequence[str], images: Tensor, targets: Tensor, masks: Tensor
    ) -> tuple[Tensor, dict[str, str]]:
        """Maps of a batch, and why some are missing.

        Args:
            keys: of the samples.
            images: ``(batch, 3, H, W)`` in [0, 1].
            targets: classes to explain, ``(batch,)``.
            masks: ``(batch, 1, H, W)`` bool; empty = unknown.

        Returns:
            maps ``(batch, 1, H, W)``, float32, NaN where missing; and reasons by key.
        """
        batch, _, height, width = images.shape
        reasons: dict[str, str] = {}
        if isinstance(self.source, SavedMaps):
            rows = []
            for key in keys:
                try:
                    rows.append(self.source.get(key, (height, width)))
                except LookupError as error:
                    reasons[key] = str(error.args[0])
                    rows.append(torch.full((1, height, width), torch.nan))
            maps = torch.stack(rows).to(images.device)
        elif getattr(self.source, "uses_masks", False):
            maps = self.source.attribute(images, targets, masks=masks).clone()
            for i in (~masks.flatten(1).any(1)).nonzero().flatten().tolist():
                maps[i] = torch.nan
                reasons[keys[i]] = "missing mask"
        else:
            maps = self.source.attribute(images, targets)
        if self.refinement is not None:
            maps = self._refine(keys, images, targets, maps)
        finite = maps.flatten(1).isfinite().all(1).tolist()
        for key, fine in zip(keys, finite, strict=True):
            if not fine:
                reasons.setdefault(key, "map not finite")
        return maps, reasons

    def _refine(self, keys: Sequence[str], images: Tensor, targets: Tensor, maps: Tensor) -> Tensor:
        finite = maps.flatten(1).isfinite().all(1).tolist()
        rows = [
            i for i, key in enumerate(keys) if finite[i] and (self.refined_keys is None or key in self.refined_keys)
        ]
        if not rows:
            return maps
        refined = refine(self.source, images[rows], targets[rows], maps=maps[rows], options=self.refinement)
        maps = maps.clone()
        maps[rows] = refined.maps.to(maps)
        return maps


def split_specs(text: str | Sequence[str]) -> list[str]:
    """Split at commas outside brackets; a list stays as it is.

    Example:
        >>> split_specs("cdam,rise(num_masks=1000,cells=7),captum:Saliency")
        ['cdam', 'rise(num_masks=1000,cells=7)', 'captum:Saliency']
    """
    if not isinstance(text, str):
        return [part for entry in text for part in split_specs(entry)]
    parts, depth = [""], 0
    for char in text:
        depth += (char in OPEN) - (char in CLOSE)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def is_trained(spec: str) -> bool:
    """Whether a specification names an artefact's folder, a checkpoint, or a hub id, rather than a method."""
    spec = _unlabel(spec)[1]
    if spec.startswith(("maps:", "captum:")):
        return False
    return Path(spec).expanduser().exists() or "/" in spec.split("(")[0] or spec.endswith(".ckpt")


def load_trained(spec: str, **options: Any) -> AmortizedExplainer:
    """Load the artefact that a specification names; options as for ``aha.load``."""
    import aha

    return aha.load(_unlabel(spec)[1], **options)


def build_entries(
    specs: str | Sequence[str],
    classifier: FrozenClassifier,
    *,
    loaded: dict[str, AmortizedExplainer] | None = None,
) -> list[Entry]:
    """Build every explainer of an evaluation; the first is what the others are compared with.

    Args:
        specs: ``[label=]artefact``, ``[label=]name(option=value, …)``, ``captum:NAME``, ``module:callable`` or
            ``maps:FOLDER``.
        classifier: the explained model.
        loaded: trained explainers by specification, where loaded already.

    Raises:
        ValueError: unknown or repeated specifications, or explainers of another classifier.
        FileNotFoundError: no such artefact.
    """
    from aha.baselines import build_explainer

    specs = split_specs(specs)
    if not specs:
        msg = "No explainers given: pass for instance --explainers runs/demo/explainer,cdam,gradskip,random."
        raise ValueError(msg)
    device = classifier.mean.device
    entries: list[Entry] = []
    for full in specs:
        label, spec = _unlabel(full)
        identity = spec
        if spec.startswith("maps:"):
            source = SavedMaps(spec.removeprefix("maps:"))
            newest = max(path.stat().st_mtime_ns for path, _ in source.places.values())
            identity = f"{spec}@{newest}"
        elif is_trained(spec):
            source = (loaded or {}).get(full) or load_trained(spec, classifier=classifier, device=device)
            if source.classifier.fingerprint() != classifier.fingerprint():
                msg = f"{spec} explains {source.classifier.name}, not the {classifier.name} that is evaluated."
                raise ValueError(msg)
            identity = f"{spec}@{_weights_hash(source)}"
        else:
            source = build_explainer(spec, classifier)
        if label in [entry.label for entry in entries]:
            msg = f"Two explainers are called {label!r}: tell them apart by name=specification."
            raise ValueError(msg)
        entries.append(Entry(label, source, identity))
    return entries


def short_labels(labels: Sequence[str]) -> list[str]:
    """Labels for narrow places: of a path its last parts, as many as tell the labels apart."""
    paths = [label.rstrip("/").split("/") if "(" not in label else [label] for label in labels]
    for depth in range(1, max(map(len, paths), default=1) + 1):
        short = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(short)) == len(short):
            return short
    return list(labels)


def _unlabel(spec: str) -> tuple[str, str]:
    """``label=spec`` or ``spec`` as ``(label, spec)``."""
    label, equals, rest = spec.partition("=")
    if equals and not any(char in label for char in (*OPEN, ":", "/")):
        return label.strip(), rest.strip()
    return spec, spec


def _weights_hash(explainer: AmortizedExplainer) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(explainer.head.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
