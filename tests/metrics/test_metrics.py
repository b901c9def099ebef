"""Every metric against a slow version per sample, and what must hold for all: exclusion, pickling, half precision."""

from __future__ import annotations

import doctest
import importlib
import math
import pickle
import pkgutil

import matplotlib
import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from skimage.metrics import structural_similarity as slow_ssim
from sklearn.metrics import average_precision_score
from torchmetrics.functional.classification import binary_average_precision

import aha.metrics
from aha import metrics as M
from aha.classifier import FrozenClassifier
from aha.evaluation.protocols import run_protocol
from aha.metrics.segmentation import average_precision
from aha.perturbation import make_reference

matplotlib.use("Agg")
H, W = 32, 48


@pytest.fixture(scope="module")
def classifier() -> FrozenClassifier:
    torch.manual_seed(0)
    classifier = FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=(H, W), num_classes=6)
    with torch.no_grad():
        classifier.model.head.weight.mul_(25)
    return classifier


def batch(seed: int = 0, n: int = 7) -> dict[str, torch.Tensor]:
    """Images, maps (the second constant, the third with a NaN, the fourth zero) and masks (the fifth empty)."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(n, 1, H, W, generator=generator)
    masks = torch.zeros(n, 1, H, W, dtype=torch.bool)
    for i in range(n):
        top, left = (int(torch.randint(0, side // 2, (), generator=generator)) for side in (H, W))
        masks[i, 0, top : top + H // 2, left : left + W // 2] = True
    maps += masks
    if n > 4:
        maps[1], maps[2, 0, 5, 5], maps[3], masks[4] = 0.5, torch.nan, 0.0, False
    images = torch.rand(n, 3, H, W, generator=generator) * torch.rand(n, 3, 1, 1, generator=generator)
    return {"image": images, "map": maps, "mask": masks, "label": torch.arange(n) % 6}


def slow_pointing(a: np.ndarray, m: np.ndarray, tolerance: float) -> float:
    if not np.isfinite(a).all() or not m.any():
        return math.nan
    if a.min() == a.max():
        return 0.0
    y, x = np.unravel_index(a.argmax(), a.shape)
    return float(any(math.hypot(y - i, x - j) <= tolerance for i, j in zip(*m.nonzero(), strict=True)))


def slow_energy(a: np.ndarray, m: np.ndarray) -> float:
    total = inside = 0.0
    for value, is_object in zip(a.ravel(), m.ravel(), strict=True):
        total += max(value, 0)
        inside += max(value, 0) * is_object
    return inside / total if m.any() and total > 0 and np.isfinite(a).all() else math.nan


def slow_gini(a: np.ndarray) -> float:
    values = np.abs(a.ravel())
    if not np.isfinite(values).all() or values.sum() == 0:
        return math.nan
    # Half the mean absolute difference over the mean: the definition, not the sorted formula.
    return float(np.abs(values[:, None] - values[None]).mean() / (2 * values.mean()))


def slow_compactness(a: np.ndarray) -> float:
    values = np.abs(a.ravel())
    return float((values < 0.05 * values.max()).mean()) if np.isfinite(values).all() and values.max() > 0 else math.nan


def slow_segmentation(a: np.ndarray, m: np.ndarray) -> dict[str, float]:
    """The released code of arXiv 2012.09838, for one image."""
    scaled = (a - a.min()) / (a.max() - a.min()) if a.max() > a.min() else np.zeros_like(a)
    marked = scaled > scaled.mean()
    iou = []
    for predicted, truth in ((~marked, ~m), (marked, m)):
        iou.append((predicted & truth).sum() / (predicted | truth).sum())
    precision = average_precision_score(np.stack([~m, m]).ravel(), np.stack([1 - scaled, scaled]).ravel())
    return {"pixel_accuracy": (marked == m).mean(), "image_mean_iou": np.mean(iou), "average_precision": precision}


def close(values: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(
        values.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0, equal_nan=True
    )


def arrays(data: dict[str, torch.Tensor]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(a[0].double().numpy(), m[0].numpy()) for a, m in zip(data["map"], data["mask"], strict=True)]


def test_map_metrics_equal_slow_versions():
    data = batch()
    pairs = arrays(data)
    close(M.pointing_game(data["map"], data["mask"]), [slow_pointing(a, m, 0) for a, m in pairs])
    close(M.pointing_game(data["map"], data["mask"], tolerance=5), [slow_pointing(a, m, 5) for a, m in pairs])
    close(M.energy_pointing(data["map"], data["mask"]), [slow_energy(a, m) for a, m in pairs])
    close(M.sparseness(data["map"]), [slow_gini(a) for a, _ in pairs])
    close(M.compactness(data["map"]), [slow_compactness(a) for a, _ in pairs])
    assert M.pointing_game(data["map"], data["mask"]).isnan().tolist() == [i in (2, 4) for i in range(7)]
    assert M.sparseness(data["map"]).isnan().tolist() == [i in (2, 3) for i in range(7)]


def test_segmentation_equals_the_source():
    data = batch()
    scores = M.segmentation_agreement(data["map"], data["mask"])
    for i, (a, m) in enumerate(arrays(data)):
        expected = slow_segmentation(a, m) if i not in (2, 4) else dict.fromkeys(scores._fields[:3], math.nan)
        for name, value in expected.items():
            close(getattr(scores, name)[i], value)
    metric = M.SegmentationAgreement()
    metric.update(data["map"], data["mask"])
    result = metric.compute()
    close(result["mean_iou"], float(M.pooled_mean_iou(scores.intersection, scores.union)))
    close(result["pixel_accuracy"], float(scores.pixel_accuracy.nanmean()))
    close(result["average_precision"], float(scores.average_precision.nanmean()))
    assert (int(metric.count), int(metric.excluded), int(metric.constant)) == (5, 2, 2)


def test_average_precision_of_many_rows_equals_torchmetrics_row_by_row():
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(6, 60, generator=generator) * 12).round().double()  # many ties
    scores[0] = 1.0
    truth = torch.rand(6, 60, generator=generator) < torch.tensor([0.5, 0.02, 0.98, 0.3, 0.5, 0.5])[:, None]
    truth[:5, 0], truth[5] = True, False
    expected = [float(binary_average_precision(s, t.long())) for s, t in zip(scores[:5], truth[:5], strict=True)]
    close(average_precision(scores, truth), [*expected, math.nan])


def test_similarity_equals_scipy_and_skimage():
    a, b = batch(1, 3)["map"], batch(2, 3)["map"] + batch(1, 3)["map"]
    tied = (a * 2).round()
    close(M.rank_correlation(a, b), [spearmanr(x.ravel(), y.ravel()).statistic for x, y in zip(a, b, strict=True)])
    close(
        M.rank_correlation(tied, b), [spearmanr(x.ravel(), y.ravel()).statistic for x, y in zip(tied, b, strict=True)]
    )
    unit = [[(x - x.min()) / (x.max() - x.min()) for x in maps[:, 0].double().numpy()] for maps in (a, b)]
    values = M.structural_similarity(a, b)
    options = {"data_range": 1.0, "gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "full": True}
    for x, y, value in zip(*unit, values, strict=True):
        _, image = slow_ssim(*(np.pad(maps, 5, mode="reflect") for maps in (x, y)), **options)
        assert abs(float(value) - image[5:-5, 5:-5].mean()) < 1e-6
    close(M.structural_similarity(a, a), [1.0] * 3)
    assert M.rank_correlation(a, torch.zeros_like(a)).isnan().all()


@pytest.mark.parametrize("grid", [4, 5])
def test_faithfulness_violation_equals_a_loop(classifier, grid):
    data = batch(n=24)
    data["map"][4] = -data["map"][4].abs() - 1
    expected = []
    reference = make_reference(data["image"], "mean")
    with torch.no_grad():
        targets = classifier(data["image"]).argmax(-1)
        for image, map_, fill, target in zip(data["image"], data["map"], reference, targets, strict=True):
            if not map_.isfinite().all() or (map_ == 0).all():
                expected.append(math.nan)
                continue
            weights = torch.nn.functional.adaptive_avg_pool2d(map_, grid).flatten()
            strongest = int(weights.abs().argmax())
            hidden = image.clone()
            for y in range(H):
                for x in range(W):
                    if (y * grid // H) * grid + x * grid // W == strongest:
                        hidden[:, y, x] = fill[:, y, x]
            pair = classifier(torch.stack([image, hidden])).softmax(-1)[:, target]
            expected.append(float(weights[strongest].sign() * (pair[0] - pair[1]) < 0))
    values = M.faithfulness_violation(classifier, data["image"], data["map"], grid=grid, chunk_size=5)
    close(values, expected)
    assert {0.0, 1.0} <= set(expected)
    metric = M.FaithfulnessViolation(classifier, grid=grid)
    metric.update(data["image"], data["map"])
    close(metric.compute(), float(np.nanmean(expected)))


@pytest.mark.parametrize(
    ("kind", "name", "protocol"),
    [
        (M.DeletionAUC, "deletion", "aha"),
        (M.InsertionAUC, "insertion", "rise"),
        (M.PositivePerturbation, "positive_perturbation", "perturbation"),
        (M.NegativePerturbation, "negative_perturbation", "perturbation"),
    ],
)
def test_curve_metrics(classifier, kind, name, protocol):
    data = batch()
    metric = kind(classifier, protocol=protocol)
    inputs = {"targets": None, "labels": data["label"]}
    metric.update(data["image"][:3], data["map"][:3], **{k: v if v is None else v[:3] for k, v in inputs.items()})
    metric.update(data["image"][3:], data["map"][3:], **{k: v if v is None else v[3:] for k, v in inputs.items()})
    result = run_protocol(protocol, classifier, data["image"], data["map"], labels=data["label"])
    shared = kind(classifier, protocol=protocol)
    shared.update(result)
    close(metric.compute(), float(result.metrics[name].nanmean()))
    assert metric.compute() == pytest.approx(float(shared.compute()), abs=1e-7)  # another batch rounds otherwise
    assert (int(metric.count), int(metric.excluded), int(metric.constant)) == (6, 1, 2)
    fractions, curve = metric.mean_curve()
    close(curve, result.curves[name].nanmean(0).tolist())
    assert fractions.tolist() == result.fractions.tolist()
    if "perturbation" in name:
        function = getattr(M, name)
        values = function(classifier, data["image"], data["map"], labels=data["label"])
    else:
        values = getattr(M, f"{name}_auc")(classifier, data["image"], data["map"], protocol=protocol)
    torch.testing.assert_close(values, result.metrics[name], atol=1e-6, rtol=0, equal_nan=True)
    assert metric.higher_is_better == (kind in (M.InsertionAUC, M.NegativePerturbation))
    assert not metric.state_dict() and not list(metric.parameters())
    figure, axes = metric.plot()
    assert axes.get_lines() and figure is not None


def test_curve_metrics_refuse_what_does_not_fit(classifier):
    with pytest.raises(ValueError, match="not a metric of protocol 'perturbation'"):
        M.DeletionAUC(classifier, protocol="perturbation")
    with pytest.raises(ValueError, match="not insertion"):
        M.insertion_auc(classifier, torch.rand(1, 3, H, W), torch.rand(1, 1, H, W), protocol="perturbation")
    result = run_protocol("aha", classifier, torch.rand(1, 3, H, W), torch.rand(1, 1, H, W))
    with pytest.raises(ValueError, match="one metric per image size"):
        M.DeletionAUC(classifier, overrides={"fractions": (0, 1)}).update(result)


def map_metrics() -> list[tuple[torch.nn.Module, tuple[str, ...]]]:
    return [
        (M.PointingGame(tolerance=2), ("map", "mask")),
        (M.EnergyPointing(), ("map", "mask")),
        (M.SegmentationAgreement(), ("map", "mask")),
        (M.Sparseness(), ("map",)),
        (M.Compactness(threshold=0.1), ("map",)),
        (M.ClassSensitivity(), ("map", "other")),
    ]


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("index", range(6))
def test_pickled_half_precision_forward_and_plot(index):
    metric, keys = map_metrics()[index]
    data = batch()
    data["other"] = batch(3)["map"]
    metric = pickle.loads(pickle.dumps(metric))
    halves = [data[key].half() if data[key].is_floating_point() else data[key] for key in keys]
    step = metric(*halves)  # forward: this batch's value
    metric = pickle.loads(pickle.dumps(metric))
    whole = metric.compute()
    for a, b in zip(*((v if isinstance(v, dict) else {"": v}).values() for v in (step, whole)), strict=True):
        assert a == b and a.isfinite() and a.dtype == torch.float64
    fresh, _ = map_metrics()[index]
    fresh.update(*[h.float() if h.is_floating_point() else h for h in halves])
    assert str(fresh.compute()) == str(whole)
    assert metric.plot()[1] is not None
    metric.reset()
    value = metric.compute()
    assert all(v.isnan() for v in (value.values() if isinstance(value, dict) else [value]))


def test_wrong_shapes_name_the_remedy():
    with pytest.raises(ValueError, match="masks must have the shape of the maps"):
        M.pointing_game(torch.rand(1, 1, 4, 4), torch.ones(1, 1, 4, 5))
    with pytest.raises(ValueError, match="maps must be"):
        M.sparseness(torch.rand(4, 4))
    with pytest.raises(ValueError, match="one shape"):
        M.class_sensitivity(torch.rand(1, 1, 4, 4), torch.rand(1, 1, 4, 5))


@pytest.mark.parametrize("name", [info.name for info in pkgutil.iter_modules(aha.metrics.__path__)])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"aha.metrics.{name}"))
    assert result.failed == 0
