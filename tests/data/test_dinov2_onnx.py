"""A tiny DINOv2 under Hugging Face's names, written by hand, through an ONNX file into timm."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aha.data.dinov2_onnx import read_onnx, run_onnx, to_timm

DIM, HEADS, DEPTH, SIDE = 24, 2, 2, 6  # position embeddings of 6×6 patches

pytestmark = pytest.mark.filterwarnings("ignore")


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, DIM, 14, 14)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.position_embeddings = nn.Parameter(torch.randn(1, 1 + SIDE**2, DIM))
        self.patch_embeddings = Patches()

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embeddings(x)
        height, width = x.shape[-2:]
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)
        dim = tokens.shape[-1]  # read from the input, as there: keeps the exporter from folding the reshape away
        square = self.position_embeddings[:, 1:].reshape(1, SIDE, SIDE, dim).permute(0, 3, 1, 2)
        square = F.interpolate(square, size=(height, width), mode="bicubic").permute(0, 2, 3, 1).reshape(1, -1, dim)
        return tokens + torch.cat([self.position_embeddings[:, :1], square], 1)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = [m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.query, self.key, self.value)]
        query, key, value = heads
        weights = (query @ key.transpose(2, 3) / (DIM // HEADS) ** 0.5).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.rand(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.lambda1


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.output = Output()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.attention(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
        self.attention, self.mlp = Attention(), Mlp()
        self.layer_scale1, self.layer_scale2 = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale1(self.attention(self.norm1(x)))
        return x + self.layer_scale2(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.encoder, self.layernorm = Embeddings(), Encoder(), nn.LayerNorm(DIM, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layernorm(self.encoder(self.embeddings(x)))


class Saliency(nn.Module):
    """With a decoder behind, as the file that this is for has."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.decoder = Trunk(), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.backbone(x)[:, 1:]).sigmoid()


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Saliency, Path]:
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = Saliency().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    path = tmp_path_factory.mktemp("onnx") / "tiny.onnx"
    dynamic = {"x": {0: "batch", 2: "h", 3: "w"}}
    torch.onnx.export(
        model, (torch.rand(1, 3, 56, 56),), str(path), input_names=["x"], dynamic_axes=dynamic, dynamo=False
    )
    return model, path


def tiny(size: int) -> nn.Module:
    options = {"embed_dim": DIM, "depth": DEPTH, "num_heads": HEADS, "img_size": size, "num_classes": 0}
    return timm.create_model("vit_small_patch14_dinov2", pretrained=False, **options).eval()


@pytest.mark.parametrize("size", [56, 84, 112])  # fewer tokens than position embeddings, as many, more
@torch.no_grad()
def test_tokens_are_the_original_s(exported: tuple[Saliency, Path], size: int) -> None:
    original, path = exported
    vit = tiny(size)
    vit.load_state_dict(to_timm(read_onnx(path), grid=vit.patch_embed.grid_size), strict=True)
    images = torch.randn(2, 3, size, size)
    expected = original.backbone(images)
    assert torch.allclose(vit.forward_features(images), expected, atol=2e-5)
    assert torch.allclose(run_onnx(path, images), expected, atol=2e-5)


def test_another_model_is_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", value[:1], value[1:])), tmp_path / "a.onnx")
    with pytest.raises(ValueError, match="holds no DINOv2 trunk"):
        read_onnx(tmp_path / "a.onnx")
