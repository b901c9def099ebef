"""A tiny classifier in a file, so that every process and every run explains the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aha.evaluation.evaluate import ClassifierOptions, EvaluateOptions
from tests.conftest import tiny


@pytest.fixture(scope="session")
def classifier_options(tmp_path_factory: pytest.TempPathFactory) -> ClassifierOptions:
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    save_file(tiny("test_vit", (64, 64), num_classes=10).model.state_dict(), path)
    return ClassifierOptions("test_vit", checkpoint_path=str(path), image_size=64, model_kwargs={"num_classes": 10})


@pytest.fixture
def options(classifier_options: ClassifierOptions, tmp_path: Path):
    """Builds options for a short run on the demo's pictures."""

    def build(**changes) -> EvaluateOptions:
        settings = {
            "explainers": "centre_prior,random,object_mask",
            "output": str(tmp_path / "out"),
            "protocols": "aha(fractions=[0,0.5,1])",
            "classifier": classifier_options,
            "limit": 6,
            "batch_size": 2,
            "device": "cpu",
            "report": False,
        }
        return EvaluateOptions(**settings | changes)

    return build


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with two class folders of noise."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for name in ("cat/a", "cat/b", "dog/c", "dog/d", "dog/e"):
        path = tmp_path / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(torch.randint(256, (48, 40, 3), generator=generator).byte().numpy()).save(path)
    return tmp_path / "pictures"
