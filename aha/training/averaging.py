"""A moving average of the head's weights; the frozen classifier is no part of it."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor


class HeadAveraging(Callback):
    """Validate, keep and save an exponential moving average of the head's weights:
    ``--trainer.callbacks+=aha.training.averaging.HeadAveraging``.

    Lightning's own callbacks average the frozen classifier as well, which rounding then changes. Checkpoints hold the
    average as the head, and beside it the weights in training, from which a resumed run goes on.

    Args:
        decay: share of the old average that is kept at each step, in (0, 1).
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 < decay < 1:
            msg = f"decay must lie in (0, 1), got {decay}."
            raise ValueError(msg)
        self.decay = decay
        self.other: dict[str, Tensor] = {}  # the average, or while that is in use the weights in training
        self.in_use = False
        self.resumed: dict[str, Tensor] | None = None

    @torch.no_grad()
    def swap(self, module: LightningModule) -> None:
        """Average and weights in training change places."""
        for name, value in module.head.named_parameters():
            kept = value.clone()
            value.copy_(self.other[name])
            self.other[name] = kept
        self.in_use = not self.in_use

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.in_use:  # a second fit goes on from the weights in training
            self.swap(pl_module)
        self.other = {name: value.clone() for name, value in pl_module.head.named_parameters()}
        if self.resumed is not None:
            for name, value in pl_module.head.named_parameters():
                value.copy_(self.resumed[name])
            self.resumed = None

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        for name, value in pl_module.head.named_parameters():
            self.other[name].lerp_(value, 1 - self.decay)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.swap(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.in_use:
            self.swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self.other:
            return
        here = {name: value.detach().clone() for name, value in pl_module.head.named_parameters()}
        average, training = (here, self.other) if self.in_use else (self.other, here)
        checkpoint["state_dict"] |= {f"head.{name}": value.clone() for name, value in average.items()}
        checkpoint["head_in_training"] = {name: value.clone() for name, value in training.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self.resumed = checkpoint.get("head_in_training")


def refuse_other_averages(trainer: Trainer) -> None:
    """Raise where a callback would average the frozen weights, and so change the model that is explained."""
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            msg = (
                f"{type(callback).__name__} would average the frozen classifier's weights too, and rounding would "
                "change them: use aha.training.averaging.HeadAveraging."
            )
            raise ValueError(msg)
