"""`aha explain` from files of every kind to pictures, by names, folders and patterns."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import aha
from aha.cli import main
from aha.cli.classes import class_names, find_class
from aha.cli.explain import _split
from aha.cli.files import find_pictures, output_paths

NAMES = ["tabby, tabby cat", "tiger cat", "crane", "crane", "espresso", "cup", "moon"]


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    torch.manual_seed(0)
    classifier = aha.FrozenClassifier.from_timm(
        "test_vit", pretrained=False, image_size=(64, 96), num_classes=7, class_names=NAMES
    )
    explainer = aha.AmortizedExplainer(classifier, width=8)
    torch.nn.init.normal_(explainer.head.output.weight)
    return explainer.save(tmp_path_factory.mktemp("artefact"), with_backbone=True)


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "cat.png"
    gradient = np.linspace(0, 255, 40 * 60 * 3).reshape(40, 60, 3).astype(np.uint8)
    Image.fromarray(gradient).save(path)
    return path


def run(*args) -> int:
    return main(["explain", *map(str, args)])


def test_one_picture_two_targets_and_raw_maps(artefact, picture, tmp_path, capsys):
    output = tmp_path / "out" / "cat.png"
    assert run(picture, "--explainer", artefact, "--target", "Tabby", "--target", "4", "--output", output, "--npy") == 0
    assert np.asarray(Image.open(output)).std() > 10
    maps = np.load(output.with_suffix(".npy"))
    assert maps.shape == (2, 64, 96) and maps.dtype == np.float32
    printed = capsys.readouterr().out
    assert printed.count("%") == 5 and "tiger cat (1)" in printed
    explainer = aha.load(artefact)
    pixels = torch.from_numpy(np.asarray(Image.open(picture).resize((96, 64), Image.Resampling.BICUBIC)).copy())
    expected = explainer.attribute(pixels.permute(2, 0, 1)[None], 4)[0, 0]
    assert torch.allclose(torch.from_numpy(maps[1]), expected, atol=1e-3)


def test_other_explainers_and_refinement_beside_it(artefact, picture, tmp_path):
    output = tmp_path / "cat.jpg"
    options = ["--compare", "random,input_gradient", "--refine", "1", "--npy", "--output", output]
    assert run(picture, "--explainer", artefact, *options) == 0
    names = sorted(path.name for path in tmp_path.glob("cat*.npy"))
    assert names == ["cat.aha_refined.npy", "cat.input_gradient.npy", "cat.npy", "cat.random.npy"]
    assert run(picture, "--explainer", artefact, "--compare", "cdma", "--output", output) == 1


def save_odd_pictures(folder):
    grey = Image.fromarray(np.tile(np.arange(60, dtype=np.uint8) * 4, (40, 1)))
    grey.save(folder / "grey.png")
    grey.convert("P").save(folder / "palette.gif")
    grey.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.tile(np.arange(60, dtype=np.uint16) * 1000, (40, 1))).save(folder / "deep.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    grey.convert("RGB").save(folder / "turned.jpg", exif=exif)
    grey.convert("LA").save(folder / "alpha.webp")


def test_a_folder_of_odd_pictures(artefact, tmp_path, capsys):
    folder = tmp_path / "in" / "deep"
    folder.mkdir(parents=True)
    save_odd_pictures(folder)
    (folder / "notes.txt").write_text("no picture")
    assert run(folder.parent, "--explainer", artefact, "--output", tmp_path / "out", "--batch-size", "4") == 0
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.png"))
    assert found == [f"deep/{name}.png" for name in ("alpha", "cmyk", "deep", "grey", "palette", "turned")]
    upright, turned = (Image.open(tmp_path / "out" / "deep" / f"{name}.png") for name in ("grey", "turned"))
    assert turned.height > upright.height  # a tall picture, as it looks in a viewer


def test_several_pictures_in_one_file(artefact, picture, tmp_path, capsys, monkeypatch):
    tall = tmp_path / "tall.png"
    Image.open(picture).rotate(90, expand=True).save(tall)
    output = tmp_path / "out" / "both.png"
    options = ["--explainer", artefact, "--compare", "random", "--target", "0", "--target", "4", "--output", output]
    assert run(picture, tall, *options) == 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["both.png"]
    assert run(picture, *options[:-1], tmp_path / "one.png") == 0
    assert Image.open(output).height > 1.4 * Image.open(tmp_path / "one.png").height  # four rows, not two
    assert "4 rows → " in capsys.readouterr().out
    monkeypatch.setattr("aha.cli.explain.LONGEST_SIDE", 300)  # more rows than the format can hold: a coarser picture
    assert run(picture, tall, *options) == 0 and max(Image.open(output).size) <= 300
    assert run(picture, tall, *options[:-1], tall) == 1  # never over a picture
    assert run(picture, tall, *options, "--npy") == 1
    assert "is one of the pictures itself" in (error := capsys.readouterr().err) and "name a folder" in error


def test_an_unreadable_file_is_named_and_the_rest_is_done(artefact, picture, tmp_path, capsys):
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8 not a picture")
    assert run(tmp_path / "*.*g", "--explainer", artefact, "--output", tmp_path / "out") == 1
    assert (tmp_path / "out" / "cat.png").exists()
    assert "1 of 2 files could not be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.jpg"], "There is no picture 'missing.jpg'"),
        (["{picture}", "--target", "taby"], "Nearest: tabby (0)"),
        (["{picture}", "--target", "crane"], "names 2 classes (2: crane; 3: crane)"),
        (["{picture}", "--target", "7"], "the classes are 0…6"),
        (["{picture}", "--output", "{picture}"], "is the picture itself"),
    ],
)
def test_mistakes_get_one_clear_line(artefact, picture, args, message, capsys):
    assert run(*[arg.replace("{picture}", str(picture)) for arg in args], "--explainer", artefact) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_names():
    assert find_class("TABBY CAT", NAMES) == find_class("tabby", NAMES) == find_class("tabby, tabby cat", NAMES) == 0
    assert find_class("6", NAMES) == 6
    imagenet = aha.FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=32)
    assert find_class("tabby", class_names(imagenet)) == 281


def test_outputs_never_collide(tmp_path):
    for name in ("a.jpg", "a.png", "b/a.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    pictures = find_pictures([str(tmp_path), str(tmp_path / "a.jpg")])
    assert len(pictures) == 3
    paths = output_paths(pictures, str(tmp_path))  # into the pictures' own folder
    assert len(set(paths)) == 3 and not {path.resolve() for path in paths} & {file for file, _ in pictures}
    with pytest.raises(ValueError, match="name a folder"):
        output_paths(pictures, "one.png")


def test_splitting_of_specs():
    assert _split("cdam, rise(num_masks=8, seed=1),") == ["cdam", "rise(num_masks=8, seed=1)"]


def test_export_command(artefact, tmp_path, capsys):
    output = tmp_path / "e.pt2"
    command = ["export", "--explainer", str(artefact), "--format", "pt2", "--output", str(output), "--with-backbone"]
    assert main(command) == 0
    assert "test_vit at 64×96" in capsys.readouterr().out
    assert json.loads((tmp_path / "e.pt2.parity.json").read_text())["largest_difference"] <= 1e-6
    assert main(["export", "--explainer", str(tmp_path / "none"), "--output", str(output)]) == 1
    assert "There is no explainer at" in capsys.readouterr().err
