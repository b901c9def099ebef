"""The whole evaluation: from names to ``results.json``, ``samples.csv``, ``hard.csv`` and ``report.html``."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from aha.classifier import FrozenClassifier
from aha.evaluation.collect import Collected, collect
from aha.evaluation.data import open_data, read_keys
from aha.evaluation.explainers import build_entries, is_trained, load_trained, split_specs
from aha.evaluation.hard import HardOptions, hard_csv, hard_samples
from aha.evaluation.processes import launch, local_rank, wait_for_all
from aha.evaluation.protocols import get_protocol
from aha.evaluation.results import results_json, samples_csv
from aha.evaluation.runner import Run, run_evaluation
from aha.evaluation.store import ResultStore
from aha.explainer import AmortizedExplainer
from aha.export.atomic import write_atomically
from aha.refinement import RefineOptions


@dataclass
class ClassifierOptions:
    """The explained classifier; needed where no trained explainer brings it along."""

    name: str | None = None
    """A timm model name, for instance vit_base_patch16_224.augreg2_in21k_ft_in1k."""
    pretrained: bool = True
    """Load the weights that go with the name."""
    checkpoint_path: str | None = None
    """Local weights instead; package:NAME/inner/path names a file inside an installed package."""
    weights_by_order: bool = False
    """Match that file's tensors by position, not by name: same architecture, another library."""
    image_size: int | list[int] | None = None
    """Side, or height and width; default: the model's own."""
    link: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become probabilities."""
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to timm.create_model, for instance {num_classes: 10}."""


@dataclass(kw_only=True)
class EvaluationRefinement(RefineOptions):
    """Test-time refinement of the first explainer, reported beside it.

    Args:
        steps: gradient steps; 0 = no refinement.
        select: refine every sample, or the hard ones.
    """

    steps: int = 0
    select: Literal["all", "hard"] = "hard"

    def options(self) -> RefineOptions:
        return RefineOptions(**{f.name: getattr(self, f.name) for f in fields(RefineOptions)})


@dataclass(kw_only=True)
class EvaluateOptions:
    """See ``python evaluate.py --help``; all plain values, so that other processes can be given them.

    Args:
        explainers: comma-separated or a list: an artefact's folder or checkpoint, a method with options such as
            rise(num_masks=1000), captum:NAME, module:callable, maps:FOLDER. The first is what the others are
            compared with. name=… before one sets how results call it.
        output: folder for results; a run with the same settings goes on where an earlier one stopped.
        data: demo, a folder of pictures, WebDataset shards (file, pattern, folder or address), or a data set by
            module:callable(option=value).
        protocols: comma-separated or a list of aha, rise, tis, perturbation; options in parentheses override
            settings, as in rise(pixels_per_step=448).
        classifier: the explained classifier; default: the one of the first trained explainer, or the demo's ViT.
        split: of the demo, or of a data set by module:callable.
        digits: in each picture of the demo.
        target: the class explained: predicted, or label (predicted where there is none).
        limit: evaluate only so many samples.
        only: evaluate only the samples named in this file, such as hard.csv.
        batch_size: samples computed together.
        chunk_size: perturbed images per classifier forward; null: chosen by device, free memory and size.
        device: auto, cpu, cuda, cuda:1, …
        processes: processes started here; torchrun does as well.
        workers: threads per process that decode pictures.
        seed: of explainers that draw random numbers, and of the bootstrap.
        hard: what counts as hard in hard.csv.
        refine: test-time refinement of the first explainer.
        report: write report.html.
    """

    explainers: str | list[str]
    output: str
    data: str | None = "demo"
    protocols: str | list[str] = "aha,rise,perturbation"
    classifier: ClassifierOptions = field(default_factory=ClassifierOptions)
    split: Literal["train", "val", "test"] = "test"
    digits: Literal[1, 2] = 1
    target: Literal["predicted", "label"] = "predicted"
    limit: int | None = None
    only: str | None = None
    batch_size: int = 16
    chunk_size: int | None = None
    device: str = "auto"
    processes: int = 1
    workers: int = 2
    seed: int = 0
    hard: HardOptions = field(default_factory=HardOptions)
    refine: EvaluationRefinement = field(default_factory=EvaluationRefinement)
    report: bool = True

    def __post_init__(self) -> None:
        for name in ("limit", "batch_size", "chunk_size", "processes", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                msg = f"{name} must be at least 1, got {value}."
                raise ValueError(msg)


def evaluate(options: EvaluateOptions) -> dict[str, Any]:
    """Run an evaluation in one process or many.

    Returns:
        What ``results.json`` holds.
    """
    launch(run_options, options, processes=options.processes)
    return json.loads(Path(options.output, "results.json").read_text())


def run_options(options: EvaluateOptions, rank: int, world: int) -> None:
    """One process's part; the first one writes the results."""
    start = time.perf_counter()
    run = build_run(options, rank)
    store = ResultStore(options.output, rank=rank)
    with _locked(Path(options.output), rank):
        keys = run_evaluation(run, store, rank=rank, world=world)
        store.close()
        wait_for_all()
        if options.refine.steps > 0:
            chosen = None
            if options.refine.select == "hard":
                chosen = [sample["key"] for sample in find_hard(run, collect(run, store, keys), options.hard)]
            refined = run.entries[0].refined(options.refine.options(), chosen)
            run_evaluation(replace(run, entries=[refined]), store, rank=rank, world=world)
            store.close()
            wait_for_all()
            run.entries = [run.entries[0], refined, *run.entries[1:]]
        if rank == 0:
            settings = asdict(options)
            more = {"settings": settings, "processes": world, "wall_seconds": time.perf_counter() - start}
            write_results(run, collect(run, store, keys), options, more)
        wait_for_all()


def build_run(options: EvaluateOptions, rank: int = 0) -> Run:
    """Load and build everything that an evaluation names; whatever is wrong with the names is said here."""
    protocols = [_protocol(spec) for spec in split_specs(options.protocols)]
    names = [protocol.name for protocol in protocols]
    if not names or len(set(names)) < len(names):
        msg = f"protocols must be at least one, each once, got {names}."
        raise ValueError(msg)
    only = read_keys(options.only) if options.only else None
    if options.device == "auto":
        cards = torch.cuda.device_count()
        device = torch.device("cuda", local_rank(rank) % cards) if cards else torch.device("cpu")
    else:
        device = torch.device(options.device)
    specs = split_specs(options.explainers)
    classifier, loaded = _classifier(options, specs, device)
    samples = open_data(options.data, classifier, split=options.split, digits=options.digits)
    return Run(
        classifier,
        samples,
        build_entries(specs, classifier, loaded=loaded),
        protocols,
        target=options.target,
        batch_size=options.batch_size,
        chunk_size=options.chunk_size,
        limit=options.limit,
        only=only,
        seed=options.seed,
        workers=options.workers,
    )


def find_hard(run: Run, collected: Collected, options: HardOptions) -> list[dict[str, Any]]:
    """The hard samples of the first explainer, by the headline metric."""
    protocol, metric = collected.headline()
    label = run.entries[0].label
    column = collected.columns[label, protocol, metric]
    sign = 1.0 if collected.directions[protocol, metric] else -1.0
    about = {"explainer": label, "protocol": protocol}
    samples = [
        {"key": key, "score": float(sign * value), **about, **collected.samples[key]}
        for key, value in zip(collected.keys, np.asarray(column), strict=True)
    ]
    return hard_samples(samples, options)


def write_results(run: Run, collected: Collected, options: EvaluateOptions, more: dict[str, Any]) -> None:
    """Write the files, figures first: nothing that fails in a picture takes them away."""
    output = Path(options.output)
    if not collected.keys:
        reason = next(iter(collected.failed.values()), "none were found")
        msg = f"No sample of {run.samples.name} could be evaluated; the first reason: {reason}."
        raise ValueError(msg)
    results = results_json(run, collected, **more)
    write_atomically(output / "results.json", json.dumps(results, indent=1, allow_nan=False))
    write_atomically(output / "samples.csv", samples_csv(collected, [entry.label for entry in run.entries]))
    hard = find_hard(run, collected, options.hard)
    write_atomically(output / "hard.csv", hard_csv(hard))
    if options.report:
        from aha.evaluation.report import report_html

        write_atomically(output / "report.html", report_html(run, collected, results, hard))


def _classifier(
    options: EvaluateOptions, specs: list[str], device: torch.device
) -> tuple[FrozenClassifier, dict[str, AmortizedExplainer]]:
    given = options.classifier
    if given.name is not None:
        kwargs = {f.name: getattr(given, f.name) for f in fields(given) if f.name not in ("name", "model_kwargs")}
        classifier = FrozenClassifier.from_timm(given.name, **kwargs, **given.model_kwargs)
        return classifier.to(device), {}
    for spec in specs:
        if is_trained(spec):
            explainer = load_trained(spec, device=device)
            return explainer.classifier, {spec: explainer}
    if options.data == "demo":
        from aha.data.demo import load_demo_classifier

        return load_demo_classifier("vit").to(device), {}
    msg = f"Which classifier? None of {', '.join(specs)} brings one along: pass --classifier NAME."
    raise ValueError(msg)


def _protocol(spec: str) -> Any:
    if "(" not in spec:
        return get_protocol(spec)
    from aha.baselines.build import parse_spec

    name, overrides = parse_spec(spec)
    return get_protocol(name, **overrides)


@contextmanager
def _locked(output: Path, rank: int) -> Iterator[None]:
    """One evaluation at a time per folder."""
    output.mkdir(parents=True, exist_ok=True)
    if rank != 0:
        yield
        return
    with (output / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            msg = f"Another evaluation is writing to {output}: wait for it, or choose another --output."
            raise BlockingIOError(msg) from error
        yield
