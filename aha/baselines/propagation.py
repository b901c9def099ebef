"""One step of relevance through a block, whatever its attention: global, key-reduced or windowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aha.baselines.capture import BlockRecord
from aha.baselines.geometry import cannot_serve, token_grid
from aha.classifier import FrozenClassifier


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of a block enter its attention.

    Attributes:
        tokens: number of tokens, prefix tokens included.
        grid: rows and columns of the patch tokens.
        window: side lengths of the attention windows; None = attention over all tokens.
        shift: cyclic shift before windows are cut.
        key_index: ``(tokens,)`` which key stands for each token; None = one key per token.
        keys: number of keys.
    """

    tokens: int
    grid: tuple[int, int]
    window: tuple[int, int] | None = None
    shift: tuple[int, int] = (0, 0)
    key_index: Tensor | None = None
    keys: int = 0

    def split(self, values: Tensor) -> Tensor:
        """Token values ``(batch, tokens)`` as the attention sees them, ``(batch · windows, queries)``; padding is 0."""
        if self.window is None:
            return values
        (rows, columns), (height, width) = self.window, self.grid
        values = values.unflatten(1, self.grid).roll((-self.shift[0], -self.shift[1]), (1, 2))
        values = F.pad(values, (0, -width % columns, 0, -height % rows))
        values = values.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))
        return values.transpose(2, 3).flatten(3).flatten(0, 2).flatten(1)

    def merge(self, values: Tensor) -> Tensor:
        """Inverse of :meth:`split`."""
        if self.window is None:
            return values
        (rows, columns), (height, width) = self.window, self.grid
        down, across = -(-height // rows), -(-width // columns)
        values = values.view(-1, down, across, rows, columns).transpose(2, 3).reshape(-1, down * rows, across * columns)
        return values[:, :height, :width].roll(self.shift, (1, 2)).flatten(1)

    def to_keys(self, values: Tensor) -> Tensor:
        """Sum of token values ``(rows, tokens)`` over the tokens that each key stands for, ``(rows, keys)``."""
        if self.key_index is None:
            return values
        return values.new_zeros(len(values), self.keys).index_add_(1, self.key_index, values)

    def from_keys(self, values: Tensor) -> Tensor:
        """Key values ``(rows, keys)`` at each token (nearest upsampling of the key grid), ``(rows, tokens)``."""
        return values if self.key_index is None else values[:, self.key_index]


def layout_of(
    classifier: FrozenClassifier, method: str, record: BlockRecord, batch: int, size: tuple[int, int]
) -> TokenLayout:
    """Read a block's layout from its attributes and shapes.

    Args:
        classifier: the explained model.
        method: for the error.
        record: a filled record.
        batch: number of images.
        size: image ``(H, W)``.

    Raises:
        ValueError: for attention of another kind (over channels, unfolded patches, pooled queries, …).
    """
    entry, maps, block = record.entry, record.attention, record.block
    rows, queries, keys = len(maps), maps.shape[-2], maps.shape[-1]
    kind = f"{record.name} ({type(block).__name__})"
    if maps.ndim != 4:
        raise cannot_serve(
            classifier,
            method,
            f"the attention of {kind} has shape {tuple(maps.shape)}, not (batch, heads, queries, keys).",
        )
    if entry.ndim == 4 and hasattr(block, "window_size") and hasattr(block, "shift_size"):
        grid = entry.shape[1], entry.shape[2]
        window, shift = tuple(block.window_size), tuple(block.shift_size)
        windows = -(-grid[0] // window[0]) * -(-grid[1] // window[1])
        if rows == batch * windows and len(entry) == batch and queries == keys == window[0] * window[1]:
            return TokenLayout(grid[0] * grid[1], grid, window, shift, None, keys)
    elif entry.ndim == 3 and rows == len(entry) == batch and queries == entry.shape[1]:
        prefix = classifier.num_prefix_tokens
        grid = token_grid(classifier, queries - prefix, size)
        if grid is not None and keys == queries:
            return TokenLayout(queries, grid, keys=keys)
        reduced = token_grid(classifier, keys, size) or _square(keys)
        if grid is not None and reduced is not None and prefix == 0 and keys < queries:
            return TokenLayout(queries, grid, key_index=_nearest(reduced, grid, entry.device), keys=keys)
    reason = (
        f"{kind} attends from {queries} to {keys} positions in {rows} groups over tokens {tuple(entry.shape)}: "
        "no rule carries relevance through that."
    )
    raise cannot_serve(classifier, method, reason)


def propagate(relevance: Tensor, weights: Tensor, gate: Tensor, layout: TokenLayout, magnitude: Tensor) -> Tensor:
    """R ← Ŵᵀ(β ⊙ R) + (1 − β) ⊙ R, with Ŵ the weights times the keys' magnitude, rows normalised.

    Each row of Ŵ sums to 1 and rows without any weight pass their relevance on by the skip path, so ΣR is conserved.
    With reduced keys, a key's share is spread over the tokens it stands for (GradSkip, arXiv 2607.10365, upsamples
    the key side).

    Args:
        relevance: R of the block's output, ``(batch, tokens)``.
        weights: non-negative, ``(batch · windows, queries, keys)``.
        gate: β in [0, 1], ``(batch, 1)`` or ``(batch, tokens)``.
        layout: the block's.
        magnitude: non-negative factor of each token as a key, ``(batch, tokens)``.

    Returns:
        R of the block's input, ``(batch, tokens)``.
    """
    gate = gate.expand_as(relevance)
    magnitude = layout.split(magnitude)
    row_sum = torch.einsum("bqk,bk->bq", weights, layout.to_keys(magnitude))
    live = row_sum > 0
    main = layout.split(gate * relevance)
    received = torch.einsum(
        "bqk,bq->bk", weights, torch.where(live, main / row_sum.where(live, row_sum.new_ones(())), 0)
    )
    kept = layout.merge(torch.where(live, 0, main)) + (1 - gate) * relevance
    return layout.merge(magnitude * layout.from_keys(received)) + kept


def regrid(relevance: Tensor, source: TokenLayout, target: TokenLayout) -> Tensor:
    """Relevance across a downsampling layer: each position's share is split equally over those it came from.

    Equal shares are inferred: no source states a rule.

    Args:
        relevance: ``(batch, source.tokens)``.
        source: layout behind the downsampling.
        target: layout before it.

    Returns:
        ``(batch, target.tokens)`` with the same sum.
    """
    if source.tokens == target.tokens:
        return relevance
    index = _nearest(source.grid, target.grid, relevance.device)
    counts = torch.bincount(index, minlength=source.tokens).clamp(min=1)
    return (relevance / counts)[:, index]


def _nearest(coarse: tuple[int, int], fine: tuple[int, int], device: torch.device) -> Tensor:
    """For each position of the fine grid, the position of the coarse grid it falls into."""
    rows = torch.arange(fine[0], device=device) * coarse[0] // fine[0]
    columns = torch.arange(fine[1], device=device) * coarse[1] // fine[1]
    return (rows[:, None] * coarse[1] + columns).flatten()


def _square(count: int) -> tuple[int, int] | None:
    side = round(count**0.5)
    return (side, side) if side * side == count else None
