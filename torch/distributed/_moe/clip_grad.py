"""Gradient clipping where parameters live on several meshes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """:func:`torch.nn.utils.clip_grad_norm_` for experts and dense parameters together.

    That function can't combine norms from different meshes, and plain tensors with DTensors.
    Collective over the meshes of the parameters.

    Args:
        parameters (iterable of Tensor, or Tensor): with gradients that are plain tensors, equal
            on all ranks, or DTensors of any mesh.
        max_norm (float): largest norm after clipping.
        norm_type (float): infinity only where no rank has an empty shard, as
            :func:`torch.nn.utils.get_total_norm`. Default: 2.0
        error_if_nonfinite (bool): raise if the norm is not finite. Default: ``False``
        foreach (bool, optional): see :func:`torch.nn.utils.clip_grad_norm_`. Default: None

    Returns:
        Tensor: norm of all gradients as one vector, before clipping; a plain tensor.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    groups: dict[object, list[Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            grad = param.grad
            mesh = grad.device_mesh if isinstance(grad, DTensor) else None
            groups.setdefault(mesh, []).append(param)
    if not groups:
        return torch.tensor(0.0)
    norms = []
    for params in groups.values():
        grads = [param.grad for param in params if param.grad is not None]
        norm = get_total_norm(grads, norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the total norm of order {norm_type} for gradients from "
            f"parameters is not finite, got {total.item()}"
        )
    for params in groups.values():
        clip_grads_with_norm_(params, max_norm, total, foreach)
    return total
