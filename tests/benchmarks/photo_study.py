"""What limits the photographs' explainer: ``python -m tests.benchmarks.photo_study --train SHARDS --held_out SHARDS``.

The base is ``train.py --config configs/photos.yaml`` at a rate of 1e-3, every variant the same with a few options
changed; ``evaluate.py`` then scores all of them on pictures that they were trained on and on pictures that they were
not. The table gives insertion − deletion (`aha` protocol) on both, and the paired difference to the base. The base with
other seeds shows which differences mean nothing.

A run that is there already is not repeated, so a study can be stopped, and variants added to it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "configs" / "photos.yaml"
BASE = ["--model.optimizer.lr=1e-3", "--model.compare=[]", "--trainer.limit_test_batches=1"]
VARIANTS: dict[str, list[str]] = {
    "base": [],
    "seed 1": ["--seed_everything=1"],
    "seed 2": ["--seed_everything=2"],
    "untrained": ["--model.optimizer.lr=0"],
    "twice the steps": ["--trainer.max_steps=400"],
    "no augmentation": ["--data.augment=[]"],
    "flips only": ["--data.augment=[flip]"],
    "colours jittered": ["--data.augment=[flip,random_resized_crop,color_jitter]"],
    "width 16": ["--model.head.width=16"],
    "width 192": ["--model.head.width=192"],
    "class vectors": ["--model.head.class_vector=weights"],
    "normalised per position": ["--model.head.feature_norm=position"],
    "bilinear": ["--model.head.upsampling=bilinear"],
    "edges": ["--model.head.edges=true"],
    "no evidence": ["--model.head.evidence=false", "--model.head.class_vector=weights"],
    "mean reference": ["--model.objective.references=[mean]"],
    "predicted class only": ["--model.targets.other_share=0"],
    "half other classes": ["--model.targets.other_share=0.5"],
    "8 fractions": ["--model.objective.num_fractions=8"],
    "batches of 16": ["--data.batch_size=16"],
    "rate 3e-4": ["--model.optimizer.lr=3e-4"],
    "rate 3e-3": ["--model.optimizer.lr=3e-3"],
    "temperature to .02": ["--model.temperature.end=0.02"],
    "temperature .5": ["--model.temperature.end=0.5"],
    "no noise": ["--model.objective.noise=0"],
    "grids 5 to 14": ["--model.objective.min_grid=5", "--model.objective.max_grid=14"],
    "grids 14 to 40": ["--model.objective.min_grid=14", "--model.objective.max_grid=40"],
    "smoothness × 20": ["--model.objective.smoothness_weight=0.05"],
    "weights averaged": ["--trainer.callbacks=aha.training.averaging.HeadAveraging", "--trainer.callbacks.decay=0.95"],
}


def run(script: str, *arguments: str, log: Path) -> None:
    """One of the repository's commands; its output goes to a file, whose end is shown where it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        command = [sys.executable, str(REPOSITORY / script), *arguments]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        sys.exit(f"{' '.join(command)}\nfailed:\n" + "\n".join(log.read_text().splitlines()[-15:]))


def folder_of(name: str, output: Path) -> Path:
    """Where a variant's run is."""
    return output / name.replace(" ", "_")


def train(name: str, options: argparse.Namespace) -> None:
    """Train the variant unless it is there."""
    folder = folder_of(name, options.output)
    if not (folder / "summary.json").exists():
        data = [f"--data.train={options.train}", f"--data.train_samples={options.samples}"]
        data += [f"--data.test={options.held_out}"]
        run_options = [f"--config={CONFIG}", f"--output={folder}", f"--trainer.max_steps={options.steps}"]
        run("train.py", *run_options, *data, *BASE, *VARIANTS[name], log=folder / "train.log")


def evaluate(names: list[str], data: str, limit: int, output: Path) -> dict[str, dict[str, float]]:
    """Insertion − deletion of each variant, and its difference to the first."""
    explainers = [f"{name}={folder_of(name, output.parent) / 'explainer'}" for name in names]
    arguments = [f"--explainers={','.join(explainers)}", f"--data={data}", f"--limit={limit}", "--protocols=aha"]
    run("evaluate.py", *arguments, f"--output={output}", log=output.parent / f"{output.name}.log")
    rows = json.loads((output / "results.json").read_text())["rows"]
    return {row["explainer"]: row for row in rows if row["metric"] == "insertion_minus_deletion"}


def main(arguments: list[str] | None = None) -> None:
    """Train what is missing, evaluate all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="shards to train on: a brace pattern")
    parser.add_argument("--samples", type=int, required=True, help="pictures in them")
    parser.add_argument("--held_out", required=True, help="shards to evaluate on")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=int, default=150, help="pictures of each kind to evaluate on")
    parser.add_argument("--output", type=Path, default=Path("runs/photo_study"))
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(["base", *options.variants]))
    console = Console()
    for i, name in enumerate(names):
        with console.status(f"{i + 1} of {len(names)}: {name}"):
            train(name, options)
    with console.status("evaluation"):
        seen = evaluate(names, options.train, options.limit, options.output / "seen")
        new = evaluate(names, options.held_out, options.limit, options.output / "held_out")
    table = Table("variant", "trained on ↑", "held out ↑", "to the first, paired [95 %]", title="insertion − deletion")
    for name in names:
        row = new[name]
        paired = [row[key] for key in ("difference", "difference_low", "difference_high")]
        cells = "" if paired[0] is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*paired)
        table.add_row(name, f"{seen[name]['value']:.3f}", f"{row['value']:.3f}", cells)
    console.print(table)
    figures = {name: {"options": VARIANTS[name], "trained on": seen[name], "held out": new[name]} for name in names}
    (options.output / "study.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
