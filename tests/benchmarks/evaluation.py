"""What an evaluation costs beyond the timm model's own forwards: ``python -m tests.benchmarks.evaluation``.

Prints, from one run, the time of a whole evaluation (pictures drawn, maps, curves, localisation, intervals, files,
report) over that of the bare classifier forwards that its protocol needs, at the same chunk size and alternating with
it. The explainer is the centre prior, which costs nothing; starting Python and loading weights are not counted. The
demo's ViT takes so little for a picture of 64 × 64 that all else weighs most there; ``--classifier`` takes any of timm,
on JPEGs of ImageNet's size, which are decoded and resized as part of the evaluation.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from aha.classifier import FrozenClassifier
from aha.data.demo import DEMO_CLASSIFIERS, SIZE
from aha.evaluation.collect import collect
from aha.evaluation.data import Samples, open_data
from aha.evaluation.evaluate import EvaluateOptions, write_results
from aha.evaluation.explainers import build_entries
from aha.evaluation.protocols import count_forwards, get_protocol
from aha.evaluation.runner import Run, run_evaluation
from aha.evaluation.store import ResultStore
from tests.benchmarks.data_pipeline import make_shards

Clock = Callable[[], float]


def main(given: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", default="aha")
    parser.add_argument("--classifier", help="of timm, with random weights; default: the demo's ViT")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--chunk_size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="wall time, for a quiet machine; default: processor time")
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    clock = time.perf_counter if arguments.wall else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        if arguments.classifier is None:
            name, kwargs = DEMO_CLASSIFIERS["vit"]
            classifier, data = FrozenClassifier.from_timm(name, pretrained=False, image_size=SIZE, **kwargs), "demo"
        else:
            classifier = FrozenClassifier.from_timm(arguments.classifier, pretrained=False)
            data = make_shards(Path(folder), arguments.samples)[0]
        measure(classifier, open_data(data, classifier), arguments, clock)


def measure(classifier: FrozenClassifier, samples: Samples, arguments: argparse.Namespace, clock: Clock) -> None:
    """Both sides in turn."""
    protocol = get_protocol(arguments.protocol)
    entries = build_entries("centre_prior", classifier)
    options = {"limit": arguments.samples, "chunk_size": arguments.chunk_size}
    forwards = arguments.samples * count_forwards(protocol, classifier.image_size, clean=True)
    bare, computed, whole = [], [], []
    for _ in range(arguments.repeats + 1):  # the first round warms up
        bare.append(_bare(classifier, forwards, arguments.chunk_size, clock))
        with tempfile.TemporaryDirectory() as output:
            start = clock()
            run, store = Run(classifier, samples, entries, [protocol], **options), ResultStore(output)
            keys = run_evaluation(run, store)
            computed.append(clock() - start)
            write_results(run, collect(run, store, keys), EvaluateOptions(explainers="centre_prior", output=output), {})
            whole.append(clock() - start)
    base, inner, total = (min(times[1:]) for times in (bare, computed, whole))
    print(f"{classifier.name}, {arguments.samples} samples, protocol {protocol.name}: {forwards} images classified")
    print(f"bare forwards               {base:7.2f} s   1.000 ×")
    print(f"all figures on disk         {inner:7.2f} s   {inner / base:.3f} ×")
    print(f"with intervals and report   {total:7.2f} s   {total / base:.3f} ×")


@torch.no_grad()
def _bare(classifier: FrozenClassifier, forwards: int, chunk_size: int, clock: Clock) -> float:
    images = torch.rand(chunk_size, 3, *classifier.image_size)
    start = clock()
    for first in range(0, forwards, chunk_size):
        classifier.model(classifier.normalize(images[: min(chunk_size, forwards - first)]))
    return clock() - start


if __name__ == "__main__":
    main()
