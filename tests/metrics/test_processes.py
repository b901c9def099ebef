"""Several processes with uneven shares of the data report what one process reports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from aha import metrics as M
from aha.classifier import FrozenClassifier

H, W, N = 32, 48, 9


def compute_all(samples: list[int]) -> dict[str, float]:
    """Every metric over some of the samples, then reduced over the processes there are."""
    torch.manual_seed(0)
    classifier = FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=(H, W), num_classes=6)
    with torch.no_grad():
        classifier.model.head.weight.mul_(25)
    images, maps, others = torch.rand(N, 3, H, W), torch.randn(N, 1, H, W), torch.randn(N, 1, H, W)
    masks = torch.rand(N, 1, H, W) > 0.7
    maps[1], maps[2, 0, 0, 0], masks[4] = 0.5, torch.nan, False
    protocols = {
        "deletion": M.DeletionAUC(classifier),
        "insertion": M.InsertionAUC(classifier, protocol="rise"),
        "positive": M.PositivePerturbation(classifier),
        "negative": M.NegativePerturbation(classifier),
        "violation": M.FaithfulnessViolation(classifier, grid=4),
    }
    localization = {"pointing": M.PointingGame(), "energy": M.EnergyPointing(), "mask": M.SegmentationAgreement()}
    complexity = {"sparseness": M.Sparseness(), "compactness": M.Compactness()}
    sensitivity = M.ClassSensitivity()
    for i in samples:
        at = slice(i, i + 1)
        for metric in protocols.values():
            metric.update(images[at], maps[at])
        for metric in localization.values():
            metric.update(maps[at], masks[at])
        for metric in complexity.values():
            metric.update(maps[at])
        sensitivity.update(maps[at], others[at])
    values: dict[str, float] = {}
    for name, metric in (protocols | localization | complexity | {"classes": sensitivity}).items():
        result = metric.compute()
        for key, value in (result if isinstance(result, dict) else {"": result}).items():
            values[f"{name} {key}"] = float(value)
        with metric.sync_context():
            for state in ("count", "excluded", "constant"):
                values[f"{name} {state}"] = int(getattr(metric, state))
        if name == "insertion":
            values |= {f"curve {k}": float(v) for k, v in enumerate(metric.mean_curve()[1])}
    return values


def _process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    shares = {2: [[0, 1], list(range(2, N))], 4: [[0], [1, 2, 3], [], list(range(4, N))]}[world]
    values = compute_all(shares[rank])
    torch.save(values, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_processes_agree_with_one(world, tmp_path: Path):
    mp.spawn(_process, args=(world, str(tmp_path)), nprocs=world)
    expected = compute_all(list(range(N)))
    assert expected["deletion count"] == 8 and expected["pointing excluded"] == 2
    for rank in range(world):
        values = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert values == pytest.approx(expected, abs=1e-6)
