"""Averages of the head's weights over the run; the frozen classifier stays as it is, bit for bit."""

from __future__ import annotations

from lightning import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn


class HeadAveraging(WeightAveraging):
    """Validate, keep and save an exponential moving average of the weights:
    ``--trainer.callbacks+=aha.training.averaging.HeadAveraging``.

    Lightning's own callback, but for how it averages: a·decay + b·(1 − decay) rounds, so that averages of one and the
    same frozen weight drift from it; a + (b − a)·(1 − decay) does not.

    Args:
        decay: share of the old average that is kept at each step, in (0, 1).
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 < decay < 1:
            msg = f"decay must lie in (0, 1), got {decay}."
            raise ValueError(msg)
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))


def refuse_other_averages(trainer: Trainer) -> None:
    """Raise where a callback would average the frozen weights, and so change the model that is explained."""
    for callback in trainer.callbacks:
        averages = isinstance(callback, WeightAveraging | StochasticWeightAveraging)
        if averages and not isinstance(callback, HeadAveraging):
            msg = (
                f"{type(callback).__name__} would average the frozen classifier's weights too, and rounding would "
                "change them: use aha.training.averaging.HeadAveraging."
            )
            raise ValueError(msg)
