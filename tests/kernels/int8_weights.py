"""What int8 with a scale per output makes of weights, by torch."""

import torch
from torch import Tensor


def int8_values(weight: Tensor) -> Tensor:
    """Weight [N, K] as PackedLinear keeps it when it is packed as int8; float64."""
    scale = (weight.float().abs().amax(1, keepdim=True) if weight.numel() else torch.zeros(len(weight), 1)) / 127
    return torch.where(scale > 0, (weight.float() / scale).round(), 0).double() * scale
