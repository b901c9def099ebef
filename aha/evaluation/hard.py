"""Hard samples: where the explainer, or the classifier, does badly."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("rank", "key", "explainer", "protocol", "score", "reasons", "label", "target", "probability", "margin")


@dataclass(frozen=True)
class HardOptions:
    """Which samples count as hard."""

    share: float = 0.1
    """Share of the samples with the lowest score (insertion minus deletion of the first explainer)."""
    threshold: float | None = None
    """Samples with a score below this are hard too."""
    margin: float = 0.1
    """Least probability by which the predicted class must lead the runner-up."""


def hard_samples(samples: Sequence[dict[str, Any]], options: HardOptions) -> list[dict[str, Any]]:
    """The hard samples, worst first.

    Args:
        samples: dictionaries with ``key``, ``score`` (higher is better, NaN or None if excluded), ``label``
            (−1 unknown), ``predicted``, ``target``, ``probability`` and ``margin``.
        options: what counts as hard.

    Returns:
        The hard ones with ``rank`` from 1 and ``reasons``; those with a low score first, by score.
    """
    if not 0 <= options.share <= 1:
        msg = f"hard.share must lie in [0, 1], got {options.share}."
        raise ValueError(msg)
    scored = sorted((s for s in samples if _is_number(s["score"])), key=lambda s: (s["score"], s["key"]))
    lowest = {s["key"] for s in scored[: math.ceil(options.share * len(scored))]}
    found = []
    for sample in samples:
        reasons = []
        if not _is_number(sample["score"]):
            reasons.append("no score")
        elif sample["key"] in lowest:
            reasons.append("lowest share")
        if options.threshold is not None and _is_number(sample["score"]) and sample["score"] < options.threshold:
            reasons.append("below threshold")
        if sample["label"] >= 0 and sample["predicted"] != sample["label"]:
            reasons.append("misclassified")
        if sample["margin"] < options.margin:
            reasons.append("low margin")
        if reasons:
            found.append(sample | {"reasons": reasons})

    def order(sample: dict[str, Any]) -> tuple:
        low = bool({"lowest share", "below threshold"} & set(sample["reasons"]))
        score = sample["score"] if _is_number(sample["score"]) else math.inf
        return not low, score, sample["key"]

    return [sample | {"rank": rank} for rank, sample in enumerate(sorted(found, key=order), 1)]


def hard_csv(hard: Sequence[dict[str, Any]]) -> str:
    """The text of ``hard.csv``; ``--only hard.csv`` reads it back."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for sample in hard:
        writer.writerow(sample | {"reasons": "; ".join(sample["reasons"])})
    return text.getvalue()


def _is_number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
