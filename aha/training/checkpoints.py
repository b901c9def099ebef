"""Checkpoints that are either the old one or the whole new one, whenever the process dies or the disk is full."""

from __future__ import annotations

import io
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

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
