"""Hard curves against a loop over images and points."""

from __future__ import annotations

import pytest
import torch

from aha.perturbation import auc, deletion_insertion_curves, fractions_to_counts, make_reference, pixel_ranks

SIZE = (24, 36)
PIXELS = SIZE[0] * SIZE[1]
COUNTS = fractions_to_counts(torch.linspace(0, 1, 6), PIXELS)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(3, 3, *SIZE, generator=generator, dtype=torch.float64)
    return images, torch.randn(3, 1, *SIZE, generator=generator)


@pytest.fixture
def seen(small_cnn):
    """Every image that goes through the classifier, by its bytes; and the size of each batch."""
    pictures, sizes = [], []

    def note(_module, inputs):
        sizes.append(len(inputs[0]))
        pictures.extend(picture.numpy().tobytes() for picture in inputs[0])

    handle = small_cnn.model.register_forward_pre_hook(note)
    yield pictures, sizes
    handle.remove()


def slow_curves(classifier, images, maps, targets, counts, deletion_reference, insertion_reference):
    deletion, insertion = [], []
    for image, one, target in zip(images, maps, targets.tolist(), strict=True):
        rank = pixel_ranks(one[None])[0].view(image.shape[1:])
        ends = [
            make_reference(image[None], kind, data_mean=classifier.mean)[0]
            for kind in (deletion_reference, insertion_reference)
        ]
        rows = [], []
        for count in counts:
            deleted, inserted = image.clone(), ends[1].clone()
            deleted[:, rank < count] = ends[0][:, rank < count]
            inserted[:, rank < count] = image[:, rank < count]
            for row, picture in zip(rows, (deleted, inserted), strict=True):
                row.append(classifier(picture[None]).softmax(-1)[0, target].item())
        deletion.append(rows[0])
        insertion.append(rows[1])
    return torch.tensor(deletion), torch.tensor(insertion)


@pytest.mark.parametrize(
    "references", [("mean", "mean"), ("black", "blur"), ("data_mean", "rise_blur"), ("blur", "blur")]
)
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_by_loop_whatever_the_chunk(small_cnn, batch, references, chunk_size):
    images, maps = batch
    targets = torch.tensor([0, 4, 2])
    curves = deletion_insertion_curves(
        small_cnn,
        images,
        maps,
        targets,
        counts=COUNTS,
        deletion_reference=references[0],
        insertion_reference=references[1],
        chunk_size=chunk_size,
    )
    deletion, insertion = slow_curves(small_cnn, images, maps, targets, COUNTS, *references)
    torch.testing.assert_close(curves.deletion.float(), deletion)
    torch.testing.assert_close(curves.insertion.float(), insertion)
    torch.testing.assert_close(curves.fractions, torch.tensor(COUNTS) / PIXELS)
    assert torch.equal(curves.targets, targets)


def test_more_pixels_than_sixteen_bits_hold(small_cnn):
    images, maps, targets = torch.rand(2, 3, 182, 190), torch.randn(2, 1, 182, 190), torch.tensor([1, 2])
    counts = [1, 32766, 32767, 32768, 34000, 182 * 190 - 1]
    curves = deletion_insertion_curves(small_cnn, images, maps, targets, counts=counts, chunk_size=4)
    deletion, insertion = slow_curves(small_cnn, images, maps, targets, counts, "mean", "mean")
    torch.testing.assert_close(curves.deletion, deletion)
    torch.testing.assert_close(curves.insertion, insertion)


@pytest.mark.parametrize("references", [("mean", "mean"), ("black", "mean"), ("blur", "blur"), ("black", "blur")])
def test_no_image_is_classified_twice(small_cnn, batch, seen, references):
    images, maps = batch
    pictures, sizes = seen
    curves = deletion_insertion_curves(
        small_cnn, images, maps, counts=COUNTS, deletion_reference=references[0], insertion_reference=references[1],
        chunk_size=8,
    )  # fmt: skip
    assert len(pictures) == len(set(pictures)) == curves.forwards
    ends = sum(1 if kind != "blur" else 3 for kind in set(references))
    assert len(pictures) == 3 + ends + 3 * 2 * 4
    assert max(sizes) <= 8 and min(sizes) > 0


def test_known_logits_and_repeated_counts_cost_nothing(small_cnn, batch, seen):
    images, maps = batch
    logits = small_cnn(images)
    seen[0].clear()
    deletion_insertion_curves(small_cnn, images, maps, counts=[0, 5, 5, PIXELS], clean_logits=logits)
    assert len(seen[0]) == len(set(seen[0])) == 1 + 3 * 2
    constants = {}
    for _ in range(2):
        seen[0].clear()
        deletion_insertion_curves(
            small_cnn, images, maps, counts=[0, PIXELS], clean_logits=logits, constant_logits=constants
        )
    assert seen[0] == []


def test_end_points_are_shared_and_default_targets_predicted(small_cnn, batch):
    images, maps = batch
    curves = deletion_insertion_curves(small_cnn, images, maps, counts=COUNTS)
    logits = small_cnn(images)
    assert torch.equal(curves.targets, logits.argmax(-1))
    clean = small_cnn.target_probability(logits, curves.targets).to(curves.deletion.dtype)
    torch.testing.assert_close(curves.deletion[:, 0], clean)
    torch.testing.assert_close(curves.insertion[:, -1], clean)
    torch.testing.assert_close(curves.deletion[:, -1], curves.insertion[:, 0])


def test_deletion_reversed_is_insertion_of_the_opposite_map(small_cnn, batch):
    images, _ = batch
    maps = torch.stack([torch.randperm(PIXELS).view(1, *SIZE) for _ in range(3)]).float()
    curves = deletion_insertion_curves(small_cnn, images, maps, counts=COUNTS, deletion_reference="blur", insertion_reference="blur")  # fmt: skip  # noqa: E501
    opposite = deletion_insertion_curves(small_cnn, images, -maps, counts=[PIXELS - c for c in COUNTS[::-1]], deletion_reference="blur", insertion_reference="blur")  # fmt: skip  # noqa: E501
    torch.testing.assert_close(curves.deletion.flip(1), opposite.insertion)
    torch.testing.assert_close(curves.insertion.flip(1), opposite.deletion)


def test_one_by_one_and_monotone_transforms_change_nothing(small_cnn, batch):
    images, maps = batch
    whole = deletion_insertion_curves(small_cnn, images, maps, counts=COUNTS)
    for i in range(3):
        alone = deletion_insertion_curves(small_cnn, images[i : i + 1], maps[i : i + 1] * 3 + 1, counts=COUNTS)
        torch.testing.assert_close(alone.deletion[0], whole.deletion[i])
        torch.testing.assert_close(alone.insertion[0], whole.insertion[i])


def test_accuracy_scores(small_cnn, batch):
    images, maps = batch
    curves = deletion_insertion_curves(small_cnn, images, maps, counts=COUNTS, score="accuracy")
    assert set(curves.deletion.unique().tolist()) <= {0.0, 1.0}
    assert (curves.deletion[:, 0] == 1).all()


def test_a_good_map_beats_its_opposite(small_cnn, batch):
    """Pixels in the order in which they raise the probability, by input gradient."""
    images, _ = batch
    x = images.clone().requires_grad_()
    targets = small_cnn(images).argmax(-1)
    small_cnn(x).gather(1, targets[:, None]).sum().backward()
    maps = (x.grad * (images - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))).sum(1, keepdim=True)
    good, bad = (deletion_insertion_curves(small_cnn, images, m, counts=COUNTS) for m in (maps, -maps))
    assert (auc(good.deletion, good.fractions) < auc(bad.deletion, bad.fractions)).all()
    assert (auc(good.insertion, good.fractions) > auc(bad.insertion, bad.fractions)).all()


@pytest.mark.parametrize("counts", [[3, 9], [0], [PIXELS], [0, PIXELS], []])
def test_any_set_of_points(small_cnn, batch, seen, counts):
    curves = deletion_insertion_curves(small_cnn, *batch, torch.tensor([1, 1, 1]), counts=counts)
    assert curves.deletion.shape == curves.insertion.shape == (3, len(counts))
    assert len(seen[0]) == len(set(seen[0]))
    assert 0 not in seen[1]


def test_maps_of_another_shape(small_cnn, batch):
    images, maps = batch
    for wrong in (maps[:, :, ::2, ::2], maps.expand(-1, 3, -1, -1), maps[:2], maps.transpose(2, 3)):
        with pytest.raises(ValueError, match="maps must be"):
            deletion_insertion_curves(small_cnn, images, wrong, counts=COUNTS)
