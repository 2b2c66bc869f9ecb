"""The tables of the case: which workloads and implementations each holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.attention.catalogue import YARDSTICK
from benchmarks.attention.implementation import Implementation
from benchmarks.attention.own import fat5
from benchmarks.attention.stage import Stage
from benchmarks.attention.workload import LAYOUTS, Workload, half_padding, uniform_documents
from benchmarks.session import Session

Rows = list[dict[str, Any]]

MATERIALISED, FLEX = "sdpa-bias", "flex"
_SWEEP_LENGTHS = tuple(2**n for n in range(9, 15))
_MEMORY_LENGTHS = tuple(2**n for n in range(9, 18))


@dataclass(frozen=True)
class Options:
    """What the command line chose; None for a table's own choice.

    Attributes:
        implementations: What to measure.
        chosen: The implementations were named on the command line.
        dtypes: Names of the types.
        lengths: Lengths.
        head_dims: Head dimensions.
        masks: "full" and "causal".
        heads: Heads.
        tokens: Tokens of a batch.
        layout: How the inputs lie in memory.
    """

    implementations: Sequence[Implementation]
    chosen: bool = False
    dtypes: Sequence[str] | None = None
    lengths: Sequence[int] | None = None
    head_dims: Sequence[int] | None = None
    masks: Sequence[str] | None = None
    heads: int | None = None
    tokens: int | None = None
    layout: str = LAYOUTS[0]

    def workloads(
        self,
        *,
        lengths: Sequence[int],
        head_dims: Sequence[int] = (64, 128),
        masks: Sequence[str] = ("full", "causal"),
        dtypes: Sequence[str] | None = None,
        heads: int = 12,
        tokens: int | None = 16_384,
    ) -> Iterator[Workload]:
        """Yield a table's workloads, with what the command line chose; one row where `tokens` is None."""
        dtypes = dtypes or self.dtypes or ("bf16",)
        axes = (dtypes, self.lengths or lengths, self.head_dims or head_dims, self.masks or masks)
        for dtype, length, head_dim, mask in product(*axes):
            batch = 1 if tokens is None else max(1, (self.tokens or tokens) // length)
            yield Workload(batch, self.heads or heads, length, head_dim, mask == "causal", dtype, layout=self.layout)


def must_reach(session: Session, options: Options) -> Rows:
    """The shapes with figures to reach. FlexAttention compiles half a minute a shape: one type, and not in a hurry."""
    rows: Rows = []
    for dtype in options.dtypes or (("bf16",) if session.quick else ("bf16", "fp16")):
        leave_out = not options.chosen and (session.quick or dtype != "bf16")
        implementations = [x for x in options.implementations if not (leave_out and x.name == FLEX)]
        workloads = options.workloads(lengths=(1024, 4096), dtypes=(dtype,))
        rows += _measure(session, "must-reach", workloads, implementations, YARDSTICK)
    return rows


def sweep(session: Session, options: Options) -> Rows:
    """Lengths at a constant number of tokens, without FlexAttention."""
    implementations = [
        x
        for x in options.implementations
        if options.chosen or (x.name != FLEX and not x.name.endswith(("-shared", "-deterministic")))
    ]
    workloads = options.workloads(lengths=_SWEEP_LENGTHS)
    return _measure(session, "sweep", workloads, implementations, YARDSTICK)


def memory(session: Session, options: Options) -> Rows:
    """Peak memory of forward and backward, up to 131,072 tokens in one row."""
    implementations = _own_and(options, YARDSTICK, MATERIALISED)
    workloads = options.workloads(lengths=_MEMORY_LENGTHS, head_dims=(64,), masks=("full",), heads=4, tokens=None)
    return _measure(session, "memory", workloads, implementations, YARDSTICK, timed=False)


def dense(session: Session, options: Options) -> Rows:
    """A dense bias with its gradient, shared by the batch or one for each row."""
    implementations = [
        x for x in _own_and(options, MATERIALISED, "eager-bias") if not x.name.endswith("-deterministic")
    ]
    plain = options.workloads(lengths=(1024,), masks=("full",))
    workloads = (dataclasses.replace(w, dense_bias=rows) for w in plain for rows in sorted({1, w.batch}))
    return _measure(session, "dense", workloads, implementations, MATERIALISED)


def packed(session: Session, options: Options) -> Rows:
    """A batch half of which is padding: packed, padded, and in SDPA with bias and mask in one tensor."""
    padded = [x for x in _own_and(options, MATERIALISED, "eager-bias") if not x.name.endswith("-deterministic")]
    backends = [x.name.removeprefix("fat5-") for x in padded if x.own]
    implementations = [*padded, *(fat5(backend, packed=True) for backend in backends)]
    plain = options.workloads(lengths=(1024,), head_dims=(64,), masks=("full",))
    workloads = (dataclasses.replace(w, documents=half_padding(w.batch, w.length)) for w in plain)
    return _measure(session, "packed", workloads, implementations, MATERIALISED)


def documents(session: Session, options: Options) -> Rows:
    """Packed documents of 100 to 1,024 tokens, beside rows of 1,024 with about as many pairs of tokens."""
    alone = [x for x in _own_and(options, YARDSTICK) if not x.name.endswith("-deterministic")]
    side_by_side = [fat5(x.name.removeprefix("fat5-"), packed=True) for x in alone if x.own]
    for name in _PLANNING:  # what the layers of a stack share is not made in each call
        if any(x.name == f"fat5-{name}" for x in alone):
            alone.append(fat5(name, by_distance=True))
            side_by_side.append(fat5(name, packed=True, by_distance=True))
    rows: Rows = []
    for plain in options.workloads(lengths=(1024,), head_dims=(64,)):
        lengths = uniform_documents(plain.batch * plain.length, min(100, plain.length), plain.length)
        equal = max(1, round(sum(n * n for n in lengths) / plain.length**2))
        rows += _measure(session, "documents", [dataclasses.replace(plain, batch=equal)], alone, YARDSTICK)
        packed_rows = dataclasses.replace(plain, batch=len(lengths), documents=lengths)
        rows += _measure(session, "documents", [packed_rows], side_by_side, YARDSTICK)
    return rows


_PLANNING = ("hopper",)
"""Backends that have plans, see `fat5.ops.plan_attention`."""

TABLES: dict[str, Callable[[Session, Options], Rows]] = {
    "must-reach": must_reach,
    "sweep": sweep,
    "memory": memory,
    "dense": dense,
    "packed": packed,
    "documents": documents,
}


def _own_and(options: Options, *peers: str) -> list[Implementation]:
    return [x for x in options.implementations if x.name in peers or (x.own and not x.name.endswith("-shared"))]


def _measure(
    session: Session,
    table: str,
    workloads: Iterable[Workload],
    implementations: Sequence[Implementation],
    yardstick: str,
    *,
    timed: bool = True,
) -> Rows:
    rows: Rows = []
    for workload in workloads:
        stage = Stage(workload, session.device)
        bias = f"dense [{workload.dense_bias}, H, L, L]" if workload.dense_bias else "table"
        columns = {"table": table, "bias": bias}
        for implementation in implementations:
            subject = stage.subject(implementation, columns, yardstick=yardstick, timed=timed)
            rows += session.measure(subject)
    return rows
