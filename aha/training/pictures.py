"""Pictures of a training run: fixed validation samples to TensorBoard, and the contact sheet at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aha.pictures import contact_sheet
from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from aha.explainer import as_images
from aha.training.module import ExplainerModule


class Pictures(Callback):
    """After every validation, image | map | overlay of the first samples of the first batch, to TensorBoard.

    Args:
        count: number of samples.
    """

    def __init__(self, count: int = 6) -> None:
        self.count = count

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: ExplainerModule, outputs: Any, batch: dict[str, Any], batch_idx: int, *_: Any
    ) -> None:
        if batch_idx or not trainer.is_global_zero or not isinstance(trainer.logger, TensorBoardLogger):
            return
        figure = sheet(pl_module, {k: v[: self.count] for k, v in batch.items()}, compare=False)
        trainer.logger.experiment.add_figure("pictures", figure, trainer.global_step)


def sheet(module: ExplainerModule, batch: dict[str, Any], *, compare: bool) -> Any:
    """A matplotlib figure with a row per sample: image, map and overlay, and the others' maps where asked for."""
    explainer = module.explainer
    images = as_images(batch["image"], explainer.device)
    explanation = explainer.explain(images)
    maps = {explainer.name: explanation.maps}
    if compare:
        maps |= {name: other.attribute(images, explanation.targets) for name, other in module.compare.items()}
    probabilities = module.classifier.target_probability(explanation.logits, explanation.targets)
    names = module.classifier.class_names
    titles = [
        f"{names[target] if names else f'class {target}'} {probability:.0%}"
        for target, probability in zip(explanation.targets.tolist(), probabilities.tolist(), strict=True)
    ]
    return contact_sheet(images, maps, titles=titles)


def save_contact_sheet(module: ExplainerModule, data: LightningDataModule, path: Path, *, count: int = 8) -> None:
    """The first test pictures, explained by the trained head and beside it by the others, as one PNG."""
    loaders = data.test_dataloader()
    for loader in loaders if isinstance(loaders, list) else [loaders]:
        batch = next(iter(loader))
        break
    figure = sheet(module, {k: v[:count] for k, v in batch.items()}, compare=True)
    figure.savefig(path, dpi=110)
