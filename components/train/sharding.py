"""Weights, gradients and optimiser sharded over the workers (FSDP, Zhao et al. 2023, sec. 3).

Every worker keeps its part of every tensor; a pass gathers one block at a time and frees it.
There is no separate bare model: attacks also run on the sharded one, and all workers must make the
same passes in the same order. Objectives and networks that cannot guarantee this are rejected.
Checkpoints, validated and final models are whole, so a training may resume with another number of
workers, or without sharding.

torch's modules for sharding load its compiler, a second for every worker: only `shard` does that.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from timm.models.beit import Beit
from torch import Tensor, distributed, nn

from components.core.errors import CasemateError
from components.models.pixels import PixelModel
from components.train.objectives.base import Objective
from components.train.objectives.inner import has_batch_statistics


def shard(model: PixelModel) -> PixelModel:
    """Shard the model in place: each block, then the rest.

    All parts free their weights after a forward pass. By default the outermost one does not, and
    a frozen attack pass without gradients would then leave frozen copies for the training pass.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(model.mean.device.type, (distributed.get_world_size(),))
    for block in reversed(_blocks(model)):  # inner ones first
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of lists whose names end in `blocks`: `blocks`, `cls_attn_blocks`."""
    lists = [m for name, m in model.named_modules() if name.rpartition(".")[2].endswith("blocks")]
    return [layer for layers in lists for layer in layers.children()]


def is_sharded(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def _is_part(value: Any) -> bool:
    """Whether a tensor is sharded."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def check_shardable(model: PixelModel, objective: Objective) -> None:
    """Reject models and objectives that would be wrong, or deadlock, with sharded weights."""
    if why := objective.not_shardable(model) or _network_not_shardable(model):
        raise CasemateError("cluster.strategy", "fsdp", f"does not fit {why}; use ddp")


def _network_not_shardable(model: PixelModel) -> str | None:
    if isinstance(model.net, Beit) and model.spec.token_policy == "drop":
        return "BEiT with dropped tokens, whose position biases are read outside their blocks"
    if has_batch_statistics(model):
        return "batch normalisation, whose statistics would differ between workers"
    return None


def whole(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A nested state with sharded tensors gathered on the host; all workers must call it.

    Only the first worker keeps the gathered tensors: the others hold empty ones.
    """
    return {key: _whole(value) for key, value in state.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        return whole(value)
    if not _is_part(value):
        return value
    full = _gathered(value)
    return full.cpu() if distributed.get_rank() == 0 else full.new_empty(0)


def _gathered(value: Any) -> Any:
    return value.full_tensor() if _is_part(value) else value


def unsharded(model: PixelModel) -> PixelModel:
    """The model itself or, of a sharded one, a whole copy; all workers must call it."""
    if not is_sharded(model):
        return model
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are replaced
        copy = PixelModel(model.spec).to(model.mean.device)
    copy.load_state_dict({name: _gathered(w) for name, w in model.state_dict().items()})
    return copy


def share_statistics(model: nn.Module) -> None:
    """Give all workers the first one's buffers: running statistics follow each worker's items."""
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole weights into a model, sharded or not."""
    own = model.state_dict()
    model.load_state_dict({n: _part_of(w, own[n]) if n in own else w for n, w in state.items()})


def optimizer_parts(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A whole optimiser state in the form that this worker's optimiser loads.

    torch's own checkpoint functions are not used: they key the state by parameter names and take a
    step to allocate it, so a plain optimiser could not load it.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    parts = {
        index: {key: _part_of(value, weights[index]) for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return {**state, "state": parts}


def _part_of(value: Any, like: Any) -> Any:
    """`value`, whole on every worker, sharded like a tensor of its shape."""
    if not _is_part(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    local = value.to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
