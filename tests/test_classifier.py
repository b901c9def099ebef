"""FrozenClassifier over families of backbones, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
import shutil

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from aha.classifier import FrozenClassifier
from aha.loading import resolve_path
from tests.conftest import SmallCNN, SmallTransformer, tiny

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}
HIERARCHY = ((16, 24), (8, 12), (4, 6), (2, 3))
# id: name, size, model options, prefix tokens, grids, whether logit = mean of evidence + bias
FAMILIES = {
    "vit-cls": ("test_vit", (64, 96), {}, 1, ((4, 6),) * 4, False),
    "vit-registers": ("test_vit", (96, 64), {"reg_tokens": 3}, 4, ((6, 4),) * 4, False),
    "vit-distilled": ("deit_tiny_distilled_patch16_224", (64, 96), SMALL, 2, ((4, 6),) * 2, False),
    "vit-no-prefix": ("test_vit", (64, 96), {"class_token": False, "global_pool": "avg"}, 0, ((4, 6),) * 4, False),
    "vit-linear-avg": (
        "test_vit",
        (64, 96),
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        0,
        ((4, 6),) * 4,
        True,
    ),
    "vit-avg": ("test_vit", (64, 96), {"global_pool": "avg"}, 1, ((4, 6),) * 4, False),
    "vit-map": ("test_vit", (64, 96), {"class_token": False, "global_pool": "map"}, 0, ((4, 6),) * 4, False),
    "eva02": ("eva02_tiny_patch14_224", (56, 84), SMALL, 1, ((4, 6),) * 2, False),
    "dinov3": ("vit_small_patch16_dinov3", (64, 96), SMALL, 5, ((4, 6),) * 2, False),
    "beit": ("beit_base_patch16_224", (64, 96), SMALL, 1, ((4, 6),) * 2, False),
    "swin": (
        "swin_tiny_patch4_window7_224",
        (64, 96),
        {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)},
        0,
        HIERARCHY,
        True,
    ),
    "pvt_v2": ("pvt_v2_b0", (64, 96), {"depths": (1, 1, 1, 1)}, 0, HIERARCHY, True),
    "convnext": ("test_convnext", (64, 96), {}, 0, HIERARCHY, False),
    "mambaout": ("test_mambaout", (64, 96), {}, 0, HIERARCHY, False),
    "efficientnet": ("test_efficientnet", (64, 96), {}, 0, HIERARCHY, True),
    "resnet": ("test_resnet", (64, 96), {}, 0, HIERARCHY, True),
    "mobilenetv3": ("mobilenetv3_small_050", (64, 96), {}, 0, HIERARCHY, False),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request):
    name, size, options, *rest = FAMILIES[request.param]
    return request.param, tiny(name, size, num_classes=6, **options), size, *rest


def test_logits_are_timms_and_one_pass_gives_them_too(family):
    _, classifier, size, *_ = family
    images = torch.rand(2, 3, *size)
    mean, std = (torch.tensor(classifier.model.pretrained_cfg[k]).view(1, 3, 1, 1) for k in ("mean", "std"))
    with torch.no_grad():
        expected = classifier.model((images - mean) / std)
        torch.testing.assert_close(classifier(images), expected)
        torch.testing.assert_close(classifier.forward_features(images).logits, expected)
    assert classifier.num_classes == expected.shape[1] == 6


def test_geometry(family):
    _, classifier, size, prefix, grids, _ = family
    output = classifier.forward_features(torch.rand(2, 3, *size))
    assert classifier.num_prefix_tokens == prefix
    assert classifier.image_size == size
    assert classifier.feature_grids == tuple(tuple(f.shape[-2:]) for f in output.features) == grids
    assert classifier.feature_channels == tuple(f.shape[1] for f in output.features)
    assert output.final.shape[-2:] == grids[-1]
    maps = classifier.evidence(output.final, torch.tensor([1, 2]))
    assert maps.shape == (2, 1, *grids[-1])


@pytest.mark.parametrize("corner", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_changed_corner_changes_that_corner_of_the_features(family, corner):
    _, classifier, (height, width), _, _, _ = family
    images = torch.rand(1, 3, height, width)
    changed = images.clone()
    part = (
        (slice(0, height // 4), slice(-height // 4, None))[corner[0]],
        (slice(0, width // 4), slice(-width // 4, None))[corner[1]],
    )
    changed[..., part[0], part[1]] = 1 - changed[..., part[0], part[1]]
    with torch.no_grad():
        before, after = classifier.forward_features(images), classifier.forward_features(changed)
    for a, b in zip(before.features[:2], after.features[:2], strict=True):
        moved = (a - b).abs().sum(1)[0]
        row, column = divmod(int(moved.argmax()), moved.shape[1])
        assert (row >= moved.shape[0] // 2, column >= moved.shape[1] // 2) == tuple(map(bool, corner))


def test_final_map_has_the_orientation_of_the_tokens(family):
    key, classifier, size, prefix, grids, _ = family
    images = torch.rand(1, 3, *size)
    with torch.no_grad():
        raw = classifier.model.forward_features(classifier.normalize(images))
        final = classifier.forward_features(images).final
    height, width = grids[-1]
    for row, column in ((0, 0), (0, width - 1), (height - 1, 0), (1, 1)):
        if raw.ndim == 3:
            expected = raw[0, prefix + row * width + column]
        else:
            expected = raw[0, row, column] if key in ("swin", "mambaout") else raw[0, :, row, column]
        torch.testing.assert_close(final[0, :, row, column], expected)


def test_class_vectors_are_weight_rows(family):
    key, classifier, *_ = family
    layer = classifier.model.get_classifier()
    if key == "vit-distilled":
        expected = (layer[0].weight + layer[1].weight) / 2
    else:
        expected = layer.weight.flatten(1)
    targets = torch.tensor([4, 0, 4])
    torch.testing.assert_close(classifier.class_vectors(targets), expected[targets])


def test_evidence_by_hand(family):
    key, classifier, size, _, _, _ = family
    model = classifier.model
    targets = torch.tensor([3, 5])
    with torch.no_grad():
        final = classifier.forward_features(torch.rand(2, 3, *size)).final
        maps = classifier.evidence(final, targets)
        tokens = final.permute(0, 2, 3, 1)
        if key in ("vit-no-prefix", "vit-avg", "beit", "eva02"):
            tokens = model.fc_norm(tokens)
        elif key == "vit-map":
            shape = tokens.shape
            tokens = torch.stack([model.attn_pool(t[None, None])[0] for t in tokens.reshape(-1, shape[-1])]).view(shape)
        elif key == "convnext":
            tokens = model.head.norm(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        elif key in ("mambaout", "mobilenetv3", "dinov3"):
            return  # heads of their own: covered by the exact relation below, or by the shape
        vectors = classifier.class_weight[targets]
        expected = torch.stack([t @ v for t, v in zip(tokens, vectors, strict=True)])
    torch.testing.assert_close(maps[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_mean_evidence_and_bias_make_the_logit(family):
    _, classifier, size, _, _, exact = family
    if not exact:
        return
    classifier = copy.deepcopy(classifier).to(torch.float64)
    targets = torch.tensor([3, 5])
    with torch.no_grad():
        output = classifier.forward_features(torch.rand(2, 3, *size, dtype=torch.float64))
        maps = classifier.evidence(output.final, targets)
    logits = maps.mean((1, 2, 3)) + classifier.model.get_classifier().bias[targets]
    torch.testing.assert_close(logits, output.logits.gather(1, targets[:, None])[:, 0], rtol=1e-10, atol=1e-10)


def test_frozen_and_always_in_eval(family):
    _, classifier, *_ = family
    parent = nn.Sequential(classifier)
    parent.train()
    assert not any(module.training for module in classifier.modules())
    assert not any(p.requires_grad for p in classifier.parameters())
    assert all(key.startswith("model.") for key in classifier.state_dict())


def test_gradients_reach_the_image_and_leave_nothing_behind(vit):
    images = torch.rand(2, 3, 64, 96, requires_grad=True)
    vit(images)[:, 0].sum().backward()
    assert images.grad.abs().sum() > 0
    assert all(p.grad is None for p in vit.parameters())


def test_a_nine_by_six_grid_of_a_dynamic_model():
    classifier = tiny("test_vit", (144, 96), num_classes=4, dynamic_img_size=True)
    assert classifier.forward_features(torch.rand(1, 3, 64, 32)).final.shape[-2:] == (4, 2)
    padded = tiny("test_vit", (100, 70), num_classes=4, dynamic_img_size=True, dynamic_img_pad=True)
    assert padded.feature_grids[-1] == (7, 5)


# --- numbers -------------------------------------------------------------------------------------------------------


def test_links(vit):
    logits = torch.tensor([[0.0, 1.0, -2.0]])
    torch.testing.assert_close(vit.probabilities(logits), logits.softmax(-1))
    sigmoid = tiny("test_vit", (64, 64), num_classes=1, link="sigmoid")
    torch.testing.assert_close(sigmoid.probabilities(logits), logits.sigmoid())
    one = sigmoid(torch.rand(2, 3, 64, 64))
    assert one.shape == (2, 1)
    assert sigmoid.resolve_targets(None, one).tolist() == [0, 0]
    torch.testing.assert_close(sigmoid.target_probability(one, torch.tensor([0, 0])), one[:, 0].sigmoid())
    with pytest.raises(ValueError, match="sigmoid"):
        tiny("test_vit", (64, 64), num_classes=1)
    with pytest.raises(ValueError, match="link must be"):
        FrozenClassifier.from_timm("test_vit", pretrained=False, link="relu")


def test_probabilities_are_float32_under_autocast_and_float64_in_float64(vit):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = vit(torch.rand(1, 3, 64, 96))
        assert logits.dtype == torch.bfloat16
        assert vit.probabilities(logits).dtype == torch.float32
    assert vit.probabilities(logits.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moves_to_other_precisions(vit, dtype):
    other = copy.deepcopy(vit).to(dtype)
    assert other.mean.dtype == other.std.dtype == dtype
    images = torch.rand(1, 3, 64, 96)
    for pictures in (images, images.double(), images.to(dtype)):
        logits = other(pictures)
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.float(), vit(images), rtol=0.1, atol=0.1)
    assert other.evidence(other.forward_features(images).final, torch.tensor([0])).dtype == dtype


def test_float64_images_of_a_float32_classifier(vit):
    images = torch.rand(1, 3, 64, 96)
    torch.testing.assert_close(vit(images.double()), vit(images))


def test_a_users_float64_module():
    classifier = FrozenClassifier(SmallCNN().double(), mean=[0.5] * 3, std=[0.5] * 3, image_size=16)
    assert classifier(torch.rand(1, 3, 16, 16)).dtype == torch.float64


# --- targets -------------------------------------------------------------------------------------------------------


def test_targets(vit):
    logits = torch.randn(3, 7)
    predicted = logits.argmax(-1).tolist()
    cases = [
        (None, predicted),
        (2, [2, 2, 2]),
        ([0, 6, 3], [0, 6, 3]),
        ((1, 1, 1), [1, 1, 1]),
        (torch.tensor(4), [4, 4, 4]),
        (torch.tensor([1, 2, 3], dtype=torch.int32), [1, 2, 3]),
        (torch.tensor([1, 2, 3], dtype=torch.uint8), [1, 2, 3]),
        (torch.tensor([1, 2, 3]).numpy(), [1, 2, 3]),
    ]
    for given, expected in cases:
        resolved = vit.resolve_targets(given, logits)
        assert resolved.dtype == torch.int64
        assert resolved.tolist() == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "0…6"),
        (-1, "target -1"),
        ([0, 1, 7], "target 7"),
        ([0, 1], "3"),
        (torch.zeros(3, 1, dtype=torch.long), "shape"),
        (1.0, "integers"),
        (torch.zeros(3), "integers"),
        (True, "integers"),
        ("tabby", "integers"),
        ([[0, 1], [2]], "integers"),
    ],
)
def test_refused_targets(vit, given, message):
    with pytest.raises(ValueError, match=message):
        vit.resolve_targets(given, torch.randn(3, 7))


# --- identity, copies, configuration -------------------------------------------------------------------------------


def test_fingerprint_follows_the_weights():
    first = tiny("test_resnet", (32, 32), num_classes=3)
    second = tiny("test_resnet", (32, 32), num_classes=3)
    assert first.fingerprint() == second.fingerprint() == copy.deepcopy(first).fingerprint()
    before = second.fingerprint()
    with torch.no_grad():
        second.model.fc.weight[0, 0].add_(1e-3)
    changed = second.fingerprint()
    assert changed != before
    second.model.bn1.running_mean.add_(1)
    assert second.fingerprint() not in (before, changed)
    second.load_state_dict(first.state_dict())
    assert second.fingerprint() == before


def test_copies_pickles_and_compiles(vit):
    images = torch.rand(2, 3, 64, 96)
    expected = vit(images)
    keys = list(vit.state_dict())
    for twin in (copy.deepcopy(vit), pickle.loads(pickle.dumps(vit))):
        torch.testing.assert_close(twin(images), expected, rtol=0, atol=0)
        assert list(twin.state_dict()) == keys
        assert twin.config() == vit.config()
    compiled = copy.deepcopy(vit)
    compiled.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), expected)
    assert list(compiled.state_dict()) == keys


def test_features_trace_without_graph_breaks(vit):
    images = torch.rand(2, 3, 64, 96)
    compiled = torch.compile(vit.forward_features, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images).final, vit.forward_features(images).final)


def test_config_round_trip(tmp_path):
    classifier = tiny("test_vit", (64, 96), num_classes=3, class_names=["a", "b", "c"], reg_tokens=1)
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(classifier.model.state_dict(), path)
    config = json.loads(json.dumps(classifier.config()))
    rebuilt = FrozenClassifier.from_config(config, checkpoint_path=path)
    assert rebuilt.fingerprint() == classifier.fingerprint()
    assert rebuilt.image_size == (64, 96)
    assert rebuilt.class_names == ["a", "b", "c"]
    assert rebuilt.num_prefix_tokens == 2
    again = FrozenClassifier.from_config(json.loads(json.dumps(rebuilt.config())))
    images = torch.rand(1, 3, 64, 96)
    torch.testing.assert_close(again(images), classifier(images), rtol=0, atol=0)
    weights = classifier.model.state_dict()
    weights["head.weight"] = weights["head.weight"] + 1
    safetensors.torch.save_file(weights, path)
    with pytest.raises(ValueError, match="differ from those.*checkpoint_path"):
        FrozenClassifier.from_config(config, checkpoint_path=path)
    with pytest.raises(ValueError, match="not built by"):
        FrozenClassifier(SmallCNN(), mean=[0.5] * 3, std=[0.5] * 3, image_size=16).config()


# --- a user's own model --------------------------------------------------------------------------------------------


def test_own_timm_model_stays_as_it_was():
    model = timm.create_model("test_efficientnet", num_classes=4).train()
    before = copy.deepcopy(model.state_dict())
    classifier = FrozenClassifier(model, image_size=(64, 96))
    classifier(torch.rand(2, 3, 64, 96))
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    shared = FrozenClassifier(model, image_size=64, copy_model=False)
    assert shared.model is model


def test_own_cnn():
    model = SmallCNN().train()
    classifier = FrozenClassifier(
        model, mean=[0.4] * 3, std=[0.2] * 3, image_size=(24, 40), feature_layers=["stem", "body"], class_layer="fc"
    )
    images = torch.rand(2, 3, 24, 40)
    output = classifier.forward_features(images)
    assert classifier.feature_grids == ((6, 10), (3, 5))
    torch.testing.assert_close(output.logits, model.eval()((images - 0.4) / 0.2))
    targets = torch.tensor([0, 4])
    evidence = classifier.evidence(output.final, targets)
    logits = evidence.mean((1, 2, 3)) + model.fc.bias[targets]
    torch.testing.assert_close(logits, output.logits[[0, 1], targets])
    assert not any(m._forward_hooks for m in classifier.modules())


def test_own_transformer():
    classifier = FrozenClassifier(
        SmallTransformer(),
        mean=[0.4] * 3,
        std=[0.2] * 3,
        image_size=(24, 40),
        feature_layers=["block"],
        class_layer="fc",
        num_prefix_tokens=1,
    )
    assert classifier.feature_grids == ((3, 5),)
    images = torch.rand(1, 3, 24, 40)
    kept = []
    handle = classifier.model.block.register_forward_hook(lambda _m, _i, out: kept.append(out))
    output = classifier.forward_features(images)
    handle.remove()
    torch.testing.assert_close(output.final[0, :, 2, 1], kept[0][0, 1 + 2 * 5 + 1])
    expected = output.final[0].permute(1, 2, 0) @ classifier.model.fc.weight[3]
    torch.testing.assert_close(classifier.evidence(output.final, torch.tensor([3]))[0, 0], expected)


def test_refused_modules():
    options = {"mean": [0.5] * 3, "std": [0.5] * 3, "image_size": 24}
    with pytest.raises(ValueError, match="mean="):
        FrozenClassifier(SmallCNN())
    with pytest.raises(ValueError, match="num_prefix_tokens"):
        FrozenClassifier(SmallTransformer(), feature_layers=["block"], **options)
    with pytest.raises(ValueError, match="not reached"):
        model = SmallCNN()
        model.unused = nn.Linear(1, 1)
        FrozenClassifier(model, feature_layers=["unused"], **options)
    with pytest.raises(ValueError, match="no linear classifier"):
        _ = FrozenClassifier(SmallCNN(), feature_layers=["body"], **options).class_weight
    with pytest.raises(ValueError, match="last of feature_layers"):
        wrong = FrozenClassifier(SmallCNN(), feature_layers=["stem"], class_layer="fc", **options)
        wrong.evidence(wrong.forward_features(torch.rand(1, 3, 24, 24)).final, torch.tensor([0]))
    with pytest.raises(ValueError, match="logits"):
        FrozenClassifier(nn.Conv2d(3, 4, 3), **options)
    with pytest.raises(ValueError, match="dict.*wrap"):

        class ReturnsDict(SmallCNN):
            def forward(self, x):
                return {"logits": super().forward(x)}

        FrozenClassifier(ReturnsDict(), **options)
    with pytest.raises(ValueError, match="class names"):
        FrozenClassifier(SmallCNN(), class_names=["a"], **options)
    with pytest.raises(ValueError, match="RGB"):
        FrozenClassifier(SmallCNN(), mean=[0.5], std=[0.5], image_size=24)
    with pytest.raises(ValueError, match="1 channels"):
        FrozenClassifier.from_timm("test_resnet", pretrained=False, in_chans=1)
    with pytest.raises(ValueError, match="no single tensor but list"):
        FrozenClassifier(timm.create_model("crossvit_tiny_240"))
    with pytest.raises(ValueError, match="don't tile"):
        FrozenClassifier(timm.create_model("pit_ti_224"))


# --- names, sizes, sources -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5O", "Nearest: .*resnet50"),
        ("vit_tiny_patch16_224.nonsense", "tag 'nonsense'.*augreg_in21k_ft_in1k"),
        ("facebook/resnet50", "hf-hub:facebook/resnet50"),
        ("", "no model"),
        ("nosuch:thing", "nosuch"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ValueError, match=message):
        FrozenClassifier.from_timm(name, pretrained=False)


def test_unknown_option_and_headless_backbone():
    with pytest.raises(ValueError, match="can't build test_vit.*no_such_option"):
        FrozenClassifier.from_timm("test_vit", pretrained=False, no_such_option=3)
    with pytest.raises(ValueError, match="test_vit is a headless backbone"):
        FrozenClassifier.from_timm("test_vit", pretrained=False, num_classes=0)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("test_vit", (100, 96)),
        ("test_vit", 8),
        ("swin_tiny_patch4_window7_224", (64, 66)),
        ("test_convnext", 8),
        ("test_vit", (64, 64, 3)),
        ("test_vit", 0),
        ("test_vit", 64.5),
    ],
)
def test_impossible_sizes(name, size):
    with pytest.raises(ValueError, match="can't take images of|image_size must be"):
        FrozenClassifier.from_timm(name, pretrained=False, image_size=size)


def test_one_side_and_the_models_own_size():
    assert FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=48).image_size == (48, 48)
    assert FrozenClassifier.from_timm("timm/test_vit", pretrained=False).image_size == (160, 160)
    assert FrozenClassifier.from_timm("test_vit", pretrained=False, img_size=(32, 48)).image_size == (32, 48)


class HttpError(Exception):
    """As the hub's HTTP client raises: no OSError."""


HttpError.__module__ = "httpx._exceptions"


@pytest.mark.parametrize("error", [OSError("no route"), ConnectionError("refused"), HttpError("unreachable")])
def test_unreachable_hub(monkeypatch, error):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr("timm.create_model", fail)
    with pytest.raises(ConnectionError, match="checkpoint_path"):
        FrozenClassifier.from_timm("test_vit")
    monkeypatch.undo()
    error = LocalEntryNotFoundError("not cached")
    monkeypatch.setattr("timm.models._factory.load_model_config_from_hf", fail)
    with pytest.raises(ConnectionError, match="hf-hub:someone/something.*checkpoint_path"):
        FrozenClassifier.from_timm("hf-hub:someone/something", pretrained=False)


def test_a_local_folder_as_the_hub_stores_it(tmp_path):
    source = tiny("test_vit", (64, 96), num_classes=5)
    timm.models.save_for_hf(source.model, tmp_path, safe_serialization=True)
    loaded = FrozenClassifier.from_timm(f"local-dir:{tmp_path}")
    assert loaded.image_size == (64, 96)
    images = torch.rand(1, 3, 64, 96)
    torch.testing.assert_close(loaded(images), source(images))
    assert FrozenClassifier.from_timm(f"local-dir:{tmp_path}", image_size=48).feature_grids[-1] == (3, 3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of weights of one test_vit (3 classes, 64×64) in several formats."""
    folder = tmp_path_factory.mktemp("weights")
    state = tiny("test_vit", (64, 64), num_classes=3).model.state_dict()
    safetensors.torch.save_file(state, folder / "good.safetensors")
    torch.save(state, folder / "good.pth")
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, folder / "nested.pth")
    whole = (folder / "good.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "truncated.pth").write_bytes((folder / "good.pth").read_bytes()[:5000])
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "text.pth").write_text("not weights")
    (folder / "folder.pth").mkdir()
    safetensors.torch.save_file({k: v for k, v in state.items() if k != "head.bias"}, folder / "missing.safetensors")
    safetensors.torch.save_file(tiny("test_resnet", (64, 64)).model.state_dict(), folder / "resnet.safetensors")
    return folder


def load(path, **options):
    return FrozenClassifier.from_timm(
        "test_vit", checkpoint_path=path, **{"image_size": 64, "num_classes": 3, **options}
    )


@pytest.mark.parametrize("file", ["good.safetensors", "good.pth", "nested.pth"])
def test_local_weights(weights, file):
    expected = tiny("test_vit", (64, 64), num_classes=3)
    assert load(str(weights / file)).fingerprint() == expected.fingerprint()


def test_local_weights_of_another_size_are_resampled(weights):
    classifier = load(weights / "good.safetensors", image_size=(96, 48))
    assert classifier.feature_grids[-1] == (6, 3)
    assert classifier.model.pos_embed.shape[1] == 6 * 3 + 1


@pytest.mark.parametrize(
    "file",
    [
        "truncated.safetensors",
        "truncated.pth",
        "empty.safetensors",
        "text.pth",
        "missing.safetensors",
        "resnet.safetensors",
    ],
)
def test_weights_that_do_not_fit(weights, file):
    with pytest.raises(ValueError, match=f"{file} don't fit test_vit"):
        load(weights / file)


def test_wrong_number_of_classes_and_missing_files(weights):
    with pytest.raises(ValueError, match="head.weight"):
        load(weights / "good.safetensors", num_classes=4)
    for path in ("nowhere.pth", "folder.pth"):
        with pytest.raises(FileNotFoundError, match=path):
            load(weights / path)


def test_package_paths(weights, tmp_path, monkeypatch):
    package = tmp_path / "weightpackage"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(weights / "good.safetensors", package / "inner" / "w.safetensors")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_path("package:weightpackage/inner/w.safetensors") == package / "inner" / "w.safetensors"
    assert load("package:weightpackage/inner/w.safetensors").num_classes == 3
    for missing in ("package:weightpackage/w.safetensors", "package:no_such_package/w", "package:weightpackage"):
        with pytest.raises(FileNotFoundError, match=missing):
            resolve_path(missing)


def test_weights_of_another_library_are_matched_by_order(tmp_path):
    model = timm.create_model("test_efficientnet", num_classes=3).eval()
    state = model.state_dict()
    torch.save({f"theirs.{i}": value for i, value in enumerate(state.values())}, tmp_path / "theirs.pth")
    safetensors.torch.save_file(
        state, tmp_path / "sorted.safetensors"
    )  # the format sorts its tensors: here names must decide
    images = torch.rand(2, 3, 160, 160)
    for file in ("theirs.pth", "sorted.safetensors"):
        options = {"checkpoint_path": tmp_path / file, "weights_by_order": True, "num_classes": 3}
        classifier = FrozenClassifier.from_timm("test_efficientnet", **options)
        torch.testing.assert_close(classifier(images), model(classifier.normalize(images)))
        assert classifier.config()["weights_by_order"] is True
        assert FrozenClassifier.from_config(classifier.config()).fingerprint() == classifier.fingerprint()
    with pytest.raises(ValueError, match="don't fit"):
        FrozenClassifier.from_timm("test_efficientnet", checkpoint_path=tmp_path / "theirs.pth", num_classes=3)


def test_weights_by_order_must_agree_in_number_and_shape(tmp_path):
    state = timm.create_model("test_efficientnet", num_classes=3).state_dict()
    values = list(state.values())
    for kept, complaint in ((values[:-1], "can't be matched by order"), (values[::-1], "would become")):
        torch.save({str(i): value for i, value in enumerate(kept)}, tmp_path / "bad.pth")
        with pytest.raises(ValueError, match=complaint):
            FrozenClassifier.from_timm(
                "test_efficientnet", checkpoint_path=tmp_path / "bad.pth", weights_by_order=True, num_classes=3
            )


class Exploit:
    """A pickle that would create a file when loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickles_are_refused(tmp_path):
    torch.save({"state_dict": Exploit(tmp_path / "owned")}, tmp_path / "bad.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Exploit(tmp_path / "owned")))
    for file in ("bad.pth", "plain.pth"):
        with pytest.raises(ValueError, match="don't fit"):
            load(tmp_path / file)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_mambaout"])
def test_exports_with_any_batch(name):
    class Both(nn.Module):
        def __init__(self, classifier):
            super().__init__()
            self.classifier = classifier

        def forward(self, images):
            output = self.classifier.forward_features(images)
            return output.logits, self.classifier.evidence(output.final, output.logits.argmax(-1))

    module = Both(tiny(name, (64, 96), num_classes=4))
    state = {k: v for k, v in vars(module.classifier).items() if isinstance(v, str | int | tuple)}
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (torch.rand(2, 3, 64, 96),), dynamic_shapes=({0: batch},))
    images = torch.rand(3, 3, 64, 96)
    for exported, eager in zip(program.module()(images), module(images), strict=True):
        torch.testing.assert_close(exported, eager)
    assert state == {k: v for k, v in vars(module.classifier).items() if isinstance(v, str | int | tuple)}
