"""What options do to the time of a training step: ``python -m tests.benchmarks.step_options --classifier NAME``.

Forward and backward of a fresh head on one batch (6 stratified fractions, two classes from the same logits), by turns:
as it is; in mixed bfloat16 (``--trainer.precision bf16-mixed``); with the classifier compiled
(``--model.compile_classifier true``); with its attention taken apart, which explainers that read attention need and
training keeps fused; with images laid out channels first; and with other chunks than the automatic ones
(``--model.objective.chunk_size``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from aha.perturbation.chunks import automatic_chunk_size
from tests.benchmarks.timing import alternate, report, step_parser
from tests.benchmarks.training_step import Step


def stepping(options: argparse.Namespace, change: Callable[[Step], object] | None = None, **objective) -> Callable:
    """A step of its own, so that what is changed about its classifier stays there."""
    step = Step(options)
    if change is not None:
        change(step)
    return lambda: step.ours(6, fraction_sampling="stratified", **objective)


def take_attention_apart(step: Step) -> None:
    for module in step.explainer.classifier.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False


def in_bfloat16(run: Callable[[], Tensor], device: torch.device) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16):
        return run()


def channels_first(run: Callable[[], Tensor]) -> Tensor:
    with patch("aha.perturbation.soft_curves.lay_out", lambda images: images.contiguous()):
        return run()


def main(arguments: list[str] | None = None) -> None:
    """Time by turns and print."""
    options = step_parser(__doc__)
    options.add_argument("--chunks", type=int, nargs="*", default=[2, 16, 48])
    parsed = options.parse_args(arguments)
    parsed.fractions, parsed.temperature, parsed.chunk_size = 6, 0.3, None
    torch.set_num_threads(parsed.threads)
    plain = stepping(parsed)
    sides = {
        "as it is": plain,
        "bf16-mixed": lambda: in_bfloat16(plain, parsed.device),
        "compiled": stepping(parsed, lambda step: step.explainer.classifier.compile()),
        "channels first": lambda: channels_first(plain),
    }
    step = Step(parsed)
    if any(hasattr(module, "fused_attn") for module in step.explainer.classifier.modules()):
        sides["attention taken apart"] = stepping(parsed, take_attention_apart)
    for size in parsed.chunks:
        sides[f"chunks of {size}"] = stepping(parsed, chunk_size=size)
    automatic = automatic_chunk_size(step.explainer.classifier, step.images)
    print(f"{parsed.classifier}, {parsed.size} pixels, batch {parsed.batch}, {parsed.threads} threads, ", end="")
    print(f"automatic chunks of {automatic}")
    report(alternate(sides, parsed.rounds), over="as it is")


if __name__ == "__main__":
    main()
