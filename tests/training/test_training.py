"""Training on tiny models: exact resuming, seeds, head-only checkpoints, bad steps, a classifier that never changes."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from aha.data.demo_datamodule import DemoDataModule
from aha.objective import AHAObjective
from aha.training.averaging import HeadAveraging
from aha.training.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint, read_checkpoint
from aha.training.module import ExplainerModule
from aha.training.options import ClassifierOptions, HeadOptions, TargetOptions, TemperatureOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*IterableDataset.*"),
    pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training.*"),
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*"),
]


def make_module(*, name: str = "test_vit", seed: int = 0, **changes) -> ExplainerModule:
    torch.manual_seed(1)
    classifier = ClassifierOptions(name=name, pretrained=False, image_size=[64, 64], model_kwargs={"num_classes": 10})
    objective = AHAObjective(min_grid=4, max_grid=6, num_fractions=2)
    options = dict(head=HeadOptions(width=16), objective=objective, compare=["random"], seed=seed) | changes
    return ExplainerModule(classifier, **options)


def make_data() -> DemoDataModule:
    return DemoDataModule(batch_size=2, train_length=32, val_length=4, test_length=4)


def make_trainer(folder: Path, **changes) -> Trainer:
    quiet = dict(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, use_distributed_sampler=False, enable_checkpointing=False, default_root_dir=folder,
        plugins=[AtomicCheckpointIO()], gradient_clip_val=1.0, limit_val_batches=0, max_epochs=1,
    )  # fmt: skip
    return Trainer(**quiet | changes)


def head(module: ExplainerModule) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.head.state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path) -> None:
    whole = make_module()
    make_trainer(tmp_path, max_steps=6).fit(whole, make_data())

    class Stop(Exception):
        pass

    class Interrupt(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "at3.ckpt")
                raise Stop

    first = make_module()
    with pytest.raises(Stop):
        make_trainer(tmp_path, max_steps=6, callbacks=[Interrupt()]).fit(first, make_data())
    second = make_module()
    torch.nn.init.normal_(second.head.output.weight)  # whatever it starts from is replaced
    trainer = make_trainer(tmp_path, max_steps=6)
    trainer.fit(second, make_data(), ckpt_path=tmp_path / "at3.ckpt", weights_only=True)
    assert trainer.global_step == 6
    assert second.current_temperature == whole.current_temperature
    assert same(head(whole), head(second))


def test_the_same_seed_gives_the_same_head_and_another_does_not(tmp_path) -> None:
    heads = []
    for seed in (0, 0, 1):
        module = make_module(seed=seed)
        make_trainer(tmp_path, max_steps=3).fit(module, make_data())
        heads.append(head(module))
    assert same(heads[0], heads[1])
    assert not same(heads[0], heads[2])


def test_the_classifier_is_bit_identical_after_fit_validation_and_test(tmp_path) -> None:
    module = make_module(name="test_efficientnet")
    before = copy.deepcopy(module.classifier.state_dict())
    start = head(module)
    trainer = make_trainer(tmp_path, max_steps=4, limit_val_batches=1.0, val_check_interval=2)
    trainer.fit(module, make_data())
    assert {"val/insertion", "val/deletion", "val_random/insertion", "train/loss"} <= set(trainer.callback_metrics)
    trainer.test(module, make_data(), verbose=False)
    assert same(before, module.classifier.state_dict())
    assert not module.classifier.training and not any(m.training for m in module.classifier.modules())
    assert all(p.grad is None and not p.requires_grad for p in module.classifier.parameters())
    assert not same(start, head(module))
    assert {"aha/insertion_minus_deletion", "random/deletion", "object_mask/pointing_game"} <= set(module.test_means)
    assert module.test_means["object_mask/pointing_game"] == 1.0


class Formula(Callback):
    """The average as the formula says it, in float64."""

    def __init__(self, decay: float) -> None:
        self.decay, self.average = decay, {}

    def on_train_start(self, trainer, module):
        self.average = {key: value.double() for key, value in module.head.state_dict().items()}

    def on_train_batch_end(self, trainer, module, *args):
        for key, value in module.head.state_dict().items():
            self.average[key] = self.decay * self.average[key] + (1 - self.decay) * value.double()


def test_averages_of_the_head_leave_the_classifier_alone(tmp_path) -> None:
    formula, module = Formula(0.8), make_module()
    with torch.no_grad():  # signed zeros, as in pruned models, are what rounding tells apart
        for parameter in module.classifier.parameters():
            parameter.mul_(torch.rand_like(parameter) > 0.5)
    before, seen = module.classifier.fingerprint(), []

    class Watch(Callback):
        def on_validation_batch_start(self, trainer, module, *args):
            seen.append((module.classifier.fingerprint(), head(module), dict(formula.average)))

    training = dict(max_steps=6, limit_val_batches=1, val_check_interval=3)
    make_trainer(tmp_path, callbacks=[formula, HeadAveraging(0.8), Watch()], **training).fit(module, make_data())
    assert module.classifier.fingerprint() == before
    assert len(seen) == 2
    for fingerprint, validated, average in [*seen, (before, head(module), formula.average)]:
        assert fingerprint == before
        for key, value in validated.items():
            torch.testing.assert_close(value.double(), average[key], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("stopped_by", ["checkpoint", "error in validation", "flag", "end"])
def test_a_run_with_averages_resumes_exactly(stopped_by, tmp_path) -> None:
    def trainer(*callbacks, **changes):
        usual = dict(max_steps=6, max_epochs=5, limit_val_batches=1, val_check_interval=3)
        return make_trainer(tmp_path, callbacks=[*callbacks, HeadAveraging(0.8)], **usual | changes)

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3 and stopped_by == "checkpoint":
                trainer.save_checkpoint(path)
            trainer.should_stop = trainer.global_step == 3 and stopped_by == "flag"

        def on_validation_batch_start(self, trainer, *args):
            if stopped_by == "error in validation":
                msg = "stop"
                raise RuntimeError(msg)

    whole, path = make_module(), tmp_path / "last.ckpt"
    trainer().fit(whole, make_data())
    last = [] if stopped_by == "checkpoint" else [LastCheckpoint(path, minutes=1e9)]
    with contextlib.suppress(RuntimeError):
        first = trainer(*last, enable_checkpointing=bool(last), max_steps=3 if stopped_by == "end" else 6)
        first.callbacks.append(Stop())
        first.fit(make_module(), make_data())
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 3 and all(key.startswith("head.") for key in saved["state_dict"])
    assert not same(saved["head_in_training"], {k.removeprefix("head."): v for k, v in saved["state_dict"].items()})
    resumed = make_module()
    trainer().fit(resumed, make_data(), ckpt_path=path, weights_only=True)
    if stopped_by != "end":  # a run made for three steps has another schedule
        assert same(head(resumed), head(whole))
    plain = make_module()
    make_trainer(tmp_path, max_steps=6).fit(plain, make_data(), ckpt_path=path, weights_only=True)


@pytest.mark.parametrize("callback", [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=1e-3)])
def test_averages_that_would_change_the_classifier_are_refused(tmp_path, callback) -> None:
    with pytest.raises(ValueError, match=r"averaging\.HeadAveraging"):
        make_trainer(tmp_path, max_steps=1, callbacks=[callback]).fit(make_module(), make_data())


def test_checkpoints_hold_the_head_alone_and_stay_strict(tmp_path) -> None:
    module = make_module()
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.fit(module, make_data())
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["state_dict"].keys() == {f"head.{key}" for key in module.head.state_dict()}
    assert checkpoint["explainer"]["classifier"]["name"] == "test_vit"
    # The plain hyper-parameters alone rebuild the module. The classifier's random weights are drawn anew, so they
    # are not the recorded ones, and that is refused.
    with pytest.raises(ValueError, match="This checkpoint holds a head for test_vit"):
        ExplainerModule.load_from_checkpoint(path, weights_only=True)
    again = make_module()
    again.on_load_checkpoint(checkpoint)
    again.load_state_dict(checkpoint["state_dict"])
    assert same(head(module), head(again))
    del checkpoint["state_dict"]["head.output.weight"]
    with pytest.raises(RuntimeError, match="head.output.weight"):
        again.load_state_dict(checkpoint["state_dict"])
    with pytest.raises(ValueError, match="but the classifier here is test_convnext"):
        make_module(name="test_convnext").on_load_checkpoint(checkpoint)


def test_a_bad_step_is_skipped_and_counted(tmp_path, monkeypatch) -> None:
    module = make_module()
    real = module.objective.__class__.__call__
    seen = []

    def sometimes_nan(self, *args, **kwargs):
        terms = real(self, *args, **kwargs)
        seen.append(head(module))
        return terms._replace(loss=terms.loss * torch.nan) if len(seen) == 2 else terms

    monkeypatch.setattr(AHAObjective, "__call__", sometimes_nan)
    make_trainer(tmp_path, max_steps=4).fit(module, make_data())
    assert module.bad_steps == 1
    assert same(seen[1], seen[2])  # step 2 changed nothing
    assert not same(seen[2], seen[3])
    assert all(value.isfinite().all() for value in head(module).values())


def test_a_run_that_stays_bad_stops_with_advice(tmp_path, monkeypatch) -> None:
    real = AHAObjective.__call__
    monkeypatch.setattr(
        AHAObjective, "__call__", lambda *a, **k: (t := real(*a, **k))._replace(loss=t.loss * torch.inf * 0)
    )
    monkeypatch.setattr("aha.training.module.MAX_BAD_STEPS", 3)
    with pytest.raises(FloatingPointError, match="not finite in 3 steps in a row.*lower model.optimizer.lr"):
        make_trainer(tmp_path, max_steps=9).fit(make_module(), make_data())


def test_bf16_mixed_runs_and_stays_finite(tmp_path) -> None:
    module = make_module()
    trainer = make_trainer(tmp_path, max_steps=3, precision="bf16-mixed")
    trainer.fit(module, make_data())
    assert module.bad_steps == 0
    assert all(value.isfinite().all() and value.dtype == torch.float32 for value in head(module).values())


def test_a_compiled_classifier_trains_the_same_head(tmp_path, monkeypatch) -> None:
    plain = make_module(compare=["cdam"])
    make_trainer(tmp_path, max_steps=3).fit(plain, make_data())
    calls, compiler = [], torch.compile
    backend = lambda graph, _inputs: calls.append(graph) or graph.forward  # noqa: E731 - in place of a C++ compiler
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiler(call, backend=backend))
    module = make_module(compare=["cdam"], compile_classifier=True)
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.fit(module, make_data())
    assert calls
    for key, value in head(plain).items():
        torch.testing.assert_close(module.head.state_dict()[key], value, atol=1e-5, rtol=1e-4)
    trainer.test(module, make_data(), verbose=False)
    assert "cdam/insertion" in module.test_means
    assert set(module.state_dict()) == set(plain.state_dict())


def test_schedules_follow_their_formulas(tmp_path) -> None:
    module = make_module(temperature=TemperatureOptions(start=1.0, end=0.25))
    seen = []
    step = module.training_step
    module.training_step = lambda *a: (
        seen.append((module.current_temperature, module.optimizers().param_groups[0]["lr"])),
        step(*a),
    )[1]
    make_trainer(tmp_path, max_steps=5).fit(module, make_data())
    temperatures, rates = zip(*seen, strict=True)
    assert temperatures == pytest.approx([1.0, 0.25**0.25, 0.5, 0.25**0.75, 0.25])
    assert rates[0] == pytest.approx(3e-4 / 25)
    assert rates[1] == pytest.approx(3e-4)
    assert rates[4] == pytest.approx(3e-4 * (1 + torch.cos(torch.tensor(0.75 * torch.pi)).item()) / 2, rel=1e-4)
    assert TemperatureOptions(start=1.0, end=0.3, schedule="linear").at(0.5) == pytest.approx(0.65)


def test_targets_drawn_for_training() -> None:
    module = make_module(targets=TargetOptions(other_share=0.5))
    logits = torch.tensor([[3.0, 2, 1], [1, 2, 3], [3, 2, 1]]).repeat(100, 1)
    labels = torch.tensor([0, 0, -1]).repeat(100)  # right, wrong, unknown
    mapped, scored = module.draw_targets(logits, labels, torch.Generator().manual_seed(0))
    assert torch.equal(mapped, scored)
    for row, (predicted, other) in enumerate(((0, 1), (2, 0), (0, 1))):
        drawn = mapped[row::3]
        assert set(drawn.tolist()) == {predicted, other}
        assert 0.3 < (drawn == other).float().mean() < 0.7
    published = make_module(targets=TargetOptions(mode="published"))
    mapped, scored = published.draw_targets(logits[:3], labels[:3], torch.Generator())
    assert mapped.tolist() == [0, 2, 0]
    assert scored.tolist() == [[0, 1], [2, 0], [0, 1]]


WRITER = """
import sys, torch
from aha.training.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint, read_checkpoint
io, path = AtomicCheckpointIO(), sys.argv[1]
print("ready", flush=True)
for step in range(10**9):
    io.save_checkpoint({"step": step, "weights": torch.full((200_000,), float(step))}, path)
"""


def test_kill_9_while_writing_leaves_a_loadable_checkpoint(tmp_path) -> None:
    path = tmp_path / "last.ckpt"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "ready"
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(20):
        time.sleep(0.013)
        checkpoint = torch.load(path, weights_only=True)  # whole at any moment, also while the next is being written
        assert (checkpoint["weights"] == checkpoint["step"]).all()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["weights"] == checkpoint["step"]).all()


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    monkeypatch.setattr(os, "fsync", lambda _fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left on device.*previous one is intact"):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_last_is_the_last_state_whatever_the_best(tmp_path) -> None:
    path = tmp_path / "last.ckpt"
    trainer = make_trainer(
        tmp_path,
        max_steps=5,
        limit_val_batches=1,
        val_check_interval=2,
        enable_checkpointing=True,
        callbacks=[LastCheckpoint(path)],
    )
    module = make_module()
    trainer.fit(module, make_data())
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 5
    assert same({f"head.{k}": v for k, v in head(module).items()}, checkpoint["state_dict"])


def test_accumulated_gradients_make_as_many_steps(tmp_path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(make_module(), make_data())
    assert trainer.global_step == 3


def test_no_checkpoint_between_accumulated_gradients(tmp_path) -> None:
    saved = []

    class Noted(LastCheckpoint):
        def save(self, trainer):
            super().save(trainer)
            saved.append((trainer.global_step, trainer.fit_loop.batch_idx + 1))

    options = {"accumulate_grad_batches": 2, "limit_val_batches": 1, "val_check_interval": 3, "max_steps": 4}
    options["enable_checkpointing"] = True
    last = Noted(tmp_path / "last.ckpt", stride=100)
    make_trainer(tmp_path, callbacks=[last], **options).fit(make_module(), make_data())
    # Validated after batches 3 and 6: the first waits for its step. The last is the end's.
    assert saved == [(2, 4), (3, 6), (4, 8)]


def test_sizes_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        DemoDataModule(batch_size=0)
    with pytest.raises(ValueError, match="grid of 100 regions per side doesn't fit images of 64"):
        make_module(objective=AHAObjective(max_grid=100))
    with pytest.raises(ValueError, match="temperatures must be positive"):
        TemperatureOptions(end=0.0)
    with pytest.raises(ValueError, match="num_fractions must be at least 1"):
        AHAObjective(num_fractions=0)


def test_a_file_of_another_kind_is_no_checkpoint(tmp_path) -> None:
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="not a training checkpoint.*start anew"):
        read_checkpoint(str(tmp_path / "other.ckpt"))
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*resume from .*other\.ckpt"):
        read_checkpoint(str(tmp_path / "none.ckpt"))


class Judged(ExplainerModule):
    """Validation says what the test wants it to say."""

    score_now = 0.0

    def validation_step(self, batch, batch_idx) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.log("val/score", self.score_now)


class Stop(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 2:
            raise InterruptedError


@pytest.mark.parametrize("there", [True, False])
def test_the_best_checkpoint_comes_along_to_another_folder(tmp_path, monkeypatch, there) -> None:
    monkeypatch.setitem(globals(), "ExplainerModule", Judged)  # what make_module builds
    options = dict(val_check_interval=2, check_val_every_n_epoch=None, enable_checkpointing=True, limit_val_batches=1)

    def run(folder: Path, score: float, *callbacks: Callback, resume: Path | None = None) -> BestCheckpoint:
        module = make_module()
        module.score_now = score
        best = BestCheckpoint(folder, filename="best", monitor="val/score", mode="max", enable_version_counter=False)
        callbacks = [best, LastCheckpoint(folder / "last.ckpt"), *callbacks]
        trainer = make_trainer(folder, max_steps=4, callbacks=callbacks, **options)
        trainer.fit(module, make_data(), ckpt_path=resume, weights_only=True)
        return best

    with pytest.raises(InterruptedError):
        run(tmp_path / "first", 0.9, Stop())
    if not there:
        (tmp_path / "first" / "best.ckpt").unlink()
    gone = pytest.warns(UserWarning, match=r"val/score 0\.9000.*not there any more")
    with contextlib.nullcontext() if there else gone:
        best = run(tmp_path / "second", 0.5, resume=tmp_path / "first" / "last.ckpt")
    assert Path(best.best_model_path) == (tmp_path / "second" / "best.ckpt").resolve()
    assert float(best.best_model_score) == pytest.approx(0.9 if there else 0.5)
    assert torch.load(best.best_model_path, weights_only=True)["global_step"] == (2 if there else 4)
    if there:  # and with the whole run
        (tmp_path / "first").rename(tmp_path / "moved")
        best = run(tmp_path / "moved", 0.5, resume=tmp_path / "moved" / "last.ckpt")
        assert Path(best.best_model_path) == (tmp_path / "moved" / "best.ckpt").resolve()
        assert float(best.best_model_score) == pytest.approx(0.9)
