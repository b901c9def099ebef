"""Explaining leaves no trace: the context managers in which explainers touch a classifier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from aha.classifier import FrozenClassifier


@contextmanager
def differentiable(classifier: FrozenClassifier, images: Tensor) -> Iterator[tuple[FrozenClassifier, Tensor]]:
    """Gradients on, whatever the caller switched off, through the plain eager model; undone on exit.

    Inside, ``no_grad`` and ``inference_mode`` are lifted, compiled calls run eagerly (hooks are ignored by compiled
    graphs) and gradient checkpointing is off (it would run hooks twice).

    Args:
        classifier: the explained model.
        images: ``(batch, 3, H, W)``.

    Yields:
        The classifier to call and the images, detached and usable by autograd.

    Raises:
        ValueError: if single layers inside the model were wrapped by ``torch.compile``.
    """
    with torch.inference_mode(False), torch.enable_grad(), _eager(classifier) as plain:
        yield plain, images.clone() if images.is_inference() else images.detach()


@contextmanager
def _eager(classifier: FrozenClassifier) -> Iterator[FrozenClassifier]:
    plain = classifier._orig_mod if isinstance(classifier, OptimizedModule) else classifier
    model = plain.model
    inner = model._orig_mod if isinstance(model, OptimizedModule) else model
    switched: list[tuple[dict[str, Any], str, Any]] = []
    for name, module in plain.named_modules():
        if isinstance(module, OptimizedModule) and module is not model:
            msg = (
                f"Layer {name} of {plain.name} was wrapped by torch.compile, where hooks and gradients can't be read. "
                "Explain the uncompiled model, or compile it whole: classifier.compile()."
            )
            raise ValueError(msg)
        state = vars(module)
        for key, off in (("_compiled_call_impl", None), ("grad_checkpointing", False)):
            if state.get(key):
                switched.append((state, key, state[key]))
                state[key] = off
    try:
        plain.model = inner
        yield plain
    finally:
        plain.model = model
        for state, key, value in switched:
            state[key] = value


@contextmanager
def restored(classifier: FrozenClassifier) -> Iterator[None]:
    """Undo whatever foreign code does to modules: hooks, flags, patched methods, ``.grad``, requires_grad.

    For explainers whose code is not ours (Captum, user callables). Values of weights are not copied.
    """
    modules = [(module, _snapshot(module)) for module in classifier.modules()]
    parameters = [(p, p.requires_grad, p.grad) for p in classifier.parameters()]
    try:
        yield
    finally:
        for module, saved in modules:
            _restore(module, saved)
        for parameter, requires_grad, grad in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad


def _snapshot(module: nn.Module) -> dict[str, tuple[Any, dict | None]]:
    return {key: (value, dict(value) if isinstance(value, dict) else None) for key, value in vars(module).items()}


def _restore(module: nn.Module, saved: dict[str, tuple[Any, dict | None]]) -> None:
    state = vars(module)
    for key in state.keys() - saved.keys():
        del state[key]
    for key, (value, content) in saved.items():
        state[key] = value
        # In place: hook handles hold weak references to these very dictionaries.
        if content is not None and list(value.items()) != list(content.items()):
            value.clear()
            value.update(content)
