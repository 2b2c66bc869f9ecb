"""Parameters spread over ranks by PyTorch's fully_shard (FSDP2), and back into whole ones for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fat5.errors import ConfigError
from fat5.models import FAT5ForConditionalGeneration
from fat5.nn.joined import keep_apart
from fat5.optim.sharded import gather, shard_like


def resolve_shard_degree(degree: int, world_size: int) -> int:
    """Return the number of ranks that share one copy of the model: `degree`, with -1 for all ranks.

    Raises:
        ConfigError: The ranks cannot be divided into groups of that size.
    """
    if degree == -1:
        return world_size
    if world_size % degree:
        raise ConfigError(
            f"training.data_parallel_shard_degree is {degree}, expected a divisor of the {world_size} processes, or -1"
        )
    return degree


def blocks_of(model: FAT5ForConditionalGeneration) -> list[nn.Module]:
    """Return the layers of both stacks."""
    return [*model.encoder.block, *model.decoder.block]


def shard_model(model: FAT5ForConditionalGeneration, degree: int, world_size: int, device: torch.device) -> None:
    """Spread the parameters in their place over groups of `degree` ranks; each group holds one copy of the model.

    A layer's parameters are gathered before its forward and its backward; those of the embedding, the LM head and the
    last norms stay gathered from the forward to the backward. Gradients are summed in float32. Projections of one
    input are multiplied one by one: weights joined for one product would stay gathered, too.
    """
    if degree == world_size:
        mesh = init_device_mesh(device.type, (degree,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device.type, (world_size // degree, degree), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in blocks_of(model):
        keep_apart(block)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def whole_weights(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Return the state dict, shards gathered, on the CPU; tied weights are one tensor. All ranks must call it.

    Args:
        model: The model.
        keep: False on ranks that only take part: they get nothing.
    """
    _reshard(model)
    gathered: dict[int, Tensor] = {}
    weights = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    kept = model.state_dict().keys()
    for name, value in named:
        if name in kept:
            if id(value) not in gathered:
                gathered[id(value)] = gather(value, keep=keep)
            weights[name] = gathered[id(value)]
    return weights if keep else {}


@torch.no_grad()
def load_whole_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give each rank its shards of whole weights; of tied ones, one name is enough."""
    _reshard(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights:
            value = weights[name].to(device=parameter.device, dtype=parameter.dtype)
            parameter.copy_(shard_like(value, parameter) if isinstance(parameter, DTensor) else value)


def _reshard(model: nn.Module) -> None:
    """Let go of gathered parameters, which a forward without a backward leaves in the place of the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
