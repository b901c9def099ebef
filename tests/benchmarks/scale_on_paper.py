"""What an epoch costs on how many GPUs, on paper: ``python -m tests.benchmarks.scale_on_paper``.

FLOPs of one training picture are counted (torch's FlopCounterMode, a real pass at batch 1), the input pipeline's
pictures per second and worker are measured here (CPU time of one core), and the rest are assumptions that options
state: ``--tflops``, what a GPU sustains, and ``--gbytes``, what its link carries. GPU times are computed, not measured.

    T = max(n·F / (N·S), n / (N·w·r)) + n / (N·b) · 4·P·2·(N − 1) / (N·B) + V·E / S + Q·E / (N·S)

with n pictures, F FLOPs a picture (encode, head, and forward and backward of 2·K perturbed images), N GPUs of S FLOP/s,
w workers of r pictures a second per GPU, b the batch per GPU, P parameters of the head, B bytes a second between GPUs,
E FLOPs of one explainer's hard curves on a picture, V of those per GPU in validation, Q in the final test over all.
Nothing is assumed to overlap but reading and computing, which is the worst case for the all-reduce.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aha.data.loaders import TrainLoader
from aha.data.pipeline import Recipe
from aha.data.shards import ShardSource
from aha.objective import AHAObjective
from aha.perturbation import make_reference
from aha.perturbation.soft_curves import soft_scores
from aha.training.module import ExplainerModule
from aha.training.options import ClassifierOptions, HeadOptions
from tests.benchmarks.data_pipeline import make_shards, worked

CONFIG = Path(__file__).parents[2] / "configs" / "imagenet_vit_b16.yaml"
IMAGENET, IMAGENET_VALIDATION = 1_281_167, 50_000
HARD_FORWARDS = 40  # of one explainer on one picture: two curves of 21 fractions that share their ends


@dataclass(frozen=True)
class Costs:
    """FLOPs of one picture, and parameters of the head."""

    encode: int
    head: int
    perturbed: int
    forward: int
    parameters: int

    def training(self, fractions: int) -> int:
        """One training picture: deletion and insertion at each fraction, forward and backward."""
        return self.encode + self.head + 2 * fractions * self.perturbed

    @property
    def curves(self) -> int:
        """Hard curves of one explainer on one picture."""
        return self.forward * HARD_FORWARDS


def count(module: ExplainerModule) -> Costs:
    """Count by running: encoding a picture, the head both ways, one perturbed image both ways, one forward alone."""
    images = torch.rand(1, 3, *module.classifier.image_size)
    with sdpa_kernel(SDPBackend.MATH):  # fused attention counts as nothing
        with FlopCounterMode(display=False) as encode:
            output = module.explainer.encode(images)
        targets = output.logits.argmax(-1)
        with FlopCounterMode(display=False) as head:
            module.explainer.decode(output, images, targets).sum().backward()
        grid = module.objective.min_grid
        masks = torch.rand(1, 1, grid**2, requires_grad=True)
        reference = make_reference(images, "mean", data_mean=module.classifier.mean)
        with FlopCounterMode(display=False) as perturbed:
            soft_scores(module.classifier, images, reference, masks, targets, grid=grid).sum().backward()
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            module.classifier(images)
    counted = [counter.get_total_flops() for counter in (encode, head, perturbed, forward)]
    return Costs(*counted, sum(p.numel() for p in module.head.parameters()))


def pictures_per_second(size: tuple[int, int], pictures: int = 200, rounds: int = 3) -> float:
    """Of one training worker, by its CPU time: read, shuffle, decode, resize, collate; JPEGs of ImageNet's size."""
    with tempfile.TemporaryDirectory() as folder:
        source = ShardSource(shards=tuple(make_shards(Path(folder), pictures)), shuffle_buffer=pictures // 4)
        recipe = Recipe(image_size=size, batch_size=20)
        return max(worked(TrainLoader(source, recipe, steps=pictures // 20)) for _ in range(rounds))


def build(config: dict[str, Any]) -> ExplainerModule:
    """The module of a configuration, with random weights, which cost the same."""
    model = config["model"]
    return ExplainerModule(
        ClassifierOptions(**model["classifier"] | {"pretrained": False}),
        head=HeadOptions(**model.get("head", {})),
        objective=AHAObjective(**model.get("objective", {})),
        compare=[],
    )


@dataclass(frozen=True)
class Plan:
    """One epoch: what is counted, measured and assumed."""

    costs: Costs
    fractions: int
    rate: float
    images: int
    batch: int
    workers: int
    validated: int
    tested: int
    flops: float
    wire: float

    def minutes(self, gpus: int) -> dict[str, float]:
        """By part."""
        costs, steps = self.costs, self.images // (self.batch * gpus)
        seconds = {
            "classifier": self.images * (costs.training(self.fractions) - costs.head) / (gpus * self.flops),
            "head": self.images * costs.head / (gpus * self.flops),
            "input": self.images / (gpus * self.workers * self.rate),
            "all-reduce": steps * 4 * costs.parameters * 2 * (gpus - 1) / gpus / self.wire,
            "validation": self.validated * costs.curves / self.flops,
            "test": self.tested * costs.curves / (gpus * self.flops),
        }
        return {part: value / 60 for part, value in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    """Count, measure, print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--config", default=CONFIG, help="of a training run; default: ViT-B/16 on ImageNet")
    options.add_argument("--tflops", type=float, default=200, help="10¹² a second that a GPU sustains: an assumption")
    options.add_argument("--gbytes", type=float, default=25, help="10⁹ a second between GPUs: an assumption")
    options.add_argument("--workers", type=int, help="per GPU; default: the configuration's")
    options.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    options.add_argument("--images", type=int, default=IMAGENET, help="training pictures")
    options.add_argument("--rate", type=float, help="pictures per second and worker; default: measured now")
    parsed = options.parse_args(arguments)
    torch.set_num_threads(1)
    config = yaml.safe_load(Path(parsed.config).read_text())
    data, trainer = config["data"]["init_args"], config["trainer"]
    module, others = build(config), len(config["model"].get("compare", ["random"]))
    validations = round(1 / trainer["val_check_interval"])
    plan = Plan(
        costs=count(module),
        fractions=module.objective.num_fractions,
        rate=parsed.rate or pictures_per_second(module.classifier.image_size),
        images=parsed.images,
        batch=data["batch_size"],
        workers=parsed.workers or data["num_workers"],
        validated=trainer["limit_val_batches"] * data["batch_size"] * (validations + others),  # others: the first time
        tested=IMAGENET_VALIDATION * (1 + others),
        flops=parsed.tflops * 1e12,
        wire=parsed.gbytes * 1e9,
    )
    report(module.classifier.name, plan, parsed.gpus)


def report(name: str, plan: Plan, gpus: list[int]) -> None:
    """The counts, the table, and where each part becomes the limit."""
    costs, each = plan.costs, plan.costs.training(plan.fractions)
    print(
        f"{name}\n"
        f"counted, GFLOPs of one training picture: encode {costs.encode / 1e9:.1f}, head both ways "
        f"{costs.head / 1e9:.1f}, perturbed images both ways {2 * plan.fractions} × {costs.perturbed / 1e9:.1f}, "
        f"together {each / 1e9:.0f}; hard curves of one explainer {costs.curves / 1e9:.0f}\n"
        f"input: {plan.rate:.0f} pictures/s per worker, {plan.workers} workers per GPU\n"
        f"assumed: {plan.flops / 1e12:g} TFLOP/s sustained per GPU, {plan.wire / 1e9:g} GB/s between GPUs\n\n"
        "| GPUs | steps | classifier | head | input | all-reduce | validation | test | minutes in all | limit |\n"
        "|" + "---|" * 10
    )
    for number in gpus:
        by = plan.minutes(number)
        computing = by["classifier"] + by["head"]
        total = max(computing, by["input"]) + by["all-reduce"] + by["validation"] + by["test"]
        parts = {"classifier": computing, **{part: by[part] for part in ("input", "all-reduce", "validation")}}
        cells = [number, plan.images // (plan.batch * number), *map(shown, (*by.values(), total))]
        print("|", *(f"{cell} |" for cell in (*cells, max(parts, key=parts.__getitem__))))
    step, gradients = plan.batch * each / plan.flops, 8 * costs.parameters
    most = math.ceil(plan.images * each / (plan.validated * costs.curves))
    print(
        f"\nOne GPU computes {plan.flops / each:.0f} pictures/s. The input is the limit with fewer than "
        f"{plan.flops / each / plan.rate:.2g} workers per GPU,\nor, "
        f"with {plan.workers}, where a GPU sustains more than {plan.workers * plan.rate * each / 1e12:.0f} TFLOP/s. "
        f"A step of {plan.batch} pictures takes {1e3 * step:.0f} ms,\n"
        f"the all-reduce of its {costs.parameters} gradients ({gradients / 1e6:.1f} MB on the wire at most) "
        f"{1e3 * gradients / plan.wire:.2g} ms: it is the limit\nbelow {gradients / step / 1e9:.2g} GB/s. "
        f"Validation costs every GPU the same: from {most} GPUs on it takes longer than training."
    )


def shown(minutes: float) -> str:
    return "0" if minutes == 0 else "< 0.01" if minutes < 0.01 else f"{minutes:.{0 if minutes >= 100 else 2}f}"


if __name__ == "__main__":
    main()
