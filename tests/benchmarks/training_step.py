"""The published training step over this project's: ``python -m tests.benchmarks.training_step``.

Same head, images and classes (two classes scored on the predicted class's map), 16 fractions with end points, mean
reference. First the losses of both must agree to 1e-4 with the published sort, raw scores and no noise; then the
published step is timed in turn with the default sort, and with 6 stratified fractions (the default of training).
Peak memory above idle comes from processes of their own (``--memory``).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer
from aha.objective import AHAObjective, Draw
from aha.perturbation import make_reference
from tests.benchmarks.reference_step import reference_loss
from tests.benchmarks.timing import alternate, measure_peak, peak_above_idle, report, step_parser

TOLERANCE = 1e-4


class Step:
    """One training step of a fresh head, up to its gradients, either way."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.options = options
        classifier = FrozenClassifier.from_timm(
            options.classifier, pretrained=False, image_size=options.size, num_classes=1000
        )
        with torch.no_grad():  # fresh weights say much the same of every image: no test of a loss
            for value in classifier.model.parameters():
                value.add_(0.05 * torch.randn_like(value))
            classifier.class_weight.mul_(5)
        self.explainer = AmortizedExplainer(classifier).to(options.device)
        blobs = torch.rand(options.batch, 3, 7, 7, device=options.device)
        self.images = F.interpolate(blobs, size=classifier.image_size, mode="bilinear").contiguous()
        model = copy.deepcopy(classifier.model)
        model.set_grad_checkpointing(True)
        self.checkpointed: Callable[[Tensor], Tensor] = lambda images: model(classifier.normalize(images))

    def maps(self) -> tuple[Tensor, Tensor, Tensor]:
        output = self.explainer.encode(self.images)
        targets = output.logits.topk(2).indices
        return self.explainer.decode(output, self.images, targets[:, 0]), targets, output.logits

    def published(self, noise: float = 1.0) -> Tensor:
        self.explainer.head.zero_grad()
        maps, targets, _ = self.maps()
        loss = reference_loss(
            self.checkpointed,
            self.images,
            maps,
            targets,
            make_reference(self.images, "mean"),
            grid=self.options.grid,
            temperature=self.options.temperature,
            noise=noise,
            fractions=self.options.fractions,
        )
        loss.backward()
        return loss.detach()

    def ours(self, num_fractions: int = 0, **changes) -> Tensor:
        self.explainer.head.zero_grad()
        settings = dict(fraction_sampling="linspace", num_fractions=num_fractions or self.options.fractions)
        if self.options.chunk_size:
            settings["chunk_size"] = self.options.chunk_size
        objective = AHAObjective(**settings | changes)
        drawn = objective.draw((1, 1), torch.Generator().manual_seed(0))
        maps, targets, logits = self.maps()
        terms = objective(
            self.explainer.classifier,
            self.images,
            maps,
            targets,
            Draw(self.options.grid, (0, 0), "mean", drawn.fractions),
            temperature=self.options.temperature,
            clean_logits=logits,
        )
        terms.loss.backward()
        return terms.loss.detach()


def check(step: Step) -> float:
    """Difference of the two losses where both are the published one; stops where it is too large."""
    same = dict(method="gumbel_sinkhorn", noise=0.0, standardize_scores=False)
    published, ours = step.published(noise=0.0), step.ours(**same)
    gap = float((published - ours).abs())
    print(f"loss, published sort without noise: {published:.6f} published, {ours:.6f} ours, difference {gap:.1e}")
    if not gap < TOLERANCE:
        msg = f"the two steps don't compute the same loss: they differ by {gap:.2e}, more than {TOLERANCE}"
        raise SystemExit(msg)
    return gap


def main(arguments: list[str] | None = None) -> None:
    """Check, time and print."""
    options = step_parser(__doc__)
    options.add_argument("--fractions", type=int, default=16)
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--chunk_size", type=int, help="default: the project's")
    options.add_argument("--memory", action="store_true", help="peak memory in place of time")
    options.add_argument("--one", choices=["published", "ours"], help="peak memory of one side, in this process")
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    if parsed.memory:
        shared = [f"--{k}={v}" for k, v in vars(parsed).items() if k not in ("memory", "one") and v is not None]
        peaks = [peak_above_idle("tests.benchmarks.training_step", [*shared, "--one", side]) for side in SIDES]
        print(f"batch {parsed.batch}, grid {parsed.grid}, peak MiB above idle: {peaks[0]:.0f} published, ", end="")
        print(f"{peaks[1]:.0f} ours, ours / published {peaks[1] / peaks[0]:.3f}")
        return
    step = Step(parsed)
    if parsed.one:
        measure_peak(step.published if parsed.one == "published" else step.ours)
        return
    check(step)
    print(
        f"{parsed.classifier}, batch {parsed.batch}, grid {parsed.grid}, {parsed.fractions} fractions, time of a step"
    )
    sides = {"ours": step.ours, "published": step.published}
    if parsed.fractions > 6:
        sides["ours, 6 stratified"] = lambda: step.ours(6, fraction_sampling="stratified")
    report(alternate(sides, parsed.rounds, warm_up=parsed.device.type != "cpu"), over="ours")


SIDES = ("published", "ours")

if __name__ == "__main__":
    main()
