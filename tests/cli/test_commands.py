"""The `aha` command finds its commands, imports only the one it runs, and works where lightning isn't installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aha.cli import COMMANDS, main

REPO = Path(__file__).parents[2]
WITHOUT_LIGHTNING = """
import sys
for name in ("lightning", "lightning_fabric", "pytorch_lightning", "webdataset", "onnx", "onnxruntime"):
    sys.modules[name] = None  # any import of them fails
import importlib, pkgutil
import aha
import torch
floors = ["classifier", "head", "explainer", "objective", "refinement", "pictures", "interop", "cli", "cli.explain",
          "cli.export", "cli.classes", "data.pictures", "data.demo"]
floors = ["aha." + name for name in floors]
for package in ("aha.softsort", "aha.perturbation", "aha.baselines", "aha.metrics", "aha.export"):
    module = importlib.import_module(package)
    floors += [info.name for info in pkgutil.walk_packages(module.__path__, package + ".")]
for floor in floors:
    importlib.import_module(floor)
explainer = aha.AmortizedExplainer(aha.FrozenClassifier.from_timm("test_vit", pretrained=False, image_size=32), width=8)
assert explainer.attribute(torch.rand(1, 3, 32, 32)).shape == (1, 1, 32, 32)
print(len(floors))
"""


def test_everything_below_training_works_without_lightning():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIGHTNING], capture_output=True, text=True, cwd=REPO, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_help_lists_every_command(capsys):
    assert main([]) == main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS)


def test_an_unknown_command(capsys):
    assert main(["explian"]) == 2
    assert "Did you mean 'explain'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "export", "shards"])
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"aha {command}" in capsys.readouterr().out


def test_the_thin_script():
    done = subprocess.run(
        [sys.executable, "export.py", "--explainer", "/nowhere", "--output", "x"],
        capture_output=True,
        text=True,
        cwd=REPO,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("aha export: There is no explainer at '/nowhere'")
