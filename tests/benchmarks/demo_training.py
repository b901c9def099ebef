"""The demo's head trained in this process, by the project's step or the published one; no trainer, so that nothing but
the step is timed."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from aha.data.demo import DemoDataset
from aha.data.demo_datamodule import DemoDataModule
from aha.explainer import as_images
from aha.metrics.protocol_run import run_protocol
from aha.perturbation import make_reference
from aha.training.module import ExplainerModule
from aha.training.options import ClassifierOptions, OptimizerOptions, TargetOptions, TemperatureOptions
from tests.benchmarks.reference_step import reference_loss

CONFIG = yaml.safe_load((Path(__file__).parents[2] / "configs" / "demo.yaml").read_text())
Loss = Callable[[dict[str, Any], int, float], Tensor]  # of a batch, the step and the share of the run


class Trained(NamedTuple):
    """Steps and processor seconds of training; ``(seconds, mean)`` on the way; each picture's insertion − deletion."""

    steps: int
    seconds: float
    history: list[tuple[float, float]]
    values: Tensor


def make_module(**objective: Any) -> ExplainerModule:
    """The demo's module with the config's options and a blank head, the same every time.

    Blank: without the classifier's own evidence, which an untrained head would repeat, and without edges. With them it
    is as faithful before the first step as after the last, and nothing could be compared.
    """
    torch.manual_seed(0)
    model = copy.deepcopy(CONFIG["model"]) | {"compare": []}
    model["classifier"] = ClassifierOptions(**model["classifier"])
    model["objective"] = model.get("objective", {}) | objective
    model["head"] = model["head"] | {"evidence": False, "edges": False}
    return ExplainerModule(**model)


def batches() -> Iterator[dict[str, Any]]:
    """Training batches without end, in the order of a training run."""
    data = DemoDataModule(**CONFIG["data"].get("init_args", {}))
    run = dict(world_size=1, global_rank=0, global_step=0, accumulate_grad_batches=1, max_steps=1_000_000)
    data.trainer = SimpleNamespace(**run)
    return iter(data.train_dataloader())


def quality(module: ExplainerModule, split: str, count: int) -> Tensor:
    """Insertion − deletion of the first pictures of a split, ``(count,)``."""
    batch = DemoDataset(split, length=count).batch(range(count))
    maps, logits, targets = module.explainer.explain(batch["image"])
    result = run_protocol("aha", module.classifier, batch["image"], maps, targets, clean_logits=logits)
    return result.metrics["insertion_minus_deletion"]


def train(
    module: ExplainerModule,
    loss: Loss,
    tell: Callable[[float], object],
    pictures: int,
    *,
    steps: float = math.inf,
    seconds: float = math.inf,
    every: float = math.inf,
    split: str = "val",
) -> Trained:
    """Train for so many steps or seconds of processor time, whichever is first; evaluate every so many seconds."""
    recipe: OptimizerOptions = module.options["optimizer"]
    optimizer = torch.optim.AdamW(module.head.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    spent, step, progress = 0.0, 0, 0.0
    history = [(0.0, float(quality(module, split, pictures).mean()))]
    for batch in batches():
        start = time.process_time()
        optimizer.param_groups[0]["lr"] = recipe.lr * rate(progress, recipe)
        optimizer.zero_grad()
        loss(batch, step, progress).backward()
        torch.nn.utils.clip_grad_norm_(module.head.parameters(), 1.0)
        optimizer.step()
        spent, step = spent + time.process_time() - start, step + 1
        progress = min(max(step / steps, spent / seconds), 1.0)
        tell(progress)
        if progress == 1:
            break
        if spent >= history[-1][0] + every:
            history.append((spent, float(quality(module, split, pictures).mean())))
    values = quality(module, split, pictures)
    return Trained(step, spent, [*history, (spent, float(values.mean()))], values)


def rate(progress: float, recipe: OptimizerOptions) -> float:
    """The module's learning rate over a share of the run: warm-up, then cosine."""
    if progress < recipe.warmup:
        return (1 + 24 * progress / recipe.warmup) / 25
    low = 1 / (25 * recipe.final_lr_divisor)
    return low + (1 - low) * (1 + math.cos(math.pi * (progress - recipe.warmup) / (1 - recipe.warmup))) / 2


def ours(module: ExplainerModule) -> Loss:
    """The loss of the module's own training step."""

    def loss(batch: dict[str, Any], step: int, progress: float) -> Tensor:
        images, logits, maps, scored, draw, generator = _drawn(module, batch, step)
        options = dict(temperature=module.options["temperature"].at(progress), clean_logits=logits, generator=generator)
        return module.objective(module.classifier, images, maps, scored, draw, **options).loss

    return loss


def published(module: ExplainerModule) -> Loss:
    """Two n × n sorts, 16 fractions with both ends, two classes by forwards of their own, temperatures 1 to 0.3."""
    module.options["targets"] = TargetOptions(mode="published")
    temperature = TemperatureOptions(start=1.0, end=0.3, schedule="linear")
    model = copy.deepcopy(module.classifier.model)
    model.set_grad_checkpointing(True)

    def classify(images: Tensor) -> Tensor:
        return model(module.classifier.normalize(images))

    def loss(batch: dict[str, Any], step: int, progress: float) -> Tensor:
        images, _, maps, scored, draw, _ = _drawn(module, batch, step)
        reference = make_reference(images, draw.reference, data_mean=module.classifier.mean)
        options = dict(grid=draw.grid, temperature=temperature.at(progress))
        return reference_loss(classify, images, maps, scored, reference, **options)

    return loss


def _drawn(module: ExplainerModule, batch: dict[str, Any], step: int) -> tuple:
    images, generator = as_images(batch["image"]), torch.Generator().manual_seed(step + 1_000_003)
    draw = module.objective.draw(tuple(images.shape[-2:]), torch.Generator().manual_seed(step))
    output = module.explainer.encode(images)
    mapped, scored = module.draw_targets(output.logits, batch["label"], generator)
    return images, output.logits, module.explainer.decode(output, images, mapped), scored, draw, generator
