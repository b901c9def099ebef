"""What test-time refinement gains, at what cost, and whether it games its own metric.

``python -m tests.benchmarks.refinement_study --explainer runs/demo/explainer`` prints a table over steps and modes:
gains on the protocol that is nearest to the refined objective (``aha``, mean reference), on protocols that were not
optimised (other references, ``rise``, ``perturbation``), and on pointing. Demo validation pictures.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

import aha
from aha.data.demo import DemoDataset
from aha.metrics import pointing_game
from aha.metrics.protocol_run import run_protocol
from aha.metrics.protocols import get_protocol
from aha.refinement import RefineOptions, refine

PROTOCOLS = {
    "aha": get_protocol("aha"),
    "aha, black": get_protocol("aha", deletion_reference="black", insertion_reference="black"),
    "aha, blur": get_protocol("aha", deletion_reference="blur", insertion_reference="blur"),
    "rise": get_protocol("rise"),
}


def figures(explainer: aha.Explainer, batch: dict, maps: torch.Tensor) -> dict[str, torch.Tensor]:
    """Insertion − deletion per protocol, negative − positive perturbation, and pointing, per sample."""
    classifier, images = explainer.classifier, batch["image"]
    values = {
        name: run_protocol(protocol, classifier, images, maps).metrics["insertion_minus_deletion"]
        for name, protocol in PROTOCOLS.items()
    }
    moved = run_protocol("perturbation", classifier, images, maps, labels=batch["label"]).metrics
    values["perturbation"] = moved["negative_perturbation"] - moved["positive_perturbation"]
    return values | {"pointing": pointing_game(maps, batch["mask"])}


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--explainer", default="runs/demo/explainer")
    parser.add_argument("--count", type=int, default=64, help="validation pictures")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 10, 30])
    parser.add_argument("--hard", type=float, default=0.25, help="share of the pictures that count as hard")
    parser.add_argument("--output", help="write the figures there as JSON")
    options = parser.parse_args()
    explainer = aha.load(options.explainer)
    batch = DemoDataset("val", length=options.count).batch(range(options.count))
    start = explainer.attribute(batch["image"])
    before = figures(explainer, batch, start)
    hard = before["aha"].topk(round(options.hard * options.count), largest=False).indices
    rows = [{"mode": "–", "steps": 0, **{name: float(v.mean()) for name, v in before.items()}}]
    print(
        f"{'mode':5}{'steps':>6}{'fwd':>6}{'s/img':>7}" + "".join(f"{n:>14}" for n in before) + "   better: all   hard"
    )
    print(f"{'–':5}{0:6}{0:6}{0:7.2f}" + "".join(f"{float(v.mean()):14.3f}" for v in before.values()))
    for mode in ("map", "head"):
        for steps in options.steps:
            began = time.process_time()
            refined = refine(explainer, batch["image"], maps=start, options=RefineOptions(steps=steps, mode=mode))
            seconds = (time.process_time() - began) / options.count
            after = figures(explainer, batch, refined.maps)
            improved = after["aha"] > before["aha"]
            row = {"mode": mode, "steps": steps, "forwards": refined.forwards, "backwards": refined.backwards}
            row |= {name: float(v.mean()) for name, v in after.items()} | {"cpu_seconds": seconds}
            row |= {"improved": float(improved.float().mean()), "improved_hard": float(improved[hard].float().mean())}
            rows.append(row)
            print(
                f"{mode:5}{steps:6}{refined.forwards:6}{seconds:7.2f}"
                + "".join(f"{float(v.mean()):14.3f}" for v in after.values())
                + f"{row['improved']:14.0%}{row['improved_hard']:7.0%}",
                flush=True,
            )
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({"explainer": options.explainer, "count": options.count, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
