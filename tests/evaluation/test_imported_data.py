"""Any map-style data set, by ``module:callable(options)``."""

from __future__ import annotations

import pytest
import torch

from aha.data.demo import DEMO_CLASSIFIERS, load_demo_classifier
from aha.evaluation.data import open_data
from aha.evaluation.evaluate import ClassifierOptions, EvaluateOptions, evaluate
from aha.evaluation.imported_data import names_callable, open_imported

HERE = "tests.evaluation.test_imported_data"


class Squares(torch.utils.data.Dataset):
    def __init__(self, *, length: int = 3, kind: str = "uint8", split: str = "none") -> None:
        self.length, self.kind, self.split = length, kind, split

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict:
        image = torch.full((3, 8, 12), i, dtype=torch.uint8)
        return {"image": {"uint8": image, "float": image / 255, "none": "a picture"}[self.kind]}


def test_samples_come_in_order_with_the_split_and_the_options() -> None:
    samples = open_imported(f"{HERE}:Squares(length=2)", split="val", size=(8, 12))
    assert samples.count == 2 and not samples.labelled
    read = [(key, load()["image"].unique().tolist()) for key, load in samples.read()]
    assert read == [("Squares-val-000000", [0]), ("Squares-val-000001", [1])]


def test_the_embedded_demo_by_its_class(tmp_path) -> None:
    name, kwargs = DEMO_CLASSIFIERS["vit"]
    weights = "package:aha/data/demo_weights/vit.safetensors"
    classifier = ClassifierOptions(name=name, checkpoint_path=weights, image_size=64, model_kwargs=kwargs)
    shared = {"explainers": "input_gradient", "protocols": "aha", "classifier": classifier, "limit": 4, "report": False}
    found = [
        evaluate(EvaluateOptions(output=str(tmp_path / name), data=data, **shared))
        for name, data in (("a", "demo"), ("b", "aha.data.demo:DemoDataset(digits=1)"))
    ]
    values = [[row["value"] for row in result["rows"] if row["metric"] == "insertion"] for result in found]
    assert values[0] and values[0] == values[1]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (f"{HERE}:Squares(kind='float')", ValueError, "float32: they must be uint8"),
        (f"{HERE}:Squares(kind='none')", ValueError, "str: they must be uint8"),
        (f"{HERE}:Squares(colour=1)", ValueError, "is no data set"),
        (f"{HERE}:Circles", ImportError, "can't be imported"),
        ("nowhere.at.all:Squares", ImportError, "can't be imported"),
    ],
)
def test_what_is_no_data_set_is_said(data: str, error: type[Exception], message: str) -> None:
    assert names_callable(data)
    with pytest.raises(error, match=message):
        open_imported(data, split="test", size=(8, 12))
    with pytest.raises(ValueError, match="the classifier takes"):
        open_imported(f"{HERE}:Squares", split="test", size=(8, 8))


def test_no_data_is_said() -> None:
    with pytest.raises(ValueError, match="name demo, a folder"):
        open_data(None, load_demo_classifier("vit"))
    assert not names_callable("demo") and not names_callable("pipe:cat x.tar")
