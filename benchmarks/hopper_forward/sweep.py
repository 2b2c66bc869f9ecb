"""Which shapes are measured where, and in what order."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import torch

from benchmarks.attention.workload import Workload
from benchmarks.hopper_forward.report import Rows, fastest
from benchmarks.hopper_forward.stage import Stage
from benchmarks.registry import UsageError
from benchmarks.session import Session
from fat5.ops.attention.hopper.comparison import examine_all, usable_cores
from fat5.ops.attention.hopper.configuration import TURNS_A_CHUNK, Configuration, ForwardShape
from fat5.ops.attention.hopper.dispatch import unavailable
from fat5.ops.attention.hopper.self_check import all_shapes


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What is measured: the product of all, but for shapes that no multiprocessor holds.

    Attributes:
        lengths: Tokens of a row.
        head_dims: Head dimensions, of 64 and 128.
        masks: Of "full" and "causal".
        consumers: Warpgroups of 64 queries.
        stages: Tiles of keys and values.
        ahead: Whether the next tile begins beside the last product.
        alternate: Whether two consumers issue their products in turn.
        halves: Whether queries that see half of their last tile of keys multiply that half alone.
        chunks: Turns of causal tiles sorted together, tried on the fastest shape alone.
        layouts: How the inputs lie in memory: the first for all shapes, the others for the fastest and today's.
        tokens: Tokens of a batch.
        heads: Number of heads.
        dtype: "bf16" or "fp16".
    """

    lengths: Sequence[int]
    head_dims: Sequence[int]
    masks: Sequence[str]
    consumers: Sequence[int]
    stages: Sequence[int]
    ahead: Sequence[bool]
    alternate: Sequence[bool]
    halves: Sequence[bool]
    chunks: Sequence[int]
    layouts: Sequence[str]
    tokens: int
    heads: int
    dtype: str

    def workloads(self) -> Iterator[Workload]:
        """Yield the workloads, in the first layout.

        Raises:
            UsageError: A batch has no row, or a number is not positive.
        """
        for name in ("lengths", "chunks"):
            if min(getattr(self, name)) < 1:
                raise UsageError(f"got --{name} {min(getattr(self, name))}, expected at least 1")
        if self.heads < 1:
            raise UsageError(f"got --heads {self.heads}, expected at least 1")
        if max(self.lengths) > self.tokens:
            raise UsageError(f"a batch of {self.tokens} tokens has no row of {max(self.lengths)}; raise --tokens")
        for head_dim, mask, length in product(self.head_dims, self.masks, self.lengths):
            batch = self.tokens // length
            yield Workload(batch, self.heads, length, head_dim, mask == "causal", self.dtype, layout=self.layouts[0])

    def shapes(self, head_dim: int) -> list[ForwardShape]:
        """Return the shapes to try at a head dimension.

        Raises:
            UsageError: None of those asked for fits.
        """
        every = list(all_shapes(head_dim))
        found = [
            shape
            for shape in every
            if shape.consumers in self.consumers
            and shape.stages in self.stages
            and shape.ahead in self.ahead
            and shape.alternate in self.alternate
            and shape.halves in self.halves
        ]
        if not found:
            raise UsageError(
                f"no shape of those fits at head dimension {head_dim}; there are: {'; '.join(map(str, every))}"
            )
        return found


def compile_all(configurations: Iterable[Configuration]) -> dict[Configuration, str | None]:
    """Compile in processes of their own, each beside the portable kernels on a small input.

    Returns:
        What is wrong with each configuration, or None. The compiled kernels stay in Triton's cache on the disk.
    """
    todo = list(dict.fromkeys(configurations))
    workers = usable_cores()
    print(f"compiling {len(todo)} kernels in {min(workers, len(todo))} processes", file=sys.stderr, flush=True)
    return dict(examine_all(todo, torch.device("cuda", torch.cuda.current_device()), workers))


@torch.no_grad()
def measure(session: Session, sweep: Sweep) -> Rows:
    """Measure every shape at every workload, then chunks and layouts around the fastest."""
    stages = [Stage(workload, session.device) for workload in sweep.workloads()]
    shapes = {head_dim: sweep.shapes(head_dim) for head_dim in sweep.head_dims}
    verdicts: dict[Configuration, str | None] = {}
    if unavailable() is None:
        every = (stage.configuration(shape) for stage in stages for shape in stage.telling(shapes))
        verdicts = compile_all(every)
    rows: Rows = []
    for stage in stages:

        def time(shape: ForwardShape, at: Stage = stage) -> Rows:
            # A chunk is an argument, not a constant: what was compiled for today's serves all.
            compiled = dataclasses.replace(shape, chunk=TURNS_A_CHUNK)
            reason = verdicts[at.configuration(compiled)] if verdicts else None
            return session.measure(at.subject(shape, reason))

        mine = session.measure(stage.yardstick())
        for shape in stage.telling(shapes):
            mine += time(shape)
        best = fastest(mine)
        if best is not None and stage.workload.causal:
            for chunk in sweep.chunks:
                if chunk != TURNS_A_CHUNK:
                    mine += time(dataclasses.replace(best, chunk=chunk))
            best = fastest(mine)
        rows += mine
        if best is None:
            continue
        for layout in sweep.layouts[1:]:
            other = Stage(dataclasses.replace(stage.workload, layout=layout), session.device)
            rows += session.measure(other.yardstick())
            for shape in dict.fromkeys((other.configuration().shape, best)):
                rows += time(shape, other)
    return rows
