"""From the records on disk to one table of figures per sample."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from aha.evaluation.runner import MAP_METRICS, MAPS, MASK_METRICS, Run
from aha.evaluation.store import ResultStore, decode_bytes, decode_floats

Column = tuple[str, str, str]  # explainer, protocol, metric


class Curve(NamedTuple):
    """Mean curve with its standard error; one entry per point."""

    fractions: np.ndarray
    mean: np.ndarray
    error: np.ndarray
    n: int


class StoredMap(NamedTuple):
    """A map kept for pictures: uint8 levels ``(h, w)`` between the original's extremes."""

    levels: np.ndarray
    low: float
    high: float

    @property
    def values(self) -> np.ndarray:
        """``(h, w)``, float64."""
        return self.low + (self.high - self.low) / 255 * self.levels


@dataclass
class Collected:
    """All figures of an evaluation.

    Attributes:
        keys: samples with figures, sorted.
        total: samples, those that could not take part included.
        failed: why a sample could not take part, by key.
        samples: label, predicted, target, probability and margin by key.
        columns: one value per key, NaN where excluded.
        directions: whether higher is better.
        curves: mean curves by explainer, protocol and curve name.
        reasons: why an explainer's map is missing, by explainer and key.
        constant: maps that rank nothing, by explainer.
        seconds: per image, by explainer: the median over blocks; NaN if unknown.
        forwards: images that the explainer shows the classifier, per image explained.
        protocol_forwards: images that a protocol shows the classifier, per image and explainer.
        maps: by explainer and key, for some of the samples.
    """

    keys: list[str]
    total: int
    failed: dict[str, str]
    samples: dict[str, dict[str, Any]]
    columns: dict[Column, np.ndarray]
    directions: dict[tuple[str, str], bool]
    curves: dict[Column, Curve] = field(default_factory=dict)
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    constant: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    forwards: dict[str, float] = field(default_factory=dict)
    protocol_forwards: dict[str, float] = field(default_factory=dict)
    maps: dict[tuple[str, str], StoredMap] = field(default_factory=dict)

    def headline(self) -> tuple[str, str]:
        """Protocol and metric that stand for the whole: insertion − deletion of the first protocol that has it."""
        pairs = list(self.directions)
        return next((pair for pair in pairs if pair[1] == "insertion_minus_deletion"), pairs[0])


def collect(run: Run, store: ResultStore, keys: Sequence[str]) -> Collected:
    """Read what the store holds of a run.

    Args:
        run: as it was run; figures of other settings are passed over.
        store: where the figures are.
        keys: of all samples of the run.
    """
    reader = _Reader(run, keys)
    for record in store.read():
        reader.add(record)
    return reader.finish()


class _Reader:
    """Adds up records; the first figure of a sample counts."""

    def __init__(self, run: Run, keys: Sequence[str]) -> None:
        self.run, self.wanted = run, set(keys)
        failed = {key: "duplicate key" for key in keys if key.endswith(" (again)")}
        self.out = Collected([], len(keys), failed, {}, {}, {})
        self.explained = {run.unit(entry): entry.label for entry in run.entries}
        self.figures = {
            run.unit(entry, protocol): (entry.label, protocol if isinstance(protocol, str) else protocol.name)
            for entry in run.entries
            for protocol in (*run.protocols, MAPS)
        }
        self.values: dict[Column, dict[str, float]] = {}
        self.moments: dict[Column, list] = {}
        self.seen: dict[str, set[str]] = {unit: set() for unit in self.figures}
        self.spent: dict[str, list[tuple[int, float, int]]] = {label: [] for label in self.explained.values()}
        self.shown: dict[str, tuple[int, int]] = {}
        self.constant: dict[str, set[str]] = {label: set() for label in self.explained.values()}

    def add(self, record: dict[str, Any]) -> None:
        kind, unit, out = record["kind"], record["unit"], self.out
        if kind == "failed" and unit == self.run.unit():
            out.failed.update(self._mine(record["reasons"]))
        elif kind == "samples" and unit == self.run.unit():
            names = [name for name in record if name not in ("kind", "unit", "keys")]
            for row in zip(record["keys"], *(record[name] for name in names), strict=True):
                out.samples[row[0]] = dict(zip(names, row[1:], strict=True))
        elif kind == "explained" and unit in self.explained:
            label = self.explained[unit]
            self.spent[label].append((len(record["keys"]), record["seconds"], record["forwards"]))
            out.reasons.setdefault(label, {}).update(self._mine(record["reasons"]))
            self.constant[label] |= self.wanted.intersection(record["constant"])
        elif kind == "maps" and unit in self.explained:
            levels = decode_bytes(record["maps"])
            for i, key in enumerate(record["keys"]):
                if key in self.wanted:
                    out.maps[self.explained[unit], key] = StoredMap(levels[i], record["low"][i], record["high"][i])
        elif kind == "figures" and unit in self.figures:
            self._add_figures(record, *self.figures[unit])

    def _mine(self, reasons: dict[str, str]) -> dict[str, str]:
        return {key: reason for key, reason in reasons.items() if key in self.wanted}

    def _add_figures(self, record: dict[str, Any], label: str, protocol: str) -> None:
        keys, seen = record["keys"], self.seen[record["unit"]]
        new = {key for key in keys if key in self.wanted and key not in seen}
        for metric, column in record["metrics"].items():
            target = self.values.setdefault((label, protocol, metric), {})
            target.update((k, v) for k, v in zip(keys, decode_floats(column), strict=True) if k in new)
        if len(new) == len(keys):  # sums over samples can't be taken apart
            for curve, moment in record.get("curves", {}).items():
                total = self.moments.setdefault((label, protocol, curve), [record["fractions"], 0, 0.0, 0.0])
                total[1] += moment["n"]
                total[2] = total[2] + np.array(moment["sum"])
                total[3] = total[3] + np.array(moment["square"])
        if "forwards" in record:
            images, forwards = self.shown.get(protocol, (0, 0))
            self.shown[protocol] = images + len(keys), forwards + record["forwards"]
        seen |= new

    def finish(self) -> Collected:
        out, labels = self.out, list(self.explained.values())
        out.failed = {key: reason for key, reason in out.failed.items() if key not in out.samples}
        out.keys = sorted(key for key in out.samples if key in self.wanted)
        metrics = {protocol.name: protocol.metrics for protocol in self.run.protocols}
        metrics[MAPS] = dict.fromkeys(MAP_METRICS, True)
        for protocol, names in metrics.items():
            for metric, higher in names.items():
                columns = {label: self.values.get((label, protocol, metric), {}) for label in labels}
                if metric in MASK_METRICS and not any(columns.values()):
                    continue  # no sample has a mask: nothing was asked
                out.directions[protocol, metric] = higher
                for label, column in columns.items():
                    out.columns[label, protocol, metric] = np.array([column.get(key, math.nan) for key in out.keys])
        for column, (fractions, n, total, square) in self.moments.items():
            if n:
                mean = total / n
                variance = np.maximum(square / n - mean**2, 0) * n / max(n - 1, 1)
                out.curves[column] = Curve(np.array(fractions), mean, np.sqrt(variance / n), n)
        for label, spent in self.spent.items():
            images = sum(n for n, _, _ in spent)
            out.seconds[label] = float(np.median([seconds / n for n, seconds, _ in spent])) if images else math.nan
            out.forwards[label] = sum(f for _, _, f in spent) / images if images else math.nan
            out.constant[label] = len(self.constant[label])
        out.protocol_forwards = {name: forwards / n for name, (n, forwards) in self.shown.items()}
        return out


def tally(reasons: dict[str, str]) -> dict[str, int]:
    """How often each reason occurs, most frequent first."""
    return dict(Counter(reasons.values()).most_common())
