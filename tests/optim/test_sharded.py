"""AdamWScale on DTensors, on a mesh of one process; tests/training/test_sharded_ranks.py has two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fat5.optim import AdamWScale
from fat5.optim.sharded import ShardedAdamWScale, gather, whole_rms, whole_state_dict

SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = ((7, 5), (3,), (4, 2, 3))


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def pair(mesh, dtype: torch.dtype):
    """Return the same parameters whole and as DTensors."""
    whole = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    return whole, [torch.nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])) for value in whole]


def give_gradients(whole, sharded, mesh) -> None:
    for value, part in zip(whole, sharded, strict=True):
        value.grad = torch.randn(value.shape).to(value.dtype)
        part.grad = distribute_tensor(value.grad.clone(), mesh, [Shard(0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_and_state_are_those_of_whole_tensors(mesh, dtype):
    whole, sharded = pair(mesh, dtype)
    first, second = AdamWScale(whole, **SETTINGS, foreach=True), ShardedAdamWScale(sharded, **SETTINGS)
    before = [value.detach().clone() for value in whole]
    for _ in range(3):
        give_gradients(whole, sharded, mesh)
        first.step()
        second.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    for value, part, start in zip(whole, sharded, before, strict=True):
        assert (value - start).abs().max() > 0.01
        torch.testing.assert_close(gather(part), value.detach(), **tolerance)
        assert first.state[value].keys() == second.state[part].keys()
        for name, entry in first.state[value].items():
            assert second.state[part][name].dtype == entry.dtype
            torch.testing.assert_close(gather(second.state[part][name]), entry, rtol=1e-2, atol=1e-4)


def test_each_class_goes_on_from_the_others_state(mesh):
    whole, sharded = pair(mesh, torch.bfloat16)
    first, second = AdamWScale(whole, **SETTINGS), ShardedAdamWScale(sharded, **SETTINGS)
    for _ in range(2):
        give_gradients(whole, sharded, mesh)
        first.step()
        second.step()
    third, fourth = ShardedAdamWScale(sharded, **SETTINGS), AdamWScale(whole, **SETTINGS)
    third.load_state_dict(first.state_dict())
    fourth.load_state_dict(whole_state_dict(second))
    for value, part in zip(whole, sharded, strict=True):
        for name, entry in first.state[value].items():
            loaded = third.state[part][name]
            assert torch.equal(gather(loaded), entry)
            assert isinstance(loaded, DTensor) == (name != "step")
            assert third.state[part][name].dtype == entry.dtype
            assert torch.equal(fourth.state[value][name], gather(second.state[part][name]))
    give_gradients(whole, sharded, mesh)
    third.step()
    fourth.step()
    assert float(third.state[sharded[0]]["step"]) == float(fourth.state[whole[0]]["step"]) == 3


def test_rms_is_over_the_whole_of_each_tensor(mesh):
    _, sharded = pair(mesh, torch.float32)
    rms = whole_rms([part.to_local() for part in sharded], sharded)
    torch.testing.assert_close(rms, torch.stack([gather(part).square().mean().sqrt() for part in sharded]))


def test_whole_parameters_are_refused():
    with pytest.raises(ValueError, match=r"sharded by fully_shard, got a Parameter of shape \(3,\)"):
        ShardedAdamWScale([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="expected lr"):
        ShardedAdamWScale([torch.nn.Parameter(torch.zeros(3))], lr=-1)
