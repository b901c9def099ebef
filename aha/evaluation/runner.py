"""The evaluation itself: every sample once, every figure on disk the moment it is known."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.evaluation.counting import ForwardCounter
from aha.evaluation.data import Batch, Block, Samples, blocks, decode_block
from aha.evaluation.explainers import Entry
from aha.evaluation.progress import Bar
from aha.evaluation.protocols import Protocol, run_protocol
from aha.evaluation.store import ResultStore, encode_bytes, encode_floats
from aha.metrics._maps import map_states
from aha.metrics.complexity import compactness, sparseness
from aha.metrics.localization import energy_pointing, pointing_game
from aha.metrics.segmentation import segmentation_agreement
from aha.perturbation import automatic_chunk_size

MAPS = "maps"  # the name under which figures of the map alone stand beside the perturbation protocols
MASK_METRICS = ("pointing_game", "energy_pointing", "pixel_accuracy", "image_mean_iou", "average_precision")
MAP_METRICS = (*MASK_METRICS, "sparseness", "compactness")
STORED_SIDE = 112  # pixels; maps are kept at most this large, for the report's pictures
STORED_SAMPLES = 512  # about how many samples' maps are kept


@dataclass
class Run:
    """What is evaluated, and how.

    Attributes:
        classifier: the explained model.
        samples: the pictures.
        entries: the explainers.
        protocols: perturbation protocols.
        target: the class explained: the predicted one, or the true label (predicted where unknown).
        batch_size: samples computed together.
        chunk_size: perturbed images per classifier forward; None: chosen by device, free memory and size.
        limit: number of samples; None = all.
        only: keys of the samples to evaluate; None = all.
        seed: of explainers that draw random numbers.
        workers: threads that decode pictures.
        identity: settings that figures depend on besides explainer and protocol, plain values.
    """

    classifier: FrozenClassifier
    samples: Samples
    entries: Sequence[Entry]
    protocols: Sequence[Protocol]
    target: Literal["predicted", "label"] = "predicted"
    batch_size: int = 16
    chunk_size: int | None = None
    limit: int | None = None
    only: set[str] | None = None
    seed: int = 0
    workers: int = 2
    identity: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        if self.chunk_size is None:
            example = self.classifier.mean.expand(1, 3, *self.classifier.image_size)
            self.chunk_size = automatic_chunk_size(self.classifier, example)
        self.identity = {
            "classifier": self.classifier.fingerprint(),
            "link": self.classifier.link,
            "image_size": list(self.classifier.image_size),
            "data": self.samples.name,
            "labelled": self.samples.labelled,
            "target": self.target,
            "seed": self.seed,
        }

    def unit(self, entry: Entry | None = None, protocol: Protocol | str | None = None) -> str:
        """Name of a piece of work by all that its figures depend on: figures are reused under the same name only."""
        pixels = self.classifier.image_size[0] * self.classifier.image_size[1]
        settings = protocol.describe(pixels) if isinstance(protocol, Protocol) else protocol
        text = json.dumps([self.identity, entry and entry.identity, settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def expected(self) -> int | None:
        """How many samples there are, where known; failures count."""
        bounds = (self.samples.count, self.limit, None if self.only is None else len(self.only))
        return min((bound for bound in bounds if bound is not None), default=None)

    def blocks(self) -> Iterator[Block]:
        """The samples, in blocks."""
        return blocks(self.samples, self.batch_size, limit=self.limit, only=self.only)


def run_evaluation(run: Run, store: ResultStore, *, rank: int = 0, world: int = 1) -> list[str]:
    """Compute what the store doesn't hold yet; this process does every ``world``-th block.

    Args:
        run: what to evaluate.
        store: where figures go, and where those of earlier runs are.
        rank: of this process.
        world: number of processes.

    Returns:
        The keys of all samples, in order, those that can't take part included.
    """
    done = _done(store)
    counter = ForwardCounter(run.classifier)
    constant_logits: dict[tuple, Tensor] = {}
    total = run.expected()
    every = None if total is None else max(1, total // STORED_SAMPLES)
    keys: list[str] = []
    title = f"{len(run.entries)} explainers" + (f", {world} processes" if world > 1 else "")
    with Bar(title, total, shown=rank == 0) as bar, ThreadPoolExecutor(max(1, run.workers)) as pool:
        for block, pending in _prefetch(_mine(run, done, keys, bar, rank, world), pool):
            size = len(block.keys) + len(block.failed)
            batch = pending.result()
            if block.failed:
                store.append({"kind": "failed", "unit": run.unit(), "reasons": block.failed})
            if batch is not None:
                keep = block.start < STORED_SAMPLES if every is None else block.index % every == 0
                _run_block(run, batch, store, done, counter, constant_logits, keep_maps=keep)
            bar.advance(size * world)
    return keys


def _mine(run: Run, done: dict[str, set[str]], keys: list[str], bar: Bar, rank: int, world: int) -> Iterator[Block]:
    """The blocks of this process with something left to do, cut down to the samples that need it."""
    units = [run.unit()] + [run.unit(e, p) for e in run.entries for p in (MAPS, *run.protocols)]
    for block in run.blocks():
        keys += [*block.keys, *block.failed]
        if block.index % world != rank:
            continue
        left = [i for i, key in enumerate(block.keys) if any(key not in done.get(unit, ()) for unit in units)]
        finished = len(block.keys) - len(left)
        block.keys, block.loaders = [block.keys[i] for i in left], [block.loaders[i] for i in left]
        bar.advance(finished * world, worked=False)
        if left or block.failed:
            yield block


def _prefetch(work: Iterator[Block], pool: ThreadPoolExecutor) -> Iterator[tuple[Block, Future[Batch | None]]]:
    """Decode the next block while this one is computed."""
    with ThreadPoolExecutor(1) as ahead:
        waiting: tuple[Block, Future] | None = None
        for block in work:
            following = block, ahead.submit(decode_block, block, pool)
            if waiting is not None:
                yield waiting
            waiting = following
        if waiting is not None:
            yield waiting


def _done(store: ResultStore) -> dict[str, set[str]]:
    done: dict[str, set[str]] = {}
    for record in store.read():
        if record["kind"] in ("samples", "figures"):
            done.setdefault(record["unit"], set()).update(record["keys"])
    return done


@torch.no_grad()
def _run_block(
    run: Run,
    batch: Batch,
    store: ResultStore,
    done: dict[str, set[str]],
    counter: ForwardCounter,
    constant_logits: dict[tuple, Tensor],
    *,
    keep_maps: bool,
) -> None:
    classifier, keys = run.classifier, batch.keys
    device = classifier.mean.device
    images = batch.images.to(device).float() / 255
    masks, labels = batch.masks.to(device), batch.labels.to(device)
    # The clean pass, once for all explainers and protocols.
    logits = torch.cat([classifier(chunk) for chunk in images.split(run.chunk_size)])
    targets = logits.argmax(-1)
    if run.target == "label":
        targets = torch.where(labels >= 0, labels, targets)
    _store_samples(run, keys, labels, logits, targets, store, done)
    for entry in run.entries:
        units = {protocol: run.unit(entry, protocol) for protocol in (MAPS, *run.protocols)}
        rows = [i for i, key in enumerate(keys) if any(key not in done.get(unit, ()) for unit in units.values())]
        if not rows:
            continue
        named = [keys[i] for i in rows]
        _synchronize(device)
        start, before = time.perf_counter(), counter.images
        cuda = [device] if device.type == "cuda" else []
        with counter, torch.enable_grad(), torch.random.fork_rng(cuda):
            torch.manual_seed(zlib.crc32(f"{run.seed}/{entry.identity}/{named[0]}".encode()))
            maps, reasons = entry.explain(named, images[rows], targets[rows], masks[rows])
        _synchronize(device)
        seconds = time.perf_counter() - start
        common = {"explainer": entry.label, "keys": named}
        flat = [key for key, constant in zip(named, map_states(maps)[1].tolist(), strict=True) if constant]
        shown = {"seconds": seconds, "forwards": counter.images - before, "reasons": reasons, "constant": flat}
        store.append({"kind": "explained", "unit": run.unit(entry), **common, **shown})
        if keep_maps:
            store.append({"kind": "maps", "unit": run.unit(entry), **common, **_small(maps)})
        for protocol, unit in units.items():
            part = [j for j, key in enumerate(named) if key not in done.get(unit, ())]
            if not part:
                continue
            of = [rows[j] for j in part]
            record = {"kind": "figures", "unit": unit, "explainer": entry.label, "keys": [named[j] for j in part]}
            if protocol == MAPS:
                record |= {"protocol": MAPS} | _map_figures(maps[part], masks[of])
            else:
                result = run_protocol(
                    protocol,
                    classifier,
                    images[of],
                    maps[part],
                    targets[of],
                    labels=labels[of] if run.samples.labelled else None,
                    chunk_size=run.chunk_size,
                    clean_logits=logits[of],
                    constant_logits=constant_logits,
                )
                record |= {"protocol": protocol.name, "forwards": result.forwards}
                record |= {"metrics": {name: encode_floats(v.cpu()) for name, v in result.metrics.items()}}
                record |= {"fractions": result.fractions.tolist()}
                record |= {"curves": {name: _moments(curve) for name, curve in result.curves.items()}}
            store.append(record)


def _store_samples(
    run: Run,
    keys: list[str],
    labels: Tensor,
    logits: Tensor,
    targets: Tensor,
    store: ResultStore,
    done: dict[str, set[str]],
) -> None:
    probabilities = run.classifier.probabilities(logits)
    top = probabilities.topk(min(2, probabilities.shape[1])).values.double().cpu()
    margin = top[:, 0] - top[:, 1] if top.shape[1] > 1 else top[:, 0]
    columns = {
        "label": labels.tolist(),
        "predicted": logits.argmax(-1).tolist(),
        "target": targets.tolist(),
        "probability": encode_floats(probabilities.gather(1, targets[:, None]).squeeze(1).double().cpu()),
        "margin": encode_floats(margin),
    }
    new = [i for i, key in enumerate(keys) if key not in done.get(run.unit(), ())]
    if new:
        part = {name: [values[i] for i in new] for name, values in columns.items()}
        store.append({"kind": "samples", "unit": run.unit(), "keys": [keys[i] for i in new], **part})


def _map_figures(maps: Tensor, masks: Tensor) -> dict[str, Any]:
    """Figures of the maps alone: agreement with the object, and how few pixels they mark."""
    values = {}
    if masks.any():
        scores = segmentation_agreement(maps, masks)
        values = {
            "pointing_game": pointing_game(maps, masks),
            "energy_pointing": energy_pointing(maps, masks),
            "pixel_accuracy": scores.pixel_accuracy,
            "image_mean_iou": scores.image_mean_iou,
            "average_precision": scores.average_precision,
        }
    values |= {"sparseness": sparseness(maps), "compactness": compactness(maps)}
    return {"metrics": {name: encode_floats(v.double().cpu()) for name, v in values.items()}}


def _moments(curve: Tensor) -> dict[str, Any]:
    """Sums over samples from which mean curve and band follow, exactly, whoever computed which part."""
    values = curve.double()[~curve.isnan().any(1)]
    return {"n": len(values), "sum": values.sum(0).tolist(), "square": values.square().sum(0).tolist()}


def _small(maps: Tensor) -> dict[str, Any]:
    """Maps reduced to what a picture shows: at most 112 pixels a side, 256 levels between extremes."""
    height, width = maps.shape[-2:]
    scale = min(1.0, STORED_SIDE / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    small = maps if scale == 1 else F.interpolate(maps, size=size, mode="area")
    rows = small.flatten(1).double().cpu().numpy()
    rows = np.where(np.isfinite(rows), rows, 0)
    low, high = rows.min(1), rows.max(1)
    levels = np.rint(255 * (rows - low[:, None]) / np.maximum(high - low, 1e-300)[:, None])
    return {"maps": encode_bytes(levels.reshape(-1, *size)), "low": low.tolist(), "high": high.tolist()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
