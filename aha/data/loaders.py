"""The loaders a trainer iterates over: worker processes, equal steps, one line about bad samples, exact resume.

Order and resume
    The order of an epoch's samples is a function of (seed, epoch, global step at its start, rank, worker). The loader's
    ``state_dict`` (which the data module keeps in every checkpoint) holds epoch, that step, and the numbers of batches
    taken and of samples that each worker read for them, the bad ones included; a loader that loads it replays the same
    order and skips, undecoded, what was read. So a resumed run sees exactly the samples that the uninterrupted one
    would have seen, provided that ranks, workers and batch size are the same. Otherwise the rest of the epoch is drawn
    anew from (seed, epoch, current step, rank, worker). A checkpoint holds the counts of rank 0: another rank that had
    skipped more or fewer bad samples by then goes on as many samples earlier or later.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from aha.data.pictures import BadPicture
from aha.data.pipeline import BadRateError, Recipe, Slot, Source, Tally, collate, decode
from aha.data.sources import ShardSourceError

log = logging.getLogger(__name__)


class _Stream(IterableDataset):
    """Runs in the workers: raw samples to batches, each with the worker's tally so far."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        rank: int,
        world: int,
        position: tuple[int, int, int] | None,
        done: int,
        read: list[int],
    ) -> None:
        self.source, self.recipe, self.rank, self.world = source, recipe, rank, world
        self.position, self.done, self.read = position, done, read

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if self.position is None:
            raw = self.source.evaluate(Slot(self.rank, self.world, worker, workers))
        else:  # batches come from the workers in turn: after `done` of them it is this worker's turn as …
            worker = (worker + self.done) % workers
            raw = self.source.train(self.position, Slot(self.rank, self.world, worker, workers), self.read[worker])
        tally, items = Tally(), []
        try:
            for sample in raw:
                tally.seen += 1
                try:
                    items.append(decode(sample, self.recipe))
                except BadPicture as error:
                    tally.add(Tally(0, {str(error): (1, sample.key)}))
                    tally.judge(self.recipe.max_bad_rate)
                if len(items) == self.recipe.batch_size:
                    yield {**collate(items), "tally": (worker, copy.deepcopy(tally))}
                    items = []
        except (BadRateError, ShardSourceError) as error:  # as a message: raised there, not here under a worker's trace
            yield {"tally": (worker, tally), "failure": error}
        else:
            yield {**(collate(items) if items else {}), "tally": (worker, tally)}


class EvalLoader:
    """Batches of one rank for evaluation: each sample once over all ranks, with a partial last batch.

    Args:
        source: where raw samples come from.
        recipe: size, batch size and limits.
        rank: of this process among ``world``; explicit, because workers can't find it out (they'd read everything).
        world: number of processes.
        workers: reading processes of this rank; 0 reads in the main process.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``; default: the platform's.
        name: of the split, for the log.
    """

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        *,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        start_method: str | None = None,
        name: str = "evaluation",
    ) -> None:
        self.source, self.recipe, self.rank, self.world, self.workers = source, recipe, rank, world, workers
        self.start_method = start_method if workers else None
        self.name = name
        self._tallies: dict[int, Tally] = {}

    @property
    def tally(self) -> Tally:
        """Samples seen and skipped by all workers in the running or last pass, since it began or was resumed."""
        total = Tally()
        for tally in self._tallies.values():
            total.add(tally)
        return total

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self._batches()

    def _batches(
        self,
        position: tuple[int, int, int] | None = None,
        done: int = 0,
        read: Sequence[int] = (),
        steps: int | None = None,
    ) -> Iterator[dict]:
        loader = DataLoader(
            _Stream(self.source, self.recipe, self.rank, self.world, position, done, list(read)),
            batch_size=None,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=self.start_method,
            generator=torch.Generator().manual_seed(0),  # leaves torch's own random state alone
        )
        self._tallies = {}
        try:
            for batch in islice(loader, steps):
                worker, tally = batch.pop("tally")
                self._tallies[worker] = tally
                if "failure" in batch:
                    raise batch["failure"]
                self.tally.judge(self.recipe.max_bad_rate)
                if batch:
                    yield batch
            self.tally.judge(self.recipe.max_bad_rate, final=True)
        finally:
            if self.tally.bad:
                log.warning("%s, rank %d of %d: skipped %s", self.name, self.rank, self.world, self.tally)


class TrainLoader(EvalLoader):
    """Batches of one rank for training: full, equally many on every rank, in an order that a checkpoint can continue.

    Args:
        source: as in :class:`EvalLoader`, like the options not listed here.
        recipe: likewise.
        steps: batches per epoch.
        seed: of the order.
        progress: returns (epoch, global step) when an epoch starts; default: epochs counted here, step 0.
        options: as in :class:`EvalLoader`.
    """

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        *,
        steps: int,
        seed: int = 0,
        progress: Callable[[], tuple[int, int]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(source, recipe, **{"name": "training", **options})
        self.steps, self.seed, self.progress = steps, seed, progress
        self._epochs = -1
        self._start = (0, 0)  # epoch and global step at which the running epoch began
        self._done = 0  # batches taken in it
        self._skip = [0] * max(self.workers, 1)  # samples that each worker had read when it was resumed
        self._resume: dict[str, Any] | None = None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._epochs += 1
        resume, self._resume = self._resume, None
        self._start, self._done = self.progress() if self.progress else (self._epochs, 0), 0
        self._skip = [0] * max(self.workers, 1)
        if resume is not None and (self.progress is None or resume["start"][0] == self._start[0]):  # the same epoch
            self._start, self._done, self._skip = tuple(resume["start"]), resume["done"], resume["read"]
        for batch in self._batches((self.seed, *self._start), self._done, self._skip, self.steps - self._done):
            self._done += 1
            yield batch

    def _layout(self) -> list[int]:
        return [self.world, self.workers, self.recipe.batch_size, self.steps, self.seed]

    def state_dict(self) -> dict[str, Any]:
        """Plain values: where the running epoch began, how much of it was taken, and the layout that this holds for."""
        read = [before + self._tallies.get(worker, Tally()).seen for worker, before in enumerate(self._skip)]
        return {"start": list(self._start), "done": self._done, "read": read, "layout": self._layout()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the order of ``state`` in the next epoch; if the layout changed, say so and start afresh."""
        if state["layout"] != self._layout():
            msg = (
                f"{self.name}: [ranks, workers, batch size, steps, seed] changed from {state['layout']} to "
                f"{self._layout()}, so the sample order can't be continued; the rest of the epoch is drawn anew."
            )
            log.warning(msg)
        elif 0 < state["done"] < self.steps:
            self._resume = state
