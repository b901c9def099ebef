"""Gradients under which input times gradient, plus bias terms, add up to the logit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ACTIVATIONS = ("GELU", "GELUTanh", "QuickGELU", "SiLU", "Swish", "ReLU")
SCALE_NORMS = ("RMSNorm", "RmsNorm", "RmsNormFp32", "SimpleNorm", "SimpleNormFp32")
GATED_MLPS = ("GluMlp", "SwiGLU", "SwiGLUPacked")


@contextmanager
def complete_gradients(model: nn.Module) -> Iterator[None]:
    """Make the backward pass of a transformer linear; the forward pass keeps its values.

    The variance of LayerNorm and RMSNorm is detached; activations x·s(x) keep s fixed, so does the gate of a gated
    MLP; queries and keys are detached where they pass through a norm slot (pooling attention). Inside attention
    blocks, :func:`~aha.baselines.capture.capture_attention` with ``detach=True`` cuts them. The network is then
    piecewise linear for the gradient, so Σ x⊙∂f/∂x + Σ b⊙∂f/∂b = f(x), with b all additive constants (FullGrad,
    arXiv 1905.00780). That GradSkip (arXiv 2607.10365), which states only that gradients are rescaled for this
    completeness, means this rule (LibraGrad, arXiv 2411.16760) is inferred.

    Args:
        model: a model of timm; hooks are removed on exit.
    """
    modules = list(model.modules())
    gates = {module.act for module in modules if type(module).__name__ in GATED_MLPS}
    handles = []
    try:
        for module in modules:
            kind = type(module).__name__
            if module in gates:
                handles.append(module.register_forward_hook(_detach))
            elif isinstance(module, nn.LayerNorm) and not kind.endswith(("2d", "2dFp32")):
                handles.append(module.register_forward_hook(_variance_fixed))
            elif kind in ACTIVATIONS + SCALE_NORMS:
                handles.append(module.register_forward_hook(_factor_fixed))
            elif hasattr(module, "latent") and hasattr(module, "k_norm"):
                handles += [norm.register_forward_hook(_detach) for norm in (module.q_norm, module.k_norm)]
        yield
    finally:
        for handle in handles:
            handle.remove()


def _variance_fixed(module: nn.LayerNorm, args: tuple, output: Tensor) -> Tensor:
    x = args[0]
    dims = tuple(range(-len(module.normalized_shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    scale = (centred.detach().square().mean(dims, keepdim=True) + module.eps).rsqrt()
    result = centred * (scale if module.weight is None else scale * module.weight)
    return (result if module.bias is None else result + module.bias).to(output.dtype)


def _factor_fixed(_module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    x = args[0]
    plain = x.detach()
    # At x = 0 the product is 0 whatever the factor.
    factor = torch.where(plain == 0, 0, output.detach() / plain)
    return x * factor


def _detach(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
    return output.detach()
