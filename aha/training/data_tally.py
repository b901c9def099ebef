"""Callback: how many samples the run has skipped as unreadable, over all processes."""

from __future__ import annotations

import logging

import torch
from lightning import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)


class DataTally(Callback):
    """One line per epoch with the samples seen and skipped over all ranks, for data modules that count them."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        count = getattr(trainer.datamodule, "tally", None)
        if count is None:
            return
        own = count("train")
        seen, bad = trainer.strategy.reduce(torch.tensor([own.seen, own.bad], device=pl_module.device), reduce_op="sum")
        pl_module.log_dict({"data/seen": seen.float(), "data/skipped": bad.float()}, rank_zero_only=True)
        if trainer.is_global_zero:
            log.info("Epoch %d: %d training samples seen, %d skipped as unreadable.", trainer.current_epoch, seen, bad)
