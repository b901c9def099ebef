"""Checkpoints that are whole whenever the process dies or the disk is full, and a last one that is the last."""

from __future__ import annotations

import io
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from aha.export.atomic import write_atomically


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints beside their destination and moves them there in one step.

    Lightning's own writer stages files in the system's temporary folder, from where a move to another disk is a copy
    that a killed process leaves half done. Remote paths are left to it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        try:
            write_atomically(path, buffer.getbuffer())
        except OSError as error:
            msg = f"The checkpoint {path} could not be written ({error.strerror}); the previous one is intact."
            raise OSError(error.errno, msg) from error


class LastCheckpoint(Checkpoint):
    """Writes the state of the run to one file: after every validation, by the clock, at the end, and on an error.

    Lightning's own ``save_last`` follows the best checkpoint, so a run that no longer improves would lose its steps.
    A ``Checkpoint``, so that Lightning calls it after those listed before it: it records what they took for the best.
    While gradients are accumulated, which no checkpoint holds, a writing waits for their step; an error's does not.

    Args:
        path: the file.
        minutes: at most this long between two writings (looked at every ``stride`` steps).
        stride: steps between two looks at the clock, which all processes take together.
    """

    def __init__(self, path: str | Path, *, minutes: float = 15.0, stride: int = 20) -> None:
        self.path = Path(path)
        self.minutes = minutes
        self.stride = stride
        self.written = time.monotonic()
        self.accumulating = self.waiting = False

    def save(self, trainer: Trainer) -> None:
        """Write now; every process must call it."""
        self.waiting = False
        trainer.save_checkpoint(self.path, weights_only=False)  # optimiser and loops as well
        self.written = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.written = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.accumulating = (batch_idx + 1) % trainer.accumulate_grad_batches != 0 and not trainer.is_last_batch
        if self.accumulating:
            return
        if trainer.global_step % self.stride == 0 and not self.waiting:
            due = time.monotonic() - self.written >= 60 * self.minutes
            self.waiting = trainer.strategy.broadcast(due)
        if self.waiting:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not trainer.fast_dev_run:
            self.waiting = self.accumulating
            if not self.waiting:
                self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:
            self.save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # An error before the first step, or while writing, leaves nothing worth keeping.
        if trainer.state.fn == "fit" and trainer.global_step > 0 and not isinstance(exception, OSError):
            self.save(trainer)


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint when a run goes on in another folder.

    Lightning's own would forget the score and take the first validation's checkpoint for the best.
    """

    @property
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        earlier = Path(state_dict["best_model_path"])
        if state_dict["best_model_path"]:
            here = Path(self.dirpath) / earlier.name  # where it is if the whole run was moved
            source = earlier if earlier.is_file() else here
            if not source.is_file():
                score = float(state_dict["best_model_score"])
                msg = (
                    f"The best checkpoint so far, {earlier} ({self.monitor} {score:.4f}), is not there any more: "
                    "the best is judged anew from here on."
                )
                warnings.warn(msg, stacklevel=2)
                return
            if rank_zero_only.rank == 0 and source.resolve() != here.resolve():
                write_atomically(here, source.read_bytes())
            moved = {str(earlier): str(here)}
            state_dict = state_dict | {"dirpath": self.dirpath, "last_model_path": ""}
            for name in ("best_model_path", "kth_best_model_path"):
                state_dict[name] = moved.get(state_dict[name], "")
            scores = state_dict["best_k_models"]
            state_dict["best_k_models"] = {moved[path]: scores[path] for path in scores if path in moved}
        super().load_state_dict(state_dict)


def read_checkpoint(path: str) -> dict[str, Any]:
    """A training checkpoint to resume from.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is cut short, or is no training checkpoint.
    """
    file = Path(path)
    others = sorted(str(other) for other in file.parent.glob("*.ckpt") if other != file)
    remedy = f"resume from {' or '.join(others)}" if others else "start anew without --ckpt_path"
    if not file.is_file():
        msg = f"There is no checkpoint {path}: {remedy}."
        raise FileNotFoundError(msg)
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch, zipfile or pickle make of it
        msg = f"{path} can't be read as a checkpoint, it may be cut short or something else: {remedy}."
        raise ValueError(msg) from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "explainer", "optimizer_states"} <= checkpoint.keys():
        msg = f"{path} is not a training checkpoint of this project: {remedy}."
        raise ValueError(msg)
    return checkpoint
