"""Lightning callback for test and predict: sharpens the maps of hard samples by a few gradient steps."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from aha.explainer import Explainer
from aha.refinement import RefineOptions, refine, self_check
from aha.training.tally import Tally


class TestTimeRefinement(Callback):
    """Refine the maps of all samples, or of the hard ones, in ``trainer.test`` and ``trainer.predict``.

    In test, refined maps stand as an explainer of their own beside the unrefined ones; in predict, they replace them.

    Args:
        options: steps, mode, step size, objective; see :class:`aha.refinement.RefineOptions`.
        select: which samples. ``"all"``; ``"threshold"``: those whose soft objective (deletion + 1 − insertion of the
            unrefined map, no labels needed) lies above ``value``; ``"worst"``: the share ``value`` of each batch with
            the highest objective; ``"keys"``: those listed in a ``hard.csv``.
        value: threshold of the objective, or share in (0, 1].
        keys: CSV file with a column ``key``, for instance the ``hard.csv`` of an evaluation.

    Raises:
        ValueError: a selection that lacks its value or file.
    """

    __test__ = False  # the name starts with Test, but pytest has nothing to collect here

    def __init__(
        self,
        options: RefineOptions | None = None,
        select: Literal["all", "threshold", "worst", "keys"] = "all",
        value: float | None = None,
        keys: str | None = None,
    ) -> None:
        if select in ("threshold", "worst") and value is None:
            msg = f"select={select!r} needs value=… (an objective, or a share of the batch)."
            raise ValueError(msg)
        if select == "worst" and not 0 < value <= 1:
            msg = f"value must be a share in (0, 1] for select='worst', got {value}."
            raise ValueError(msg)
        if select == "keys" and keys is None:
            msg = "select='keys' needs keys=… (a CSV file with a column 'key')."
            raise ValueError(msg)
        self.options = options or RefineOptions()
        self.select = select
        self.value = value
        self.keys = read_keys(keys) if select == "keys" else set()
        self.tally = Tally()

    def __call__(self, explainer: Explainer, images: Tensor, maps: Tensor, targets: Tensor, keys: list[str]) -> Tensor:
        """Maps ``(batch, 1, H, W)`` with the selected samples refined; counts what it did."""
        chosen = self.choose(explainer, images, maps, targets, keys)
        self.tally.add("refined", chosen.float())
        if not chosen.any():
            return maps
        refined = refine(explainer, images[chosen], targets[chosen], maps=maps[chosen], options=self.options)
        # A sample that failed keeps its map, and may have no finite objective to subtract.
        gained = torch.where(refined.failed, 0.0, refined.before - refined.after)
        self.tally.add("failed", refined.failed.float())
        self.tally.add("gain", gained)
        self.tally.add("forwards_per_sample", torch.full_like(gained, refined.forwards))
        self.tally.add("backwards_per_sample", torch.full_like(gained, refined.backwards))
        maps = maps.clone()
        maps[chosen] = refined.maps.to(maps.dtype)
        return maps

    def choose(self, explainer: Explainer, images: Tensor, maps: Tensor, targets: Tensor, keys: list[str]) -> Tensor:
        """Which samples of a batch are refined, ``(batch,)`` bool."""
        if self.select == "all":
            return torch.ones(len(images), dtype=torch.bool, device=images.device)
        if self.select == "keys":
            return torch.tensor([key in self.keys for key in keys], device=images.device)
        objective = self_check(explainer.classifier, images, maps, targets, self.options)
        if self.select == "threshold":
            return objective > self.value
        count = max(round(self.value * len(images)), 1)
        chosen = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        chosen[objective.nan_to_num(-torch.inf).topk(count).indices] = True
        return chosen

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage in ("test", "predict"):
            pl_module.refiner = self
            self.tally = Tally()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.refiner = None

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, value in self.tally.means().items():
            pl_module.log(f"refinement/{name}", value)


def read_keys(path: str) -> set[str]:
    """The column ``key`` of a CSV file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no such column.
    """
    if not Path(path).is_file():
        msg = f"There is no file {path!r} to take keys from."
        raise FileNotFoundError(msg)
    with open(path, newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    if not rows or "key" not in rows[0]:
        msg = f"{path} has no column 'key': write it with evaluate.py, or as a CSV with that heading."
        raise ValueError(msg)
    return {row["key"] for row in rows}
