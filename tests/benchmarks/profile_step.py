"""Where the time of one training step goes: ``python -m tests.benchmarks.profile_step``.

The step is the trainer's own: a batch of the demo's data (at ``--size``), features, head, sort, masks, classifier, both
directions. ``--ops N`` adds torch's profiler table of the N most expensive operations.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F

import aha.objective
import aha.perturbation.soft_curves
from aha.classifier import FrozenClassifier
from aha.data.demo import DemoDataset
from aha.explainer import AmortizedExplainer, as_images
from aha.objective import AHAObjective
from tests.benchmarks.timing import step_parser

PARTS = (
    "data",
    "encode",
    "head, forward",
    "sort, forward",
    "masks, forward",
    "classifier, forward",
    "classifier and masks, backward",
    "sort and head, backward",
    "the rest",
)


class Stopwatch:
    """Processor time by part; what runs inside another part counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = ["the rest"]
        self._since = time.process_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def around(self, name: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def _turn(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


def main(arguments: list[str] | None = None) -> None:
    """Profile and print."""
    options = step_parser(__doc__)
    options.add_argument("--ops", type=int, default=0)
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(0)
    explainer = AmortizedExplainer(
        FrozenClassifier.from_timm(parsed.classifier, pretrained=False, image_size=parsed.size)
    )
    optimizer = torch.optim.AdamW(explainer.head.parameters())
    objective = AHAObjective(min_grid=parsed.grid, max_grid=parsed.grid)
    pictures = DemoDataset("train")
    generator = torch.Generator().manual_seed(0)

    def step(watch: Stopwatch) -> None:
        with watch.part("data"):
            small = torch.stack([pictures[i]["image"] for i in range(parsed.batch)])
            images = as_images(F.interpolate(small.float() / 255, size=(parsed.size,) * 2).clamp(0, 1))
        with watch.part("encode"):
            output = explainer.encode(images)
        targets = output.logits.argmax(-1)
        with watch.part("head, forward"):
            maps = explainer.decode(output, images, targets)
        classifier, curves = explainer.classifier, aha.perturbation.soft_curves
        spread = watch.around("masks, forward", curves.region_masks_to_pixels)
        sort = watch.around("sort, forward", aha.objective.prefix_masks)
        forward = watch.around("classifier, forward", classifier.forward)
        backward = watch.around("classifier and masks, backward", torch.autograd.grad)
        with (
            patch.object(curves, "region_masks_to_pixels", spread),
            patch.object(aha.objective, "prefix_masks", sort),
            patch.object(classifier, "forward", forward),
            patch.object(torch.autograd, "grad", backward),
        ):
            draw = objective.draw((parsed.size, parsed.size), generator)
            terms = objective(
                classifier,
                images,
                maps,
                targets,
                draw,
                temperature=0.3,
                clean_logits=output.logits,
                generator=generator,
            )
        with watch.part("sort and head, backward"):
            terms.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(Stopwatch())
    watch = Stopwatch()
    for _ in range(parsed.rounds):
        step(watch)
    with watch.part("none"):
        total = sum(watch.seconds.values())
    print(f"{parsed.classifier}, batch {parsed.batch}, grid {parsed.grid}, {objective.num_fractions} fractions:")
    print(f"{1e3 * total / parsed.rounds:.0f} ms of processor time a step")
    for name in PARTS:
        print(f"{name:32s}{1e3 * watch.seconds[name] / parsed.rounds:9.1f} ms{watch.seconds[name] / total:8.1%}")
    if parsed.ops:
        with torch.profiler.profile() as profile:
            step(Stopwatch())
        print(profile.key_averages().table("self_cpu_time_total", row_limit=parsed.ops))


if __name__ == "__main__":
    main()
