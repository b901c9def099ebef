"""The logits of a ViT whose head reads its class token alone, without what the other tokens do in the last block.

They enter that block as keys and values; their queries, their part of the projection and their MLP reach no logit. In a
ViT of 12 blocks that is a sixteenth of the work, in one of 4 a fifth, forward and backward. The numbers are the same.
"""

from __future__ import annotations

import torch.nn.functional as F
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def reads_class_token(model: nn.Module) -> bool:
    """Whether :func:`class_token_logits` is this model's forward pass: timm's plain ViT, token pooling, as it came.

    Not while anything watches or replaces a part of the last block, or the model is compiled or checkpoints.
    """
    if type(model) is not VisionTransformer or model.global_pool != "token" or model.attn_pool is not None:
        return False
    block = model.blocks[-1]
    plain = type(block) is Block and type(block.attn) is Attention and block.attn.gate is None
    if not plain or model.grad_checkpointing or model.training:
        return False
    return not any(
        "forward" in vars(part) or part._compiled_call_impl or any(getattr(part, hooks) for hooks in HOOKS)
        for part in (model, model.blocks, *block.modules())
    )


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
