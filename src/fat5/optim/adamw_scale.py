"""AdamW whose step is scaled by the size of each tensor, exact enough for parameters kept in bf16."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fat5.optim.fused_update import FusedUpdate, Plan, refuses_entry, settings_of, unavailable
from fat5.optim.torch_updates import Entry, Settings, grad_norms, update_each, update_many

_LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
# How the step is computed is the machine's affair: a loaded state dict does not change it.
_FORMS = ("foreach", "fused")
_SHARDED = {
    "placements": "a DTensor",
    "_is_flat_param": "a parameter flattened by FSDP",
    "_fsdp_flattened": "a parameter flattened by FSDP",
}


class AdamWScale(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, whose step on each tensor is scaled by the tensor's root mean square.

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        p = p (1 - lr weight_decay) - lr max(1e-3, RMS(p)) (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    The RMS is that of the tensor as it lies there before the step (Adafactor's relative step). It scales the step and
    not the decay, as in nanoT5 and flashT5; the learning rate is thus relative, and a few thousandths are usual. The
    group's `lr` is only read: a float, or a 0-d tensor.

    All arithmetic is in float32 (float64 for float64 parameters) and gradients are left as they are. For parameters in
    bf16 or float16, whose own sums would lose updates smaller than half their last bit, `compensation` holds what their
    rounding left over (Kahan summation): the value that is updated is `p + compensation`.

    State of a parameter: `step` (0-d float32), `exp_avg` and `compensation` in the parameter's type, `exp_avg_sq`
    never below float32: with beta2 = 0.999 an increment of v is near v / 1000, less than half the last bit of bf16,
    so that a bf16 v would never come down. Loading a state dict keeps these types, and which form computes the step.

    Nothing here makes the host wait for a GPU, and after a first step each form can be captured in a CUDA graph. A
    graph follows the learning rate only where `lr` is a tensor on the GPU; schedules then write into that tensor.

    Args:
        params: Parameters, or dicts of parameter groups; see `fat5.optim.parameter_groups`.
        lr: Learning rate, relative to the RMS of each tensor.
        betas: Decay rates of the two moments, in [0, 1).
        eps: Added to the root of the second moment, above 0.
        weight_decay: Decoupled decay; each step takes `lr * weight_decay` of the parameter.
        kahan: Keep a compensation for parameters below float32.
        foreach: Update many tensors a launch, with more temporary memory. If None, on GPUs where `fused` is not used.
        fused: Update all tensors in a few launches of Triton kernels, without temporary memory: 22 bytes read and
            written for a bf16 parameter with its compensation, and 2 for its RMS. If None and foreach is None too,
            where the kernels can: on GPUs from Ampere on, for contiguous bf16, float16 and float32 parameters, outside
            of code that torch.compile traces.

    Raises:
        ValueError: A setting out of range, both forms at once, a parameter that is not real floating point or only a
            shard of one, a sparse gradient, or fused kernels asked for where they cannot run.

    References: Loshchilov and Hutter, arXiv:1711.05101; Shazeer and Stern (the scale), arXiv:1804.04235.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        kahan: bool = True,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self._grad_scale: Tensor | None = None
        self._fused_update = FusedUpdate()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "kahan": kahan,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._grad_scale = None
        self._fused_update = FusedUpdate()
        for group in self.param_groups:
            group.setdefault("fused", None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters after checking its settings; see torch.optim.Optimizer."""
        group = {**self.defaults, **param_group}
        check_settings(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        check_form(group["foreach"], group["fused"])
        if group["fused"] and (reason := unavailable()) is not None:
            raise ValueError(f"AdamWScale: got fused=True, which does not work here: {reason}; leave it out")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"AdamWScale: expected real floating-point parameters, got {parameter.dtype}")
            _check_whole(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and with them what `clip_grad_norm` found; see torch.optim.Optimizer."""
        self._grad_scale = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Let the next step count the gradients times min(1, max_norm / (norm + 1e-6)), and return their norm.

        The step multiplies as it reads: the gradients themselves are left as they are, so nothing is written and
        nothing rounded, where `torch.nn.utils.clip_grad_norm_` reads and writes them all. Call it after the last
        backward pass of a step.

        Args:
            max_norm: Largest norm over the gradients of all parameters as one vector; infinite for no clipping.

        Returns:
            The norm before, 0-d float32 on the device of the gradients: reading it makes the host wait, clipping not.
            A norm that is not finite makes the step what PyTorch's own clipping makes it: not finite, or zero.
        """
        if not max_norm > 0:
            raise ValueError(f"AdamWScale: expected max_norm > 0, got {max_norm}")
        if any(group["fused"] for group in self.param_groups):
            return self._clip_untraced(max_norm)
        return self._clip(max_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; parameters without a gradient are left alone.

        Args:
            closure: Recomputes and returns the loss, with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(group["fused"] for group in self.param_groups):
            self._update_untraced()
        else:
            self._update()
        return loss

    def _update(self) -> None:
        grad_scale, self._grad_scale = self._grad_scale, None
        fused, others = self._work()
        if fused is not None:
            self._fused_update.step(fused, grad_scale)
        for form, settings, entries in others:
            form(entries, settings, grad_scale)

    def _clip(self, max_norm: float) -> Tensor:
        self._grad_scale = None
        fused, others = self._work()
        clipped = [] if fused is None else self._fused_update.clip(fused, float(max_norm))
        if len(clipped) == 1 and not others:
            norm, self._grad_scale = clipped[0]
            return norm
        norms = [norm for norm, _ in clipped]
        norms += [norm for _, _, entries in others for norm in grad_norms(entries)]
        if not norms:
            return torch.zeros((), device=self.param_groups[0]["params"][0].device)
        norm = torch.linalg.vector_norm(torch.stack([x.to(norms[0].device, non_blocking=True) for x in norms]))
        norm = norm.float()
        self._grad_scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    # The kernels find tensors by their addresses, which torch.compile cannot trace: it calls these as they are.
    _update_untraced = torch.compiler.disable(_update)
    _clip_untraced = torch.compiler.disable(_clip)

    def _work(self) -> tuple[Plan | None, list[tuple[Callable[..., None], Settings, list[Entry]]]]:
        """Return what the kernels are to do, and what PyTorch's operations are, with the form of each group."""
        if not torch.compiler.is_compiling():
            last = self._fused_update.recall(self.param_groups, self.state)
            if last is not None:
                return last, []
        fused, others = [], []
        for group in self.param_groups:
            entries: list[Entry] = []
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None:
                    entries.append((parameter, grad, self._state_of(parameter, grad, group["kahan"])))
            if not entries:
                continue
            settings = settings_of(group)
            if self._takes_kernels(group, entries):
                fused.append((settings, [(parameter, grad.contiguous(), state) for parameter, grad, state in entries]))
                continue
            foreach = group["foreach"]
            if foreach is None:
                foreach = all(parameter.is_cuda for parameter, _, _ in entries)
            others.append((update_many if foreach else update_each, settings, entries))
        if not fused:
            return None, others
        plan = self._fused_update.plan(fused)
        if not others:
            self._fused_update.remember(plan, self.param_groups, self.state)
        return plan, others

    def _takes_kernels(self, group: dict[str, Any], entries: list[Entry]) -> bool:
        fused = group["fused"]
        if fused:
            reason = unavailable() or next(filter(None, map(refuses_entry, entries)), None)
            if reason is not None:
                raise ValueError(f"AdamWScale: got fused=True, which does not work here: {reason}; leave it out")
            return True
        if fused is not None or group["foreach"] is not None or torch.compiler.is_compiling():
            return False
        on_gpu = all(parameter.is_cuda for parameter, _, _ in entries)
        return on_gpu and unavailable() is None and all(refuses_entry(entry) is None for entry in entries)

    def _state_of(self, parameter: Tensor, grad: Tensor, kahan: bool) -> dict[str, Tensor]:
        """Return the state that a step of `parameter` uses, made on first use."""
        if grad.is_sparse:
            raise ValueError(
                "AdamWScale: expected dense gradients, got a sparse one; use sparse=False in the embedding"
            )
        state = self.state[parameter]
        compensated = kahan and parameter.dtype in _LOW_PRECISION
        if "step" in state and ("compensation" in state) == compensated:
            return state
        names = ["exp_avg", "exp_avg_sq", *(["compensation"] if compensated else [])]
        if "step" not in state:
            _check_whole(parameter)  # again: parameters are sharded in their place after the optimizer is made
            traced = torch.compiler.is_compiling()
            if not traced and parameter.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "AdamWScale: expected at least one step before the capture of a CUDA graph: each replay would "
                    "clear a state that was made in the capture"
                )
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=state_dtype(name, parameter))
        return {name: state[name] for name in ("step", *names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict and give each tensor of the state its own type, not the parameter's.

        torch.optim.Optimizer casts all floating-point state to the type of the parameter, which would round
        `exp_avg_sq`. The groups' `foreach` and `fused` stay as they are.

        Raises:
            ValueError: Groups or shapes are not this optimizer's.
        """
        forms = [{name: group[name] for name in _FORMS} for group in self.param_groups]
        seen: dict[str, Any] = {}
        last = self.register_load_state_dict_pre_hook(lambda _, final: seen.update(final))
        first = self.register_load_state_dict_post_hook(lambda _: self._restore(seen), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()
        for group, form in zip(self.param_groups, forms, strict=True):
            group.update(form)

    def _restore(self, state_dict: dict[str, Any]) -> None:
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(ids, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                value = torch.as_tensor(value).detach()
                expected = torch.Size() if name == "step" else parameter.shape
                if value.shape != expected:
                    raise ValueError(
                        f"AdamWScale: expected {name} of shape {tuple(expected)} for parameter {index}, "
                        f"got {tuple(value.shape)}; the state dict is another model's"
                    )
                restored = torch.empty(expected, dtype=state_dtype(name, parameter), device=parameter.device)
                self.state[parameter][name] = restored.copy_(value)


def check_form(foreach: bool | None, fused: bool | None, name: str = "AdamWScale") -> None:
    """Raise ValueError if two forms of the step are asked for at once."""
    if foreach and fused:
        raise ValueError(f"{name}: expected at most one of foreach and fused to be true, got both")


def _check_whole(parameter: Tensor) -> None:
    """Raise ValueError if a parameter is only this rank's share of one."""
    for mark, what in _SHARDED.items():
        if getattr(parameter, mark, False):
            raise ValueError(
                f"AdamWScale: got {what}; expected whole parameters, since the step is scaled by the RMS of the whole "
                "tensor and a rank has only its shard; parameters of fully_shard (FSDP2) are for "
                "fat5.optim.sharded.ShardedAdamWScale, which fat5.optim.build_optimizer chooses"
            )


def check_settings(
    lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float, name: str = "AdamWScale"
) -> None:
    """Raise ValueError on a setting out of range. A tensor `lr` is not read, since that could make the host wait."""
    if isinstance(lr, Tensor):
        if lr.ndim != 0:
            raise ValueError(f"{name}: expected lr to be a number or a 0-d tensor, got shape {tuple(lr.shape)}")
    elif not 0.0 <= lr < math.inf:
        raise ValueError(f"{name}: expected lr >= 0, got {lr}")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name}: expected two betas in [0, 1), got {betas}")
    if not 0.0 < eps < math.inf:
        raise ValueError(f"{name}: expected eps > 0, got {eps}")
    if not 0.0 <= weight_decay < math.inf:
        raise ValueError(f"{name}: expected weight_decay >= 0, got {weight_decay}")


def state_dtype(name: str, parameter: Tensor) -> torch.dtype:
    """Return the type of one part of a parameter's state."""
    if name == "step":
        return torch.float32
    return torch.promote_types(parameter.dtype, torch.float32) if name == "exp_avg_sq" else parameter.dtype
