"""Named perturbation protocols: what exactly a deletion or insertion figure means."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from aha.nearest import nearest
from aha.perturbation import REFERENCES, Reference, is_constant

HIGHER_IS_BETTER = {
    "deletion": False,
    "insertion": True,
    "insertion_minus_deletion": True,
    "positive_perturbation": False,
    "negative_perturbation": True,
}


@dataclass(frozen=True)
class Protocol:
    """Settings of a perturbation protocol; exactly one of ``fractions``, ``pixels_per_step`` and ``steps`` is set.

    Pixels are ranked one by one, ties in row-major order. (RISE and TIS reverse an unstable ascending sort, Chefer's
    code takes ``topk``: where maps have ties, their order is undefined; here it is stable, and least important first
    is the exact reverse of most important first.)

    Attributes:
        name: how results name it.
        kind: ``"deletion_insertion"``, or ``"perturbation"``: remove the most (positive) or the least (negative)
            important pixels first.
        fractions: points as shares of the pixels.
        pixels_per_step: as many pixels at each point; the last step takes what is left.
        steps: number of points of ⌈pixels / steps⌉ pixels each, the unperturbed image not among them.
        rounding: how a fraction becomes a number of pixels: nearest, or rounded down.
        deletion_reference: replaces deleted pixels.
        insertion_reference: what insertion starts from; unused by ``"perturbation"``.
        score: probability of the target, or whether the image is classified as the target.
        auc: ``"trapezoid"`` over the shares of pixels, or ``"mean"`` over the points.
        target: class that is scored: the one explained (default: predicted on the clean image), or the true label.
    """

    name: str
    kind: Literal["deletion_insertion", "perturbation"] = "deletion_insertion"
    fractions: tuple[float, ...] | None = None
    pixels_per_step: int | None = None
    steps: int | None = None
    rounding: Literal["nearest", "down"] = "nearest"
    deletion_reference: Reference = "mean"
    insertion_reference: Reference = "mean"
    score: Literal["probability", "accuracy"] = "probability"
    auc: Literal["trapezoid", "mean"] = "trapezoid"
    target: Literal["explained", "label"] = "explained"

    def __post_init__(self) -> None:
        given = [k for k in ("fractions", "pixels_per_step", "steps") if getattr(self, k) is not None]
        if len(given) != 1:
            msg = f"Protocol {self.name!r} needs exactly one of fractions, pixels_per_step and steps, got {given}."
            raise ValueError(msg)
        if self.fractions is not None:
            points = tuple(float(p) for p in self.fractions)
            object.__setattr__(self, "fractions", points)
            if not points or any(not 0 <= p <= 1 for p in points) or list(points) != sorted(points):
                msg = f"fractions must be increasing shares in [0, 1], got {points}."
                raise ValueError(msg)
        elif (self.pixels_per_step or self.steps) < 1:
            msg = f"{given[0]} must be at least 1, got {getattr(self, given[0])}."
            raise ValueError(msg)
        allowed = {
            "kind": ("deletion_insertion", "perturbation"),
            "rounding": ("nearest", "down"),
            "deletion_reference": REFERENCES,
            "insertion_reference": REFERENCES,
            "score": ("probability", "accuracy"),
            "auc": ("trapezoid", "mean"),
            "target": ("explained", "label"),
        }
        for option, choices in allowed.items():
            value = getattr(self, option)
            if value not in choices:
                msg = f"{option} of protocol {self.name!r} must be one of {', '.join(choices)}, got {value!r}."
                raise ValueError(msg)

    @property
    def metrics(self) -> dict[str, bool]:
        """The metrics that :func:`run_protocol` returns, with whether higher is better."""
        if self.kind == "perturbation":
            names = ("positive_perturbation", "negative_perturbation")
        else:
            names = ("deletion", "insertion", "insertion_minus_deletion")
        return {name: HIGHER_IS_BETTER[name] for name in names}

    def points(self, pixels: int) -> tuple[list[float], list[int]]:
        """Nominal shares and numbers of pixels of the curve's points, for an image of ``pixels`` pixels."""
        if self.fractions is not None:
            to_count = round if self.rounding == "nearest" else int
            return list(self.fractions), [to_count(pixels * p) for p in self.fractions]
        if self.steps is not None:
            each = math.ceil(pixels / self.steps)
            return [k / self.steps for k in range(1, self.steps + 1)], [
                min(each * k, pixels) for k in range(1, self.steps + 1)
            ]
        total = math.ceil(pixels / self.pixels_per_step)
        return [k / total for k in range(total + 1)], [min(self.pixels_per_step * k, pixels) for k in range(total + 1)]

    def area(self, curve: Tensor, fractions: Tensor) -> Tensor:
        """Figure of each curve, ``(batch, K)`` to ``(batch,)``, float64."""
        curve = curve.double()
        return curve.mean(-1) if self.auc == "mean" else torch.trapezoid(curve, fractions.to(curve), dim=-1)

    def describe(self, pixels: int) -> dict[str, Any]:
        """Plain values for a result file."""
        values = dataclasses.asdict(self)
        space = "pixels in [0, 1] before normalisation"
        if "data_mean" in (self.deletion_reference, self.insertion_reference):
            space = "after the classifier's normalisation"
        return values | {"points": len(self.points(pixels)[1]), "order": "pixel", "space": space}


PROTOCOLS: dict[str, Protocol] = {
    # arXiv 2604.05819, released code.
    "aha": Protocol("aha", fractions=tuple(k / 20 for k in range(21))),
    # arXiv 1806.07421, released code.
    "rise": Protocol("rise", pixels_per_step=224, deletion_reference="data_mean", insertion_reference="rise_blur"),
    # Englebert et al. 2023 (ICCVW), released code.
    "tis": Protocol("tis", steps=224, deletion_reference="tis_blur", insertion_reference="tis_blur", auc="mean"),
    # arXiv 2012.09838: released code for the nine points; the area counts the clean accuracy at 0 % and ends at 90 %,
    # np.trapz over shares, as the authors state (hila-chefer/Transformer-Explainability#31).
    "perturbation": Protocol(
        "perturbation",
        kind="perturbation",
        fractions=tuple(k / 10 for k in range(10)),
        rounding="down",
        deletion_reference="black",
        insertion_reference="black",
        score="accuracy",
        target="label",
    ),
}


def get_protocol(name: str | Protocol, **overrides: Any) -> Protocol:
    """A named protocol, with settings replaced.

    Args:
        name: ``"aha"``, ``"rise"``, ``"tis"``, ``"perturbation"``, or a :class:`Protocol`.
        overrides: fields of :class:`Protocol`. One of ``fractions``, ``pixels_per_step`` and ``steps`` replaces
            whichever was set.

    Raises:
        ValueError: unknown name or setting; the nearest names are offered.

    Example:
        >>> get_protocol("rise", pixels_per_step=448).points(224 * 224)[1][:3]
        [0, 448, 896]
    """
    if isinstance(name, Protocol):
        protocol = name
    elif name in PROTOCOLS:
        protocol = PROTOCOLS[name]
    else:
        near = nearest(str(name), PROTOCOLS, count=2) or list(PROTOCOLS)
        msg = f"Unknown protocol {name!r}. Nearest: {', '.join(near)}; there are {', '.join(PROTOCOLS)}."
        raise ValueError(msg)
    fields = [field.name for field in dataclasses.fields(Protocol)]
    for option in overrides:
        if option not in fields:
            near = nearest(option, fields, count=2) or fields
            msg = f"Protocols have no setting {option!r}. Nearest: {', '.join(near)}."
            raise ValueError(msg)
    points = ("fractions", "pixels_per_step", "steps")
    if any(overrides.get(option) is not None for option in points):
        overrides = dict.fromkeys(points) | overrides
    return dataclasses.replace(protocol, **overrides)


def count_forwards(protocol: str | Protocol, size: tuple[int, int], *, clean: bool = False) -> int:
    """Images that a protocol has classified per sample, constant references (one per run) aside.

    Args:
        protocol: a name or settings.
        size: ``(H, W)``.
        clean: count the clean image too, for callers that don't pass ``clean_logits``.

    Example:
        >>> [count_forwards(name, (224, 224)) for name in ("aha", "rise", "tis", "perturbation")]
        [38, 447, 447, 18]
    """
    protocol = get_protocol(protocol)
    pixels = size[0] * size[1]
    counts = protocol.points(pixels)[1]
    perturbed = 2 * len({count for count in counts if 0 < count < pixels})
    kinds = set()
    if pixels in counts:
        kinds.add(protocol.deletion_reference)
    if protocol.kind == "deletion_insertion" and 0 in counts:
        kinds.add(protocol.insertion_reference)
    if protocol.kind == "perturbation" and pixels in counts:
        kinds.add(protocol.deletion_reference)
    return perturbed + sum(not is_constant(kind) for kind in kinds) + bool(clean)
