"""Plans that the layers of a stack share, see `fat5.ops.plan_attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fat5.ops import AttentionPlan, plan_attention
from fat5.ops.attention.api import op_arguments
from fat5.ops.attention.backends import choose_backend


class AttentionPlans:
    """The plans of one forward pass: made by the first layer that needs one, taken by the layers behind it."""

    def __init__(self) -> None:
        self._made: list[AttentionPlan] = []

    def plan(self, q: Tensor, k: Tensor, **options: Any) -> AttentionPlan | None:
        """Return the plan of a call with these options of `flash_attention`, or None where the backend has none."""
        backend = options.pop("backend")
        if choose_backend(backend, q, keys="planned") is None:
            return None
        arguments = op_arguments(q, k, k, **options)
        for plan in self._made:
            if plan.fits(q, k, arguments):
                return plan
        made = plan_attention(q, k, backend=backend, **options)
        if made is not None:
            self._made.append(made)
        return made
