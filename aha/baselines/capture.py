"""Attention maps, and what surrounds them, captured from one forward pass; every hook and flag undone on exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aha.baselines.geometry import cannot_serve
from aha.classifier import FrozenClassifier


@dataclass(eq=False)
class BlockRecord:
    """What one transformer block x → x' = x + attention(norm1(x)) → z = x' + mlp(norm2(x')) showed.

    Attributes:
        name: the block's name in the model.
        block: the module.
        entry: x, tokens ``(batch, tokens, channels)``, or ``(batch, h, w, channels)`` in windowed models.
        attention: post-softmax maps ``(batch · windows, heads, queries, keys)``.
        middle: x', after the attention path has joined the skip path; its shape may be flattened.
        exit: z.
    """

    name: str
    block: nn.Module
    entry: Tensor | None = None
    attention: Tensor | None = None
    middle: Tensor | None = None
    exit: Tensor | None = None


def attention_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks with ``norm1``, ``attn`` and ``norm2`` whose attention maps can be read, by name, first to last."""

    def readable(block: nn.Module) -> bool:
        attention = getattr(block, "attn", None)
        return (
            all(isinstance(getattr(block, key, None), nn.Module) for key in ("norm1", "norm2"))
            and isinstance(getattr(attention, "attn_drop", None), nn.Dropout)
            and hasattr(attention, "fused_attn")
        )

    return {name: module for name, module in model.named_modules() if readable(module)}


@contextmanager
def capture_attention(
    classifier: FrozenClassifier, method: str, *, detach: bool = False
) -> Iterator[list[BlockRecord]]:
    """Record every attention map of the forward pass run inside, in order of execution.

    With gradients enabled the maps are part of the graph: the first block's input is made to require a gradient, so
    that a frozen model and a plain image suffice. Fused attention, which bypasses the maps, is off inside.

    Args:
        classifier: the explained model, uncompiled (:func:`~aha.baselines.traceless.differentiable`).
        method: for the error.
        detach: cut queries and keys from the graph: every map becomes a leaf that requires a gradient.

    Yields:
        Records, one per block, filled while the forward pass runs.

    Raises:
        ValueError: if the model has no such blocks, has attention outside them, norms after the attention, or if a
            map was not captured.
    """
    blocks = attention_blocks(classifier.model)
    _refuse_others(classifier, method, blocks)
    records: list[BlockRecord] = []
    handles, switched = [], []
    gradients = torch.is_grad_enabled()
    try:
        for name, block in blocks.items():
            record = BlockRecord(name, block)
            attention = block.attn
            switched.append((attention, attention.fused_attn))
            attention.fused_attn = False
            handles += [
                block.norm1.register_forward_pre_hook(_recorder(record, "entry")),
                attention.attn_drop.register_forward_hook(_attention_hook(classifier, method, record, records, detach)),
                block.norm2.register_forward_pre_hook(_recorder(record, "middle")),
                block.register_forward_hook(_exit_hook(record)),
            ]
        if gradients:
            first = next(iter(blocks.values()))
            handles.append(first.register_forward_pre_hook(_require_gradient))
        yield records
        missing = blocks.keys() - {
            record.name for record in records if None not in (record.attention, record.middle, record.exit)
        }
        if missing or len(records) != len(blocks):
            reason = f"{len(records)} of {len(blocks)} attention maps were captured (missing: {sorted(missing)})."
            raise cannot_serve(classifier, method, reason)
    finally:
        for handle in handles:
            handle.remove()
        for attention, fused in switched:
            attention.fused_attn = fused


def _refuse_others(classifier: FrozenClassifier, method: str, blocks: dict[str, nn.Module]) -> None:
    if not blocks:
        kind = type(classifier.model).__name__
        reason = f"{kind} has no transformer blocks with norm1, attn and norm2 whose attention maps can be read."
        raise cannot_serve(classifier, method, reason)
    covered = {block.attn for block in blocks.values()}
    for name, module in classifier.model.named_modules():
        is_attention = hasattr(module, "fused_attn") or isinstance(getattr(module, "attn_drop", None), nn.Dropout)
        # A pooling attention behind the last block takes part in the gradient, not in the propagation.
        if is_attention and module not in covered and not hasattr(module, "latent"):
            reason = (
                f"its attention {name} ({type(module).__name__}) lies outside blocks of the form x + attn(norm1(x))."
            )
            raise cannot_serve(classifier, method, reason)


def _recorder(record: BlockRecord, field: str):  # noqa: ANN202
    def hook(_module: nn.Module, args: tuple) -> None:
        setattr(record, field, args[0])

    return hook


def _exit_hook(record: BlockRecord):  # noqa: ANN202
    def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
        record.exit = output

    return hook


def _attention_hook(
    classifier: FrozenClassifier, method: str, record: BlockRecord, records: list[BlockRecord], detach: bool
):  # noqa: ANN202
    def hook(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        if record.entry is None:
            raise cannot_serve(
                classifier, method, f"{record.name} normalises after its attention (post-norm), not before."
            )
        if detach:
            output = output.detach().requires_grad_(torch.is_grad_enabled())
        record.attention = output
        records.append(record)
        # A view, because torch's FLOP counter can't follow modules that return leaves.
        return output.view_as(output)

    return hook


def _require_gradient(_module: nn.Module, args: tuple) -> tuple:
    tokens = args[0].detach().requires_grad_()
    return (tokens.view_as(tokens), *args[1:])
