"""`python train.py --config configs/demo.yaml`: train an explainer, test it, and leave it where others can load it."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.table import Table

import aha.data.demo_datamodule  # noqa: F401 - so that its short class name is known to --data
from aha.cli.memory import keep_freed_memory
from aha.cli.messages import BriefErrors
from aha.export.artifact import save_artifact
from aha.training.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint, read_checkpoint
from aha.training.data_tally import DataTally
from aha.training.module import ExplainerModule
from aha.training.options import BackboneOptions
from aha.training.pictures import Pictures, save_contact_sheet

FOUND_BY_LIGHTNING = ("last", "best", "hpc", "registry")  # words for --ckpt_path that it turns into a file itself
DESCRIPTION = """Train an amortized explainer for a frozen image classifier.

  python train.py --config configs/demo.yaml                       the embedded demo, no download
  python train.py --config configs/demo.yaml --model.head.width 64 any option overridden
  python train.py --config configs/demo.yaml --ckpt_path runs/demo/checkpoints/last.ckpt   go on after a stop
  python train.py --config configs/demo.yaml --print_config        all options with their values

The output folder gets checkpoints/ (best, last), explainer/ (the artefact that aha.load reads), logs/ (TensorBoard),
contact_sheet.png and summary.json."""


class PlainProgress(ProgressBar):
    """A line every half minute, for output that is not a terminal."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.first, self.began, self.said = trainer.global_step, time.monotonic(), time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        now, step, total = time.monotonic(), trainer.global_step, pl_module.total_steps
        if now - self.said >= 30 or step == total:
            self.said = now
            left = (now - self.began) / max(step - self.first, 1) * (total - step)
            loss = trainer.callback_metrics.get("train/loss", float("nan"))
            print(f"step {step}/{total}  loss {float(loss):.3f}  {left / 60:.1f} min left", flush=True)


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the examples of the description as they are."""


class TrainParser(BriefErrors, LightningArgumentParser):
    """The parser of ``train.py``."""


class TrainCLI(LightningCLI):
    """LightningCLI with an output folder and the callbacks that every run wants."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--output", type=str, default="runs/aha", help="Folder for everything this run leaves.")
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Checkpoint to resume from.")
        parser.add_argument(
            "--checkpoint_minutes", type=float, default=15.0, help="Minutes between writings of checkpoints/last.ckpt."
        )
        parser.add_argument("--test", type=bool, default=True, help="Test the best checkpoint at the end.")
        parser.link_arguments("output", "trainer.default_root_dir")
        parser.link_arguments("seed_everything", "model.seed", compute_fn=int)
        parser.set_defaults({"trainer.use_distributed_sampler": False, "trainer.gradient_clip_val": 1.0})

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        output = Path(self._get(self.config, "output"))
        config = self._get(self.config_init, "trainer")  # its callbacks, plugins and logger are objects by now
        logger = TensorBoardLogger(output, name="", version="logs") if config.logger is None else config.logger
        self.best = BestCheckpoint(
            output / "checkpoints",
            filename="best",
            monitor="val/insertion_minus_deletion",
            mode="max",
            enable_version_counter=False,
        )
        self.last = output / "checkpoints" / "last.ckpt"
        last = LastCheckpoint(self.last, minutes=self._get(self.config, "checkpoint_minutes"))
        bar = RichProgressBar(leave=False) if sys.stdout.isatty() else PlainProgress()
        self.tally = DataTally()
        extra = [self.best, last, Pictures(), self.tally, bar]
        if logger is not False:
            extra.append(LearningRateMonitor("step"))
        plugins = [AtomicCheckpointIO(), *as_list(config.plugins)]
        callbacks = extra + as_list(config.callbacks)
        return super().instantiate_trainer(logger=logger, callbacks=callbacks, plugins=plugins, **kwargs)


def main(args: list[str] | None = None) -> None:
    """Run the command line; ``args`` default to the process's own."""
    started = time.perf_counter()
    quiet()
    keep_freed_memory()
    try:
        cli = build(args)
        resumed = cli.config.ckpt_path
        if resumed and resumed not in FOUND_BY_LIGHTNING and "://" not in resumed:
            cli.config.ckpt_path = resumed = str(Path(resumed).expanduser())
            cli.model.on_load_checkpoint(read_checkpoint(resumed))
    except (ValueError, ConnectionError, FileNotFoundError) as error:
        # Wrong names, weights or sizes, each with its remedy: a traceback would only hide it.
        sys.exit(f"train.py: {error}")
    try:
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=cli.config.ckpt_path, weights_only=True)
    except SIGTERMException:
        sys.exit(143)  # a scheduler must not take a stopped run for a finished one
    if cli.config.test and not cli.trainer.fast_dev_run and not cli.trainer.interrupted:
        finish(cli, started)


def build(args: list[str] | None) -> TrainCLI:
    """Model, data and trainer from the command line."""
    cli = TrainCLI(
        ExplainerModule,
        subclass_mode_data=True,
        datamodule_class=None,
        run=False,
        args=args,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        parser_class=TrainParser,
        parser_kwargs={"description": DESCRIPTION, "formatter_class": HelpFormatter},
    )
    data = cli.datamodule
    given = getattr(getattr(data, "train_recipe", data), "image_size", None)
    wanted = cli.model.classifier.image_size
    if given is not None and tuple(given) != tuple(wanted):
        msg = (
            f"The data are read at {given[0]}×{given[1]} pixels, {cli.model.classifier.name} takes "
            f"{wanted[0]}×{wanted[1]}: pass --data.image_size '[{wanted[0]}, {wanted[1]}]', or another "
            "--model.classifier.image_size."
        )
        raise ValueError(msg)
    return cli


def finish(cli: TrainCLI, started: float) -> None:
    """Test the best checkpoint; leave artefact, contact sheet and summary; print the table."""
    output, trainer, module = Path(cli.config.output), cli.trainer, cli.model
    chosen = cli.best.best_model_path or cli.last
    checkpoint = torch.load(chosen, weights_only=True, map_location="cpu")
    module.load_state_dict(checkpoint["state_dict"])
    trainer.test(module, cli.datamodule, verbose=False)
    if not trainer.is_global_zero:
        return
    summary = {
        "checkpoint": str(chosen),
        "steps": checkpoint["global_step"],
        "skipped_steps": checkpoint["skipped_steps"],
        "minutes": round((time.perf_counter() - started) / 60, 2),
        "protocol": "hard per-pixel ranking, 21 fractions, mean reference, predicted class, trapezoid",
        "test": {name: round(value, 5) for name, value in module.test_means.items()},
    }
    if hasattr(cli.datamodule, "tally"):
        summary["samples"] = {"seen": cli.tally.seen, "skipped": cli.tally.skipped}
    # Weights drawn at random are nowhere else.
    drawn = any(not part.pretrained and part.checkpoint_path is None for part in backbones(module))
    save_artifact(module.explainer, output / "explainer", training=summary, with_backbone=drawn)
    save_contact_sheet(module, cli.datamodule, output / "contact_sheet.png")
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print_table(module.test_means, output)


def backbones(module: ExplainerModule) -> list[BackboneOptions]:
    """Options of the classifier and, where there is one, the separate encoder."""
    return [module.options[name] for name in ("classifier", "encoder") if name in module.options]


def print_table(means: dict[str, float], output: Path) -> None:
    """One row per explainer, with the direction of better beside every figure."""
    columns = {
        "deletion": "deletion ↓",
        "insertion": "insertion ↑",
        "insertion_minus_deletion": "ins − del ↑",
        "pointing_game": "pointing ↑",
        "pointing_game_of_two": "of two ↑",
    }
    columns = {metric: title for metric, title in columns.items() if any(name.endswith(f"/{metric}") for name in means)}
    table = Table("explainer", title="Test pictures, `aha` protocol (hard ranking, 21 fractions, mean reference)")
    for title in columns.values():
        table.add_column(title, justify="right")
    for explainer in dict.fromkeys(name.split("/")[0] for name in means):
        values = [means.get(f"{explainer}/{metric}") for metric in columns]
        table.add_row(explainer, *("" if value is None else f"{value:.3f}" for value in values))
    console = Console()
    console.print(table)
    console.print(f"explainer {output}/explainer · pictures {output}/contact_sheet.png · figures {output}/summary.json")


def as_list(value: Any) -> list[Any]:
    """None, one object or several, as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def quiet() -> None:
    """Silence what is intended here: a frozen model in eval mode, few data workers, jsonargparse's deprecations."""
    warnings.filterwarnings("ignore", message=r".*in eval mode at the start of training.*")
    warnings.filterwarnings("ignore", message=r".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=r".*`IterableDataset` has `__len__` defined.*")
    # True of the loader, not of the run: batch s is drawn from (seed, s).
    warnings.filterwarnings("ignore", message=r".*your dataloader is not resumable.*")
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    warnings.filterwarnings("ignore", module="jsonargparse")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in str(record.msg)
    )
