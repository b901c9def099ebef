"""Results as files and as a table: ``results.json``, ``samples.csv``, the terminal."""

from __future__ import annotations

import csv
import io
import math
import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from aha.evaluation.bootstrap import bootstrap_means
from aha.evaluation.collect import Collected, tally
from aha.evaluation.explainers import short_labels
from aha.evaluation.runner import MAPS, Run

ARROWS = {True: "↑", False: "↓"}
PACKAGES = ("aha", "torch", "timm", "torchmetrics", "kornia", "numpy", "captum")


def result_rows(collected: Collected, labels: Sequence[str], *, seed: int = 0) -> list[dict[str, Any]]:
    """One row per explainer, protocol and metric, with 95 % bootstrap intervals.

    ``difference`` is the explainer's figure minus the first explainer's, over the samples that both have, with the
    paired interval; for the first explainer itself it is None.

    Args:
        collected: figures per sample.
        labels: the explainers; the first is what the others are compared with.
        seed: of the bootstrap.
    """
    index = [(label, *pair) for pair in collected.directions for label in labels]
    columns = [collected.columns[column] for column in index]
    columns += [
        values - collected.columns[labels[0], *column[1:]] for column, values in zip(index, columns, strict=True)
    ]
    table = np.stack(columns, 1) if columns else np.zeros((len(collected.keys), 0))
    means = bootstrap_means(table, seed=seed)
    rows = []
    for i, (label, protocol, metric) in enumerate(index):
        n, j = int(means.n[i]), i + len(index)
        first = label == labels[0]
        rows.append(
            {
                "explainer": label,
                "protocol": protocol,
                "metric": metric,
                "value": _plain(means.value[i]),
                "low": _plain(means.low[i]),
                "high": _plain(means.high[i]),
                "n": n,
                "excluded": collected.total - n,
                "higher_is_better": collected.directions[protocol, metric],
                "difference": None if first else _plain(means.value[j]),
                "difference_low": None if first else _plain(means.low[j]),
                "difference_high": None if first else _plain(means.high[j]),
            }
        )
    order = {label: i for i, label in enumerate(labels)}
    return sorted(rows, key=lambda row: order[row["explainer"]])


def results_json(run: Run, collected: Collected, **more: Any) -> dict[str, Any]:
    """Everything that a reader needs to trust the figures, as plain values.

    Args:
        run: what was evaluated.
        collected: its figures.
        more: further entries.
    """
    height, width = run.classifier.image_size
    labels = [entry.label for entry in run.entries]
    protocols = {}
    for protocol in run.protocols:
        settings = protocol.describe(height * width)
        scored = "explained" if protocol.target == "explained" or not run.samples.labelled else "label"
        protocols[protocol.name] = settings | {
            "scored_class": scored,
            "explained_class": run.target,
            "higher_is_better": protocol.metrics,
            "forwards_per_image": collected.protocol_forwards.get(protocol.name),
        }
    protocols[MAPS] = {"name": MAPS, "kind": "figures of the map alone; those about the object need masks"}
    correct = [s["predicted"] == s["label"] for k in collected.keys if (s := collected.samples[k])["label"] >= 0]
    return {
        "rows": result_rows(collected, labels, seed=run.seed),
        "explainers": [
            {
                "explainer": entry.label,
                "base": entry.base,
                "seconds_per_image": _plain(collected.seconds[entry.label]),
                "classifier_forwards_per_image": _plain(collected.forwards[entry.label]),
                "missing_maps": tally(collected.reasons.get(entry.label, {})),
                "constant_maps": collected.constant[entry.label],
            }
            for entry in run.entries
        ],
        "protocols": protocols,
        "data": {
            "name": run.samples.name,
            "samples": collected.total,
            "evaluated": len(collected.keys),
            "failed": tally(collected.failed),
            "failed_keys": dict(sorted(collected.failed.items())[:100]),
            "accuracy": float(np.mean(correct)) if correct else None,
        },
        "classifier": {
            "name": run.classifier.name,
            "weights_sha256": run.classifier.fingerprint(),
            "link": run.classifier.link,
            "num_classes": run.classifier.num_classes,
            "image_size": [height, width],
            "device": str(run.classifier.mean.device),
        },
        "seed": run.seed,
        "batch_size": run.batch_size,
        "chunk_size": run.chunk_size,
        "interval": "95 % bootstrap percentile interval of the mean, 2000 resamples of samples, paired for differences",
        "versions": _versions(),
        **more,
    }


def samples_csv(collected: Collected, labels: Sequence[str]) -> str:
    """The text of ``samples.csv``: one row per sample and explainer; empty cells are excluded figures."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    about = ("label", "predicted", "target", "probability", "margin")
    writer.writerow(["key", "explainer", *about, *(".".join(pair) for pair in collected.directions), "note"])
    for i, key in enumerate(collected.keys):
        sample = collected.samples[key]
        for label in labels:
            figures = [float(collected.columns[label, *pair][i]) for pair in collected.directions]
            note = collected.reasons.get(label, {}).get(key, "")
            cells = ["" if math.isnan(v) else repr(v) for v in figures]
            writer.writerow([key, label, *(sample[name] for name in about), *cells, note])
    for key, reason in sorted(collected.failed.items()):
        for label in labels:
            writer.writerow([key, label, *[""] * (len(about) + len(collected.directions)), reason])
    return text.getvalue()


def terminal_table(results: dict[str, Any], protocol: str) -> Table:
    """The figures of one protocol, best in bold, differences to the first explainer that exclude zero marked."""
    rows = [row for row in results["rows"] if row["protocol"] == protocol]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    labels = list(dict.fromkeys(row["explainer"] for row in rows))
    cells = {(row["explainer"], row["metric"]): row for row in rows}
    n = {row["n"] for row in rows}
    table = Table(title=f"{protocol}  (n = {min(n)}{'' if len(n) == 1 else f'…{max(n)}'})", title_justify="left")
    table.add_column("explainer", no_wrap=True)
    for metric in metrics:
        name = metric.replace("_minus_", " − ").replace("_", " ")
        table.add_column(f"{name} {ARROWS[cells[labels[0], metric]['higher_is_better']]}", justify="right", min_width=7)
    for label, short in zip(labels, short_labels(labels), strict=True):
        texts = []
        for metric in metrics:
            row = cells[label, metric]
            best = is_best(row, [cells[other, metric] for other in labels])
            texts.append(_figure(row, best))
        table.add_row(short, *texts)
    table.caption = "95 % bootstrap intervals · bold: best · * differs from the first (paired interval excludes zero)"
    return table


def is_best(row: dict[str, Any], rivals: Sequence[dict[str, Any]]) -> bool:
    """Whether no rival has a better value."""
    values = [rival["value"] for rival in rivals if rival["value"] is not None]
    if row["value"] is None or len(values) < 2:
        return False
    return row["value"] == (max(values) if row["higher_is_better"] else min(values))


def differs(row: dict[str, Any]) -> bool:
    """Whether the paired interval of the difference to the first explainer excludes zero."""
    low, high = row["difference_low"], row["difference_high"]
    return low is not None and high is not None and (low > 0 or high < 0)


def _figure(row: dict[str, Any], best: bool) -> Text:
    if row["value"] is None:
        return Text("–")
    interval = " ".join(f"{row[end]:.3f}".replace("0.", ".", 1) for end in ("low", "high"))
    text = Text(f"{row['value']:.3f}{'*' if differs(row) else ' '}", style="bold" if best else "")
    return text.append(f" {interval}", style="not bold dim")


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None
