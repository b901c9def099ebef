"""Explainers by name: ``"cdam"``, ``"rise(num_masks=400)"``, ``"captum:Occlusion"``, ``"module:callable"``."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import partial
from typing import Any

from torch import Tensor

from aha.baselines.captum import CaptumExplainer
from aha.baselines.cdam import CDAM
from aha.baselines.gradskip import GradSkip
from aha.baselines.rise import RISE
from aha.baselines.rollout import AttentionRollout
from aha.baselines.simple import CentrePrior, InputGradient, ObjectMask, Random
from aha.baselines.traceless import differentiable, restored
from aha.classifier import FrozenClassifier
from aha.explainer import CallableExplainer, Explainer
from aha.nearest import nearest

BASELINES: dict[str, type[Explainer]] = {
    "cdam": CDAM,
    "gradskip": GradSkip,
    "rollout": AttentionRollout,
    "rise": RISE,
    "input_gradient": InputGradient,
    "random": Random,
    "centre_prior": CentrePrior,
    "object_mask": ObjectMask,
}


def build_explainer(spec: str, classifier: FrozenClassifier, **options: Any) -> Explainer:
    """Build an explainer from its name.

    Args:
        spec: a name in :data:`BASELINES`; ``"captum:NAME"`` for a class in ``captum.attr``; or ``"module:name"`` for
            anything importable: an :class:`~aha.explainer.Explainer` class or a factory whose first parameter is
            called ``classifier``, or a function ``(images, targets) -> maps``. Options may follow in parentheses:
            ``"cdam(variant=smooth, runs=20)"``; values are Python literals, anything else is a string.
        classifier: the explained model.
        options: more options; they win over those in ``spec``.

    Raises:
        ValueError: a malformed spec, an unknown name (the nearest are offered) or option.
        ImportError: a module that can't be imported, or captum missing.

    Example:
        >>> build_explainer("rise(num_masks=400)", FrozenClassifier.from_timm("test_vit", pretrained=False)).num_masks
        400
    """
    head, inline = parse_spec(spec)
    options = inline | options
    kind, _, rest = head.partition(":")
    if kind == "captum" and rest:
        explainer = CaptumExplainer(classifier, rest, **options)
    elif rest:
        explainer = _imported(head, classifier, options)
    elif head in BASELINES:
        known = set(inspect.signature(BASELINES[head].__init__).parameters) - {"self", "classifier"}
        unknown = options.keys() - known
        if unknown:
            msg = f"{head} has no option {', '.join(sorted(unknown))}. It has: {', '.join(sorted(known)) or 'none'}."
            raise ValueError(msg)
        explainer = BASELINES[head](classifier, **options)
    else:
        near = nearest(head, BASELINES)
        msg = (
            f"There is no explainer {head!r}. Nearest: {', '.join(near) or 'none'}. Known: {', '.join(BASELINES)}; "
            "captum:NAME for Captum's; module:callable for your own."
        )
        raise ValueError(msg)
    if options:
        # Two settings of one method stay apart in a report.
        explainer.name = (
            spec if inline else f"{explainer.name}({', '.join(f'{k}={v}' for k, v in options.items() if _short(v))})"
        )
    return explainer


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Split ``"name(key=value, …)"`` into the name and its options.

    Raises:
        ValueError: if it is not of that form.
    """
    match = re.fullmatch(r"\s*([\w.]+(?::[\w.]+)?)\s*(?:\((.*)\))?\s*", spec, re.DOTALL)
    if match is None:
        msg = f"{spec!r} is not of the form name, name(option=value), captum:NAME or module:callable."
        raise ValueError(msg)
    name, inner = match.groups()
    if not inner or not inner.strip():
        return name, {}
    try:
        call = ast.parse(f"f({inner})", mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        msg = f"The options in {spec!r} must be option=value, separated by commas."
        raise ValueError(msg)
    return name, {keyword.arg: _value(keyword.value) for keyword in call.keywords}


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        text = ast.unparse(node)
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def _imported(path: str, classifier: FrozenClassifier, options: dict[str, Any]) -> Explainer:
    module_name, _, attribute = path.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        msg = f"Explainer {path!r}: the module {error.name!r} can't be imported."
        raise ImportError(msg) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = nearest(part, dir(target), cutoff=0.6)
            msg = f"Explainer {path!r}: {module_name} has no {part!r}. Nearest: {', '.join(near) or 'none'}."
            raise ValueError(msg)
        target = getattr(target, part)
    first = next(iter(inspect.signature(target).parameters), None) if callable(target) else None
    if inspect.isclass(target) or first == "classifier":
        target = target(classifier, **options)
        options = {}
    if isinstance(target, Explainer):
        return target
    if not callable(target):
        kind = type(target).__name__
        msg = f"Explainer {path!r} is a {kind}, neither an Explainer nor a function (images, targets) -> maps."
        raise ValueError(msg)
    return CallableExplainer(classifier, _guarded(classifier, partial(target, **options)), path)


def _guarded(classifier: FrozenClassifier, function: Any) -> Any:
    """Foreign code gets gradients, and its traces are wiped."""

    def attribute(images: Tensor, targets: Tensor) -> Tensor:
        with differentiable(classifier, images) as (plain, pixels), restored(plain):
            return function(pixels, targets)

    return attribute


def _short(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)
