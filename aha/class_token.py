"""The logits of a ViT whose head reads its class token alone, without what the other tokens do in the last block.

They enter that block as keys and values; their queries, their part of the projection and their MLP reach no logit. In a
ViT of 12 blocks that is a sixteenth of the work, in one of 4 a fifth, forward and backward. The numbers are the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import DropPath, GluMlp, LayerNorm, Mlp, RmsNorm, SwiGLU
from timm.layers.activations import QuickGELU
from timm.models.vision_transformer import Attention, Block, LayerScale, VisionTransformer
from torch import Tensor, nn

# What works on each token by itself, besides the attention.
BY_TOKEN = {nn.Linear, nn.Identity, nn.Dropout, DropPath, LayerScale, Mlp, GluMlp, SwiGLU}
BY_TOKEN |= {nn.LayerNorm, LayerNorm, RmsNorm, nn.GELU, QuickGELU, nn.SiLU}
AS_WRITTEN = {
    (kind, name): getattr(kind, name)
    for kind, names in {
        VisionTransformer: ("forward", "forward_features", "forward_head", "pool"),
        Block: ("forward",),
        Attention: ("forward",),
    }.items()
    for name in names
}
HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def reads_class_token(model: nn.Module) -> bool:
    """Whether :func:`class_token_logits` is this model's forward pass: timm's plain ViT, token pooling, as it came.

    Not while anything watches or replaces a part of its end, drops units, or takes attention apart.
    """
    if type(model) is not VisionTransformer or model.global_pool != "token" or model.attn_pool is not None:
        return False
    if type(model.blocks) is not nn.Sequential or model.grad_checkpointing or model._compiled_call_impl:
        return False
    block = model.blocks[-1]
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    if block.attn.gate is not None or not block.attn.fused_attn or type(block.attn.qkv) is not nn.Linear:
        return False
    if any(getattr(kind, name) is not method for (kind, name), method in AS_WRITTEN.items()):
        return False
    if any(getattr(torch.nn.modules.module, f"_global_{hooks}") for hooks in HOOKS):
        return False
    parts = [part for part in (*block.modules(), *model.norm.modules()) if part not in (block, block.attn)]
    if any(type(part) not in BY_TOKEN for part in parts):
        return False
    return all(untouched(part) for part in (model, model.blocks, block, block.attn, *parts))


def untouched(part: nn.Module) -> bool:
    """In eval mode, without hooks, none of its methods replaced."""
    if part.training or any(getattr(part, f"_{hooks}") for hooks in HOOKS):
        return False
    return not any(callable(getattr(type(part), name, None)) for name in vars(part))


def class_token_logits(model: VisionTransformer, x: Tensor) -> Tensor:
    """Logits ``(batch, classes)`` of normalised images ``(batch, 3, H, W)``; where :func:`reads_class_token`."""
    x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    for earlier in model.blocks[:-1]:
        x = earlier(x)
    block = model.blocks[-1]
    attention, tokens = block.attn, block.norm1(x)
    weight, bias, width = attention.qkv.weight, attention.qkv.bias, attention.attn_dim
    heads = (attention.num_heads, attention.head_dim)
    query = F.linear(tokens[:, :1], weight[:width], None if bias is None else bias[:width])
    both = F.linear(tokens, weight[width:], None if bias is None else bias[width:])
    query = query.unflatten(-1, heads).transpose(1, 2)
    key, value = both.unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)
    read = F.scaled_dot_product_attention(attention.q_norm(query), attention.k_norm(key), value)
    read = attention.proj(attention.norm(read.transpose(1, 2).flatten(2)))
    token = x[:, :1] + block.ls1(read)
    token = token + block.ls2(block.mlp(block.norm2(token)))
    return model.forward_head(model.norm(token))
