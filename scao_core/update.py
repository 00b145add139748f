"""What happens to gradients before the rule and to parameters after it."""

from __future__ import annotations

import torch
from torch import Tensor

# An entry this many times larger than the tensor's first gradient is cut off, so that sums of squares stay finite in
# fp32 (chosen: 2^50 squared, times 10^7 elements, is below 3.4e38).
LARGEST = 2.0**50

# Where fewer entries than this share agree with the gradient, the step shrinks (chosen).
_SMALLEST_SHARE = 0.1

# Odd 32-bit multipliers of the mixing steps (Steele et al. 2014, SplitMix; Murmur3's finalizer has the same form).
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_WEYL = 0x9E3779B9


def momentum_(averages: list[Tensor], grads: list[Tensor], rate: float) -> None:
    """M <- (1 - rate) M + rate G, in place; with the unbiased rate this is Adam's momentum after its bias correction."""
    torch._foreach_lerp_(averages, grads, rate)


def limited_(direction: Tensor, farthest: float) -> Tensor:
    """U within ± this, in place: a gradient in directions that had none before cannot throw an entry far."""
    return direction.clamp_(-farthest, farthest)


def cautious_(direction: Tensor, grads: Tensor) -> Tensor:
    """U of (…, r, n), in place: entries whose sign is not the gradient's become zero, the others grow by the share of them.

    So the mean size of the entries stays. Source: Liang et al. 2024, "Cautious optimizers: improving training with one
    line of code". The share here is of the entries that have a gradient: rows of an embedding that a batch did not use
    say nothing, and would make the step of those that it did use ten times as large.
    """
    # The sign, not the product of both: that of two small numbers would be zero. A float mask: on a CPU comparisons into
    # bool and sums of it are several times slower (measured).
    agree = grads.sign()
    # How many are not zero, from the 2-norm of the signs: on a CPU four times faster than the 1-norm (measured).
    told = torch.linalg.vector_norm(agree, 2, (-2, -1), keepdim=True).square_().round_()
    agree.mul_(direction).gt_(0)
    share = agree.sum((-2, -1), keepdim=True).div_(told.clamp_min_(1))
    return direction.mul_(agree).div_(share.clamp_min_(_SMALLEST_SHARE))


def apply_(params: list[Tensor], directions: Tensor, lr: float, weight_decay: float, noise: list[int] | None) -> None:
    """p <- (1 - lr · wd) p - lr · U, in place, for N equal tensors and a stack (N, …) in the compute dtype.

    Half-precision parameters are computed in the compute dtype and rounded once: to nearest, or at random if ``noise``
    is given, a seed for each.
    """
    updates = [u.reshape(p.shape) for p, u in zip(params, directions.unbind(0), strict=True)]
    if params[0].dtype == updates[0].dtype:
        decay_(params, lr, weight_decay)
        torch._foreach_add_(params, updates, alpha=-lr)
        return
    for i, (p, u) in enumerate(zip(params, updates, strict=True)):
        exact = p.to(u.dtype).mul_(1 - lr * weight_decay).sub_(u, alpha=lr)
        if noise is not None and p.dtype == torch.bfloat16:
            exact = stochastic_bf16(exact, noise[i])
        p.copy_(exact)


def decay_(params: list[Tensor], lr: float, weight_decay: float) -> None:
    """p <- (1 - lr · wd) p, in place: decoupled weight decay (Loshchilov and Hutter 2019)."""
    if weight_decay != 0 and lr != 0 and params:
        torch._foreach_mul_(params, 1 - lr * weight_decay)


def stochastic_bf16(x: Tensor, seed: int) -> Tensor:
    """fp32 rounded to bf16 at random, with probabilities that make the rounding unbiased.

    The noise is a hash of (element, seed) instead of a random stream: it needs no generator in the checkpoint and
    leaves torch's alone.
    """
    noise = mixed(torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape) + mixed_int(seed)) & 0xFFFF
    # bf16 is the upper half of fp32: add noise below the cut, then cut.
    bits = x.float().contiguous().view(torch.int32)
    rounded = ((bits + noise.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(x) & torch.isfinite(rounded), rounded, x.float()).to(torch.bfloat16)


def mixed(x: Tensor) -> Tensor:
    """A hash of 32-bit numbers in int64, element by element."""
    x = x & 0xFFFFFFFF
    for shift, multiplier in zip((16, 13), _MIX, strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 16)


def mixed_int(x: int) -> int:
    """The same of one number of any size, folded to 32 bits."""
    result = 0
    while True:
        for shift, multiplier in zip((16, 13), _MIX, strict=True):
            result ^= x & 0xFFFFFFFF
            result = ((result ^ (result >> shift)) * multiplier + _WEYL) & 0xFFFFFFFF
        x >>= 32
        if x <= 0:
            return result
