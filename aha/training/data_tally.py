"""Callback: how many samples the run has skipped as unreadable, over all processes."""

from __future__ import annotations

import logging

import torch
from lightning import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)


class DataTally(Callback):
    """One line per epoch with the samples seen and skipped over all ranks, for data modules that count them.

    Attributes:
        seen: samples read over all ranks and epochs since the run was started or resumed.
        skipped: those among them that were unreadable.
    """

    def __init__(self) -> None:
        self.seen = self.skipped = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        count = getattr(trainer.datamodule, "tally", None)
        if count is None:
            return
        own = count("train")
        seen, bad = trainer.strategy.reduce(torch.tensor([own.seen, own.bad], device=pl_module.device), reduce_op="sum")
        pl_module.log_dict({"data/seen": seen.float(), "data/skipped": bad.float()}, rank_zero_only=True)
        self.seen, self.skipped = self.seen + int(seen), self.skipped + int(bad)
        if trainer.is_global_zero:
            level = logging.WARNING if bad else logging.INFO
            line = "Epoch %d: %d training samples seen by all ranks, %d skipped as unreadable."
            log.log(level, line, trainer.current_epoch, seen, bad)
