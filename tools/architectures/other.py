"""Models of torch, torchvision, timm and diffusers: small ones with sizes that are multiples of 16, and a loss for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.architectures.language import BATCH, LENGTH, Loss

WIDTH = 64


def _classified(model: nn.Module, size: int = 32) -> tuple[nn.Module, Loss]:
    images = torch.randn(16, 3, size, size, generator=torch.Generator().manual_seed(1))
    return model, lambda job_model: F.cross_entropy(job_model(images).float(), torch.arange(16))


def _followed(model: nn.Module, inputs: tuple[Tensor, ...], **more: Any) -> tuple[nn.Module, Loss]:
    """The mean square of what `model` makes of `inputs` less another tensor."""

    def loss(job_model: nn.Module) -> Tensor:
        dtype = next(
            job_model.parameters()
        ).dtype  # a CPU's LayerNorm takes no float32 beside bfloat16 weights
        given = {
            x: x.to(dtype) if x.is_floating_point() else x for x in inputs
        }  # one that is given twice stays one
        y = job_model(*map(given.__getitem__, inputs), **more)
        y = y.sample if hasattr(y, "sample") else y[0] if isinstance(y, tuple) else y
        return (y.float() - torch.linspace(-1, 1, y.numel()).view(y.shape)).square().mean()

    return model, loss


def _rows(count: int = 1) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(BATCH, LENGTH, WIDTH, generator=draw) for _ in range(count))


def torchvision_resnet() -> tuple[nn.Module, Loss]:
    from torchvision.models.resnet import Bottleneck, ResNet

    return _classified(ResNet(Bottleneck, [1, 1, 1, 1], num_classes=16), 64)


def torchvision_vit() -> tuple[nn.Module, Loss]:
    from torchvision.models import VisionTransformer

    return _classified(VisionTransformer(32, 8, 2, 4, WIDTH, 128, num_classes=16))


def timm_vit() -> tuple[nn.Module, Loss]:
    from timm.models.vision_transformer import VisionTransformer

    return _classified(
        VisionTransformer(
            img_size=32, patch_size=8, embed_dim=WIDTH, depth=2, num_heads=4, num_classes=16
        )
    )


def timm_convnext() -> tuple[nn.Module, Loss]:
    from timm.models.convnext import ConvNeXt

    return _classified(
        ConvNeXt(depths=(1, 1, 1, 1), dims=(32, 32, 64, 64), num_classes=16, conv_mlp=True), 64
    )


def nn_transformer() -> tuple[nn.Module, Loss]:
    return _followed(nn.Transformer(WIDTH, 4, 2, 2, 128, dropout=0.0, batch_first=True), _rows(2))


def nn_multihead_attention() -> tuple[nn.Module, Loss]:
    return _followed(
        nn.MultiheadAttention(WIDTH, 4, batch_first=True), _rows() * 3, need_weights=False
    )


def nn_lstm() -> tuple[nn.Module, Loss]:
    return _followed(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), _rows())


def diffusers_unet() -> tuple[nn.Module, Loss]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=16,
    )
    draw = torch.Generator().manual_seed(1)
    return _followed(
        model, (torch.randn(BATCH, 4, 16, 16, generator=draw), torch.arange(BATCH), *_rows())
    )


def diffusers_dit() -> tuple[nn.Module, Loss]:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=32,
        norm_num_groups=16,
        dropout=0.0,
    )
    images = torch.randn(BATCH, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    return _followed(
        model, (images,), timestep=torch.arange(BATCH), class_labels=torch.arange(BATCH)
    )


OTHER: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    made.__name__: made
    for made in (
        torchvision_resnet,
        torchvision_vit,
        timm_vit,
        timm_convnext,
        nn_transformer,
        nn_multihead_attention,
        nn_lstm,
        diffusers_unet,
        diffusers_dit,
    )
}
