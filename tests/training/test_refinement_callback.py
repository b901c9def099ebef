"""The refinement callback in test and predict: which samples, what it counts, what it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning import Trainer

from aha.data.demo_datamodule import DemoDataModule
from aha.refinement import RefineOptions, refine, self_check
from aha.training.refinement import TestTimeRefinement
from tests.training.test_training import make_data, make_module, make_trainer

OPTIONS = RefineOptions(steps=2, grids=[4], references=["mean"], num_fractions=2, step_size=0.05)

pytestmark = [pytest.mark.filterwarnings("ignore:.*LeafSpec.*"), pytest.mark.filterwarnings("ignore:.*many workers.*")]


def trained_like():
    module = make_module()
    torch.nn.init.normal_(module.head.output.weight)
    return module


def trainer_with(folder, callback, **changes) -> Trainer:
    return make_trainer(folder, callbacks=[callback], **changes)


class PredictData(DemoDataModule):
    def predict_dataloader(self):
        return self._eval(self.test_dataloader()[0].dataset.dataset)


def predictions(folder, module, callback, **changes) -> dict[str, torch.Tensor]:
    data = PredictData(test_length=4, eval_batch_size=4)
    (batch,) = trainer_with(folder, callback, **changes).predict(module, data)
    return batch


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("mode", ["map", "head"])
def test_predict_gives_the_refined_maps(mode: str, inference_mode: bool, tmp_path) -> None:
    module = trained_like()
    options = RefineOptions(**{**OPTIONS.__dict__, "mode": mode})
    before = copy.deepcopy(module.state_dict())
    got = predictions(tmp_path, module, TestTimeRefinement(options), inference_mode=inference_mode)
    images = PredictData(test_length=4).test_dataloader()[0].dataset.dataset.batch(range(4))["image"]
    expected = refine(module.explainer, images, options=options)
    torch.testing.assert_close(got["maps"], expected.maps, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert module.refiner is None  # gone with the run


def test_selection_by_share_threshold_and_keys(tmp_path) -> None:
    module = trained_like()
    batch = PredictData(test_length=4).test_dataloader()[0].dataset.dataset.batch(range(4))
    maps, logits, targets = module.explainer.explain(batch["image"])
    images = batch["image"].float() / 255
    objective = self_check(module.classifier, images, maps, targets, OPTIONS)
    hardest = int(objective.argmax())
    hard_csv = tmp_path / "hard.csv"
    hard_csv.write_text(f"rank,key\n1,{batch['key'][2]}\n")
    middle = float(objective.sort().values[1:3].mean())
    for callback, chosen in (
        (TestTimeRefinement(OPTIONS, "worst", value=0.25), [hardest]),
        (TestTimeRefinement(OPTIONS, "threshold", value=middle), objective.topk(2).indices.sort().values.tolist()),
        (TestTimeRefinement(OPTIONS, "keys", keys=str(hard_csv)), [2]),
    ):
        assert (
            callback.choose(module.explainer, images, maps, targets, batch["key"]).nonzero().flatten().tolist()
            == chosen
        )
        refined = callback(module.explainer, images, maps, targets, batch["key"])
        untouched = [i for i in range(4) if i not in chosen]
        assert torch.equal(refined[untouched], maps[untouched])
        means = callback.tally.means()
        assert means["refined"] == len(chosen) / 4
        assert means["gain"] >= 0
        assert means["forwards_per_sample"] == 2 * 2 * 3


def test_test_stands_refined_beside_unrefined(tmp_path) -> None:
    module = trained_like()
    trainer = trainer_with(tmp_path, TestTimeRefinement(OPTIONS))
    trainer.test(module, make_data(), verbose=False)
    assert {"aha/insertion", "aha refined/insertion"} <= set(module.test_means)
    assert float(trainer.callback_metrics["refinement/refined"]) == 1.0
    assert float(trainer.callback_metrics["refinement/gain"]) >= 0
    assert "refinement/failed" in trainer.callback_metrics


def test_mixed_precision(tmp_path) -> None:
    got = predictions(tmp_path, trained_like(), TestTimeRefinement(OPTIONS), precision="bf16-mixed")
    assert got["maps"].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"select": "worst"}, "select='worst' needs value"),
        ({"select": "worst", "value": 1.5}, "must be a share in .*got 1.5"),
        ({"select": "threshold"}, "needs value"),
        ({"select": "keys"}, "needs keys"),
    ],
)
def test_a_selection_that_lacks_something_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TestTimeRefinement(OPTIONS, **arguments)


def test_key_files_that_are_none(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        TestTimeRefinement(OPTIONS, "keys", keys=str(tmp_path / "no.csv"))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'key'"):
        TestTimeRefinement(OPTIONS, "keys", keys=str(tmp_path / "other.csv"))


def test_refining_a_quarter_costs_a_quarter(tmp_path) -> None:
    module = trained_like()
    batch = PredictData(test_length=4).test_dataloader()[0].dataset.dataset.batch(range(4))
    images = batch["image"].float() / 255
    maps, _, targets = module.explainer.explain(batch["image"])
    (tmp_path / "hard.csv").write_text(f"key\n{batch['key'][1]}\n")
    spent = {}
    for name, callback in (
        ("all", TestTimeRefinement(OPTIONS)),
        ("one", TestTimeRefinement(OPTIONS, "keys", keys=str(tmp_path / "hard.csv"))),
    ):
        seen = []
        handle = module.classifier.model.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(len(out)))
        try:
            callback(module.explainer, images, maps, targets, batch["key"])
        finally:
            handle.remove()
        spent[name] = sum(seen)
    assert spent["one"] * 4 == spent["all"]
