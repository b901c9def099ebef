"""The Lightning module: trains the head of an amortized explainer on the AHA objective."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from aha.baselines import build_explainer
from aha.explainer import AmortizedExplainer, as_images
from aha.export.artifact import explainer_config
from aha.metrics import pointing_game
from aha.metrics.protocol_run import run_protocol
from aha.objective import AHAObjective
from aha.training.averaging import refuse_other_averages
from aha.training.options import (
    BackboneOptions,
    ClassifierOptions,
    HeadOptions,
    OptimizerOptions,
    TargetOptions,
    TemperatureOptions,
    as_options,
)
from aha.training.refinement import TestTimeRefinement
from aha.training.tally import Tally

MAX_BAD_STEPS = 20


class ExplainerModule(LightningModule):
    """Train a head that explains a frozen classifier in one forward pass.

    Checkpoints hold the head alone, with the classifier's name and weight hash.

    Args:
        classifier: the model to explain.
        encoder: another backbone whose features the head reads; default: the explained model's own, which come free.
        head: the attribution head.
        objective: what makes a map good.
        optimizer: learning rate and its schedule.
        temperature: of the soft sort.
        targets: which classes are explained in training.
        compile_classifier: torch.compile it in place: the first step takes a minute or more, those after it less.
        compare: explainers whose validation and test figures stand beside the trained one's.
        seed: of grids, references, fractions, classes and noise; everything random in step s depends on (seed, s).
    """

    def __init__(
        self,
        classifier: ClassifierOptions,
        encoder: BackboneOptions | None = None,
        head: HeadOptions = HeadOptions(),  # noqa: B008 - an instance, so that --help shows its fields
        objective: AHAObjective = AHAObjective(),  # noqa: B008
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008
        temperature: TemperatureOptions = TemperatureOptions(),  # noqa: B008
        targets: TargetOptions = TargetOptions(),  # noqa: B008
        compile_classifier: bool = False,
        compare: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.options = {
            "classifier": as_options(ClassifierOptions, classifier),
            "head": as_options(HeadOptions, head),
            "objective": as_options(AHAObjective, objective),
            "optimizer": as_options(OptimizerOptions, optimizer),
            "temperature": as_options(TemperatureOptions, temperature),
            "targets": as_options(TargetOptions, targets),
        }
        if encoder is not None:
            self.options["encoder"] = as_options(BackboneOptions, encoder)
        compare = ["random"] if compare is None else compare
        plain = {name: dataclasses.asdict(value) for name, value in self.options.items()}
        self.save_hyperparameters(plain | {"compare": compare, "seed": seed})
        self.seed = seed
        self.objective: AHAObjective = self.options["objective"]
        self.explainer = AmortizedExplainer(
            self.options["classifier"].build(),
            encoder=self.options["encoder"].build() if encoder is not None else None,
            **dataclasses.asdict(self.options["head"]),
        )
        smallest = min(self.explainer.classifier.image_size)
        if self.objective.max_grid > smallest:
            msg = (
                f"A grid of {self.objective.max_grid} regions per side doesn't fit images of {smallest} pixels: lower "
                "model.objective.max_grid."
            )
            raise ValueError(msg)
        self.classifier, self.encoder, self.head = (
            self.explainer.classifier,
            self.explainer.encoder,
            self.explainer.head,
        )
        if compile_classifier:
            self.classifier.compile()
        self.compare = {name: build_explainer(name, self.classifier) for name in compare}
        self.total_steps = 1
        self.bad_steps = 0
        self.bad_steps_in_a_row = 0
        self.refiner: TestTimeRefinement | None = None
        self.others: dict[str, float] = {}
        self.test_means: dict[str, float] = {}
        self.register_state_dict_post_hook(_drop_frozen)
        self.register_load_state_dict_post_hook(_forgive_frozen)

    # --- training -----------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        refuse_other_averages(self.trainer)

    def configure_optimizers(self) -> dict[str, Any]:
        options: OptimizerOptions = self.options["optimizer"]
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=options.lr, weight_decay=options.weight_decay)
        total = self.total_steps = max(int(self.trainer.estimated_stepping_batches), 1)
        warmup = max(round(options.warmup * total), 1)

        def rate(step: int) -> float:
            if step < warmup:
                return (1 + 24 * step / warmup) / 25
            low = 1 / (25 * options.final_lr_divisor)
            return low + (1 - low) * (1 + math.cos(math.pi * min((step - warmup) / max(total - warmup, 1), 1))) / 2

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def current_temperature(self) -> float:
        """τ at the current step."""
        return self.options["temperature"].at(self.global_step / max(self.total_steps - 1, 1))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        images = as_images(batch["image"])
        # Draws shared by all ranks: equal work on each, and N ranks equal one process at N times the batch.
        shared = torch.Generator().manual_seed(self.seed * 1_000_003 + self.global_step)
        own = torch.Generator().manual_seed((self.seed * 1_000_003 + batch_idx) * 4099 + self.global_rank + 1)
        output = self.explainer.encode(images)
        draw = self.objective.draw((images.shape[-2], images.shape[-1]), shared)
        mapped, scored = self.draw_targets(output.logits, batch.get("label"), own)
        maps = self.explainer.decode(output, images, mapped)
        terms = self.objective(
            self.classifier,
            images,
            maps,
            scored,
            draw,
            temperature=self.current_temperature,
            clean_logits=output.logits,
            generator=own,
        )
        for name in ("deletion", "insertion", "smoothness"):
            self.log(f"train/{name}", getattr(terms, name).mean())
        self.log("train/loss", terms.loss.detach(), prog_bar=True)
        self.log("train/temperature", self.current_temperature)
        return terms.loss

    def draw_targets(self, logits: Tensor, labels: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The class whose map is made, ``(batch,)``, and the class or classes it is scored on."""
        options: TargetOptions = self.options["targets"]
        predicted, runner_up = logits.topk(min(2, logits.shape[-1]), dim=-1).indices[:, [0, -1]].unbind(-1)
        other = runner_up
        if labels is not None:
            other = torch.where((labels >= 0) & (labels != predicted), labels, runner_up)
        if options.mode == "published":
            return predicted, torch.stack([predicted, other], 1)
        chosen = torch.rand(len(logits), generator=generator).to(logits.device) < options.other_share
        targets = torch.where(chosen, other, predicted)
        return targets, targets

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip a step whose gradient is not finite: same decision on all ranks, since gradients are reduced by now."""
        gradients = [p.grad for p in self.head.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if norm.isfinite():
            self.bad_steps_in_a_row = 0
            return
        for parameter in self.head.parameters():
            parameter.grad = None
        self.bad_steps += 1
        self.bad_steps_in_a_row += 1
        self.log("train/skipped_steps", float(self.bad_steps))
        if self.bad_steps_in_a_row >= MAX_BAD_STEPS:
            msg = (
                f"The loss was not finite in {MAX_BAD_STEPS} steps in a row (step {self.global_step}, {self.bad_steps} "
                "in all): lower model.optimizer.lr, raise model.temperature.end, or train in 32 bits. "
                "The last checkpoint is intact."
            )
            raise FloatingPointError(msg)

    # --- validation and test ------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self.tally = Tally()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        # The classifier is frozen, so the others' figures never change: measured once, logged every time.
        self.score(batch, others=not self.others)

    def on_validation_epoch_end(self) -> None:
        means = self.tally.means()
        if not self.trainer.sanity_checking:
            self.others = self.others or {k: v for k, v in means.items() if not k.startswith(f"{self.explainer.name}/")}
        for name, value in {**self.others, **means}.items():
            explainer, metric = name.split("/")
            self.log(f"val/{metric}" if explainer == self.explainer.name else f"val_{explainer}/{metric}", value)

    def on_test_epoch_start(self) -> None:
        self.tally = Tally()

    def test_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        if "label2" in batch:
            self.point_at_both(batch)
        else:
            self.score(batch, others=True)

    def on_test_epoch_end(self) -> None:
        self.test_means = self.tally.means()
        for name, value in self.test_means.items():
            self.log(f"test/{name}", value)

    @torch.no_grad()
    def score(self, batch: dict[str, Any], *, others: bool) -> None:
        """Hard deletion and insertion by the `aha` protocol, predicted class; pointing where there are masks."""
        images, masks = as_images(batch["image"]), batch.get("mask")
        maps, logits, targets = self.explainer.explain(images)
        by_name = {self.explainer.name: maps}
        if self.refiner is not None:
            refined = self.refiner(self.explainer, images, maps, targets, batch["key"])
            by_name[f"{self.explainer.name} refined"] = refined
        if others:
            by_name |= {name: explainer.attribute(images, targets) for name, explainer in self.compare.items()}
            if masks is not None:
                by_name["object_mask"] = masks.float()
        constants: dict[tuple, Tensor] = {}
        for name, maps in by_name.items():
            result = run_protocol(
                "aha",
                self.classifier,
                images,
                maps,
                targets,
                chunk_size=self.objective.chunk_size,
                clean_logits=logits,
                constant_logits=constants,
            )
            for metric, values in result.metrics.items():
                self.tally.add(f"{name}/{metric}", values)
            if masks is not None:
                self.tally.add(f"{name}/pointing_game", pointing_game(maps, masks))

    @torch.no_grad()
    def point_at_both(self, batch: dict[str, Any]) -> None:
        """On pictures of two objects, asked for each in turn: is the maximum in the one asked for?"""
        for suffix in ("", "2"):
            maps = self.explainer.attribute(batch["image"], batch[f"label{suffix}"])
            self.tally.add(f"{self.explainer.name}/pointing_game_of_two", pointing_game(maps, batch[f"mask{suffix}"]))

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Maps, logits and classes explained of a batch, with its keys, on the CPU; targets: the batch's, if given."""
        images = as_images(batch["image"])
        maps, logits, targets = self.explainer.explain(images, batch.get("target"))
        if self.refiner is not None:
            maps = self.refiner(self.explainer, images, maps, targets, batch["key"])
        tensors = {"maps": maps, "logits": logits.float(), "targets": targets}
        return {"key": batch["key"]} | {name: value.cpu() for name, value in tensors.items()}

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["explainer"] = explainer_config(self.explainer)
        checkpoint["skipped_steps"] = self.bad_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        recorded = checkpoint["explainer"]["classifier"]
        if recorded["fingerprint"] != self.classifier.fingerprint():
            msg = (
                f"This checkpoint holds a head for {recorded['name']} (sha256 {recorded['fingerprint'][:12]}…), but "
                f"the classifier here is {self.classifier.name} (sha256 {self.classifier.fingerprint()[:12]}…)."
            )
            raise ValueError(msg)
        self.bad_steps = checkpoint["skipped_steps"]


def _drop_frozen(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith((f"{prefix}classifier.", f"{prefix}encoder."))]:
        del state[key]


def _forgive_frozen(module: nn.Module, incompatible: Any) -> None:
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not key.startswith(("classifier.", "encoder."))]
