"""Protocols against slow versions written as their sources define them, and what must hold for all of them."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from torchvision.transforms.functional import gaussian_blur

from aha.classifier import FrozenClassifier
from aha.evaluation.protocols import PROTOCOLS, Protocol, count_forwards, get_protocol, run_protocol
from aha.perturbation import make_reference

NAMES = list(PROTOCOLS)
HEIGHT, WIDTH = 32, 48
PIXELS = HEIGHT * WIDTH


@pytest.fixture(scope="module")
def classifier() -> FrozenClassifier:
    torch.manual_seed(0)
    classifier = FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=(HEIGHT, WIDTH), num_classes=6)
    with torch.no_grad():  # spread the predictions of an untrained model
        classifier.model.head.weight.mul_(25)
    return classifier


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(3, 3, HEIGHT, WIDTH, generator=generator)
    images *= torch.rand(3, 3, 1, 1, generator=generator)
    maps = torch.stack([torch.randperm(PIXELS, generator=generator) for _ in range(3)]).view(3, 1, HEIGHT, WIDTH)
    return images, maps / PIXELS - 0.3, torch.tensor([1, 4, 0])


class Slow:
    """One image at a time in float64: what the sources do, as they do it."""

    def __init__(self, classifier: FrozenClassifier) -> None:
        self.model = copy.deepcopy(classifier).double()

    def logits(self, image: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.from_numpy(image)[None])[0].numpy()

    def probability(self, image: np.ndarray, target: int) -> float:
        logits = self.logits(image)
        exponentials = np.exp(logits - logits.max())
        return exponentials[target] / exponentials.sum()

    def curve(self, start: np.ndarray, finish: np.ndarray, order: np.ndarray, counts: list[int], target: int):
        scores = []
        for count in counts:
            picture = start.copy().reshape(3, -1)
            for pixel in order[:count]:
                picture[:, pixel] = finish.reshape(3, -1)[:, pixel]
            scores.append(self.probability(picture.reshape(start.shape), target))
        return np.array(scores)

    def aha(self, image, ranking, label):
        target = self.logits(image).argmax()
        mean = np.broadcast_to(np.array([0.485, 0.456, 0.406]).reshape(3, 1, 1), image.shape)
        fractions = [k / 20 for k in range(21)]
        counts = [round(p * PIXELS) for p in fractions]
        order = np.argsort(-ranking, kind="stable")
        deletion = self.curve(image, mean, order, counts, target)
        # Delete the least important first, then read backwards.
        insertion = self.curve(image, mean, order[::-1], [PIXELS - c for c in reversed(counts)], target)[::-1]
        area = [sum((a + b) / 2 * 0.05 for a, b in zip(c[:-1], c[1:], strict=True)) for c in (deletion, insertion)]
        return {"deletion": area[0], "insertion": area[1], "insertion_minus_deletion": area[1] - area[0]}

    def rise(self, image, ranking, label):
        impulse = np.zeros((11, 11))
        impulse[5, 5] = 1
        kernel = gaussian_filter(impulse, 5)
        mean, std = (getattr(self.model, name).numpy().reshape(3, 1, 1) for name in ("mean", "std"))
        normal = (image - mean) / std
        padded = np.pad(normal, ((0, 0), (5, 5), (5, 5)))
        blurred = np.zeros_like(normal)
        for dy in range(11):
            for dx in range(11):
                blurred += kernel[dy, dx] * padded[:, dy : dy + HEIGHT, dx : dx + WIDTH]
        target = self.logits(image).argmax()
        order = np.flip(np.argsort(ranking))
        steps = (PIXELS + 223) // 224
        area = []
        for start, finish in ((normal, np.zeros_like(normal)), (blurred, normal)):
            current, scores = start.copy().reshape(3, -1), []
            for i in range(steps + 1):
                scores.append(self.probability(current.reshape(image.shape) * std + mean, target))
                coordinates = order[224 * i : 224 * (i + 1)]
                current[:, coordinates] = finish.reshape(3, -1)[:, coordinates]
            scores = np.array(scores)
            area.append((scores.sum() - scores[0] / 2 - scores[-1] / 2) / (len(scores) - 1))
        return {"deletion": area[0], "insertion": area[1], "insertion_minus_deletion": area[1] - area[0]}

    def tis(self, image, ranking, label):
        target = self.logits(image).argmax()
        blurred = gaussian_blur(torch.from_numpy(image), [11, 11], [5, 5]).numpy()
        order = np.argsort(-ranking, kind="stable")
        each = math.ceil(PIXELS / 224)
        counts = [each * (step + 1) for step in range(224)]
        deletion = self.curve(image, blurred, order, counts, target).mean()
        insertion = self.curve(blurred, image, order, counts, target).mean()
        return {"deletion": deletion, "insertion": insertion, "insertion_minus_deletion": insertion - deletion}

    def perturbation(self, image, ranking, label):
        result = {}
        for name, sign in (("positive_perturbation", 1), ("negative_perturbation", -1)):
            order = np.argsort(-sign * ranking, kind="stable")
            accuracy = [float(self.logits(image).argmax() == label)]
            for step in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
                picture = image.copy().reshape(3, -1)
                picture[:, order[: int(PIXELS * step)]] = 0
                accuracy.append(float(self.logits(picture.reshape(image.shape)).argmax() == label))
            result[name] = np.trapezoid(accuracy, np.arange(10) / 10)
        return result


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_source(name, classifier, data):
    images, maps, labels = data
    result = run_protocol(name, classifier, images, maps, labels=labels, chunk_size=50)
    slow = Slow(classifier)
    for i in range(len(images)):
        expected = getattr(slow, name)(images[i].double().numpy(), maps[i].double().numpy().ravel(), int(labels[i]))
        assert set(expected) == set(result.metrics)
        for metric, value in expected.items():
            assert abs(float(result.metrics[metric][i]) - value) < 1e-6, metric


def test_the_accuracy_protocol_sees_hits_and_misses(classifier, data):
    images, maps, labels = data
    curves = run_protocol("perturbation", classifier, images, maps).curves
    assert 0 < float(curves["positive_perturbation"].mean()) < 1
    assert (curves["positive_perturbation"][:, 0] == 1).all()  # without labels the predicted class is scored


@pytest.mark.parametrize("name", NAMES)
def test_no_image_is_classified_twice(name, classifier, data):
    images, maps, labels = data
    seen, cache = [], {}
    handle = classifier.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].flatten(1).clone()))
    try:
        first = run_protocol(name, classifier, images, maps, labels=labels, chunk_size=16, constant_logits=cache)
        count = sum(map(len, seen))
        second = run_protocol(name, classifier, images[:1], maps[:1], chunk_size=64, constant_logits=cache)
    finally:
        handle.remove()
    constant = {"aha": 1, "rise": 1, "tis": 0, "perturbation": 0}[name]
    per_sample = count_forwards(name, (HEIGHT, WIDTH), clean=True)
    assert per_sample == {"aha": 39, "rise": 14, "tis": 440, "perturbation": 19}[name]
    assert first.forwards == count == 3 * per_sample + constant
    assert second.forwards == sum(map(len, seen)) - count == per_sample
    pictures = torch.cat(seen[: len(seen) - 1])[:count]
    assert len(pictures.unique(dim=0)) == len(pictures)
    assert max(len(batch) for batch in seen[:-1]) <= 64


@pytest.mark.parametrize("name", NAMES)
def test_counts_at_full_size(name):
    _, counts = get_protocol(name).points(224 * 224)
    assert len(counts) == {"aha": 21, "rise": 225, "tis": 224, "perturbation": 10}[name]
    assert counts[0] == (224 if name == "tis" else 0)
    assert counts[-1] == (45158 if name == "perturbation" else 224 * 224)


def test_reference_images_follow_the_sources(classifier, data):
    images, mean, std = data[0], classifier.mean, classifier.std
    impulse = np.zeros((11, 11))
    impulse[5, 5] = 1
    kernel = torch.zeros(3, 3, 11, 11)
    for channel in range(3):
        kernel[channel, channel] = torch.from_numpy(gaussian_filter(impulse, 5))
    expected = torch.nn.functional.conv2d((images - mean) / std, kernel, padding=5) * std + mean
    torch.testing.assert_close(make_reference(images, "rise_blur", data_mean=mean), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        make_reference(images, "tis_blur"), gaussian_blur(images, [11, 11], [5, 5]), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("name", ["aha", "rise", "tis"])
def test_constant_score_gives_its_probability(name, classifier, data):
    images, maps, _ = data
    constant = copy.deepcopy(classifier)
    with torch.no_grad():
        constant.model.head.weight.zero_()
        constant.model.head.bias.copy_(torch.tensor([0.7, 0.1, 0.1, 0.05, 0.03, 0.02]).log())
    result = run_protocol(name, constant, images, maps)
    for metric in ("deletion", "insertion"):
        assert (result.metrics[metric] - 0.7).abs().max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_batch_chunk_and_increasing_transforms_change_nothing(name, classifier, data):
    images, maps, labels = data
    if name == "tis":
        name = get_protocol("tis", steps=20)
    reference = run_protocol(name, classifier, images, maps, labels=labels)
    others = [
        run_protocol(name, classifier, images, maps, labels=labels, chunk_size=7),
        run_protocol(name, classifier, images, maps * 40 - 3, labels=labels, chunk_size=1000),
        run_protocol(name, classifier, images, (4 * maps).exp().double(), labels=labels),
        run_protocol(name, classifier, images, maps, reference.targets, clean_logits=classifier(images), labels=labels),
    ]
    singles = [
        run_protocol(name, classifier, images[i : i + 1], maps[i : i + 1], labels=labels[i : i + 1]) for i in range(3)
    ]
    for metric, values in reference.metrics.items():
        for other in others:
            assert (other.metrics[metric] - values).abs().max() < 1e-6
        assert (torch.cat([single.metrics[metric] for single in singles]) - values).abs().max() < 1e-6


def test_curves_share_ends_and_reverse_into_each_other(classifier, data):
    images, maps, _ = data
    forth, back = (run_protocol("aha", classifier, images, sign * maps).curves for sign in (1, -1))
    assert torch.equal(forth["deletion"][:, 0], forth["insertion"][:, -1])
    assert torch.equal(forth["deletion"][:, -1], forth["insertion"][:, 0])
    torch.testing.assert_close(forth["insertion"], back["deletion"].flip(1), atol=1e-6, rtol=0)
    negative = run_protocol("perturbation", classifier, images, maps).curves["negative_perturbation"]
    positive = run_protocol("perturbation", classifier, images, -maps).curves["positive_perturbation"]
    assert torch.equal(negative, positive)


def test_ties_break_in_row_major_order(classifier, data):
    images, maps, _ = data
    coarse = (maps * 4).round()
    ramp = torch.linspace(0, 1e-3, PIXELS, dtype=torch.float64).view(1, 1, HEIGHT, WIDTH)
    tied, broken = (
        run_protocol("aha", classifier, images, coarse),
        run_protocol("aha", classifier, images, coarse - ramp),
    )
    assert torch.equal(tied.metrics["deletion"], broken.metrics["deletion"])
    flat = run_protocol("aha", classifier, images, torch.zeros_like(maps))
    assert flat.constant.all() and not tied.constant.any()
    assert flat.metrics["deletion"].isfinite().all()


def test_broken_samples_are_excluded_and_nothing_else_changes(classifier, data):
    images, maps, labels = data
    maps = maps.clone()
    maps[1, 0, 3, 3] = torch.nan
    reference = run_protocol("aha", classifier, images[[0, 2]], maps[[0, 2]])
    result = run_protocol("aha", classifier, images, maps)
    for metric, values in result.metrics.items():
        assert values.isnan().tolist() == [False, True, False]
        assert (values[[0, 2]] - reference.metrics[metric]).abs().max() < 1e-6
    unknown = run_protocol("perturbation", classifier, images, data[1], labels=torch.tensor([-1, 2, 3]))
    assert unknown.metrics["positive_perturbation"].isnan().tolist() == [True, False, False]
    nothing = run_protocol("aha", classifier, images, torch.full_like(maps, torch.nan))
    assert nothing.metrics["deletion"].isnan().all()
    empty = run_protocol("rise", classifier, images[:0], maps[:0])
    assert empty.metrics["insertion"].shape == (0,)


def test_half_precision_maps_and_uint8_images(classifier, data):
    images, maps, _ = data
    bytes_ = (images * 255).round().to(torch.uint8)
    a = run_protocol("aha", classifier, bytes_, maps.half())
    b = run_protocol("aha", classifier, bytes_.float() / 255, maps.half().float())
    assert torch.equal(a.metrics["deletion"], b.metrics["deletion"])


def test_sigmoid_link_and_targets(data):
    torch.manual_seed(0)
    classifier = FrozenClassifier.from_timm(
        "test_vit", pretrained=False, image_size=(HEIGHT, WIDTH), num_classes=1, link="sigmoid"
    )
    images, maps, _ = data
    result = run_protocol("aha", classifier, images, maps, 0)
    assert (result.metrics["deletion"] < 1).all()
    with pytest.raises(ValueError, match="out of range"):
        run_protocol("aha", classifier, images, maps, 1)


def test_overrides_and_errors(classifier, data):
    images, maps, _ = data
    assert get_protocol("rise", fractions=(0, 0.5, 1)).pixels_per_step is None
    assert get_protocol(get_protocol("aha", deletion_reference="black")).deletion_reference == "black"
    assert get_protocol("tis").describe(224 * 224)["points"] == 224
    assert get_protocol("rise").metrics == {"deletion": False, "insertion": True, "insertion_minus_deletion": True}
    with pytest.raises(ValueError, match="Nearest: rise"):
        get_protocol("risee")
    with pytest.raises(ValueError, match="Nearest: fractions"):
        get_protocol("aha", fraction=3)
    with pytest.raises(ValueError, match="exactly one"):
        Protocol("mine")
    with pytest.raises(ValueError, match="must be one of"):
        get_protocol("aha", deletion_reference="grey")
    with pytest.raises(ValueError, match="increasing shares"):
        get_protocol("aha", fractions=(0.5, 0.1))
    with pytest.raises(ValueError, match="at least 1"):
        get_protocol("tis", steps=0)
    with pytest.raises(ValueError, match="maps must be"):
        run_protocol("aha", classifier, images, maps[..., :-1])
