"""Images per second per worker of the shard pipeline, against bare decode and resize of the same bytes, same run.

    python tests/benchmarks/data_pipeline.py [SHARD.tar …]

Without arguments, JPEGs of ImageNet's size (500×375) are made up. Training should reach at least 0.8 of the bare
speed. All rows are CPU time, so a busy machine disturbs them little.

What a worker process adds is the first touch of the shared memory that it hands over: 37 page faults a picture of 224.
They cost most on virtual machines, and weigh most on small JPEGs.
"""

from __future__ import annotations

import io
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter

from aha.data.loaders import EvalLoader, TrainLoader
from aha.data.pipeline import Recipe
from aha.data.shards import ShardSource
from aha.data.sources import expand_urls
from aha.data.write_shards import write_shards

SIZE = (224, 224)
ROUNDS = 7


def make_shards(folder: Path, count: int = 400) -> list[str]:
    rng = np.random.default_rng(0)
    for number in range(count):
        noise = Image.fromarray(rng.integers(0, 255, (375, 500, 3), np.uint8)).filter(ImageFilter.GaussianBlur(1.2))
        (folder / "in").mkdir(parents=True, exist_ok=True)
        noise.save(folder / "in" / f"{number}.jpg", quality=92)
    write_shards(str(folder / "in"), str(folder / "out"), shard_size=100, progress=False)
    return expand_urls(str(folder / "out"))


def bare(encoded: list[bytes], resize_by: str) -> float:
    """Decode by Pillow and resize by Pillow or torch, to an array of channels first; nothing else."""
    start = time.process_time()
    for data in encoded:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        if resize_by == "pillow":
            picture = picture.resize(SIZE[::-1], Image.Resampling.BICUBIC)
            np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))
        else:
            pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
            F.interpolate(pixels, size=SIZE, mode="bicubic", antialias=True).contiguous()
    return len(encoded) / (time.process_time() - start)


def worked(stream: EvalLoader) -> float:
    """A worker's own work, done in this process: read, shuffle, decode, resize, collate."""
    start = time.process_time()
    count = sum(len(batch.get("key", ())) for batch in stream)
    return count / (time.process_time() - start)


def worker_process(source: ShardSource, recipe: Recipe) -> float:
    """The same in a worker process, handing over included; its start is taken out as the difference of two lengths."""

    def cpu(steps: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in TrainLoader(source, recipe, steps=steps, workers=1):
            pass
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return 30 * recipe.batch_size / (cpu(35) - cpu(5))


def main(shards: list[str]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = expand_urls(shards) if shards else make_shards(Path(folder))
        source = ShardSource(
            shards=tuple(found), shuffle_buffer=100
        )  # soon full, so that one read goes with one decode
        encoded = [sample.image for shard in source.shards for sample in source.read(shard) if sample.image]
        recipe = Recipe(image_size=SIZE, batch_size=32)
        steps = len(encoded) // recipe.batch_size
        rows: dict[str, list[float]] = {}
        for _ in range(ROUNDS):  # interleaved, so that a busy machine slows all alike
            evaluation = EvalLoader(source, recipe)
            training = TrainLoader(source, recipe, steps=steps)
            for name, speed in (
                ("bare, Pillow's resize", bare(encoded, "pillow")),
                ("bare, torch's resize", bare(encoded, "torch")),
                ("evaluation", worked(evaluation)),
                ("training", worked(training)),
                ("training, in a worker", worker_process(source, recipe)),
            ):
                rows.setdefault(name, []).append(speed)
    print(f"{len(encoded)} pictures, best of {ROUNDS} rounds: images/s, and its ratio to either bare speed")
    for name, speeds in rows.items():
        ratios = [max(speeds) / max(rows[base]) for base in list(rows)[:2]]
        print(f"{name:24s} {max(speeds):8.1f}  {ratios[0]:5.2f}  {ratios[1]:5.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
