"""The tables as the terminal shows them, and what they say of the figures to reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.attention import targets
from benchmarks.attention.catalogue import YARDSTICK
from benchmarks.attention.tables import MATERIALISED, Rows
from benchmarks.session import FAILED, OK
from benchmarks.tables import Claim, format_table, number

Place = tuple[Any, ...]
Phases = dict[str, Mapping[str, Any]]

_WORKLOAD = ("dtype", "batch", "heads", "length", "head_dim", "mask", "bias")


def group(rows: Sequence[Mapping[str, Any]]) -> dict[Place, dict[str, Phases]]:
    """Return the rows that are fine by workload, implementation and phase, in their order."""
    groups: dict[Place, dict[str, Phases]] = {}
    for row in rows:
        if row["status"] == OK:
            groups.setdefault(_place(row), {}).setdefault(row["implementation"], {})[row.get("phase", "")] = row
    return groups


def describe(row: Mapping[str, Any]) -> str:
    """Return the workload of a row in a few words."""
    return _shape(_place(row))


def failures(rows: Rows) -> dict[Place, list[str]]:
    """Return the implementations that failed, by workload."""
    failed: dict[Place, list[str]] = {}
    for row in rows:
        if row["status"] == FAILED:
            failed.setdefault(_place(row), []).append(row["implementation"])
    return failed


def show_times(rows: Rows, *, compare_with: str) -> str:
    """Return a line an implementation: times of both phases, their ratios to the yardstick, and what to reach."""
    fine, failed = group(rows), failures(rows)
    phase = [f"x {compare_with}", "goal", "TF/s"]
    header = [f"{'shape':<31} implementation", "fwd ms", *phase, "bwd ms", *phase, "MiB", "gate"]
    lines = []
    for place in dict.fromkeys([*fine, *failed]):
        shape = _shape(place)
        for name, phases in fine.get(place, {}).items():
            forward, backward = phases["forward"], phases["backward"]
            goals = _goals(name, place) or (None, None)
            cells = [*_cells(forward, goals[0]), *_cells(backward, goals[1])]
            ends = [number(forward["peak_mib"], ".0f"), number(forward["gate"], ".2f")]
            lines.append([f"{shape:<31} {name}", *cells, *ends])
            shape = ""
        for name in failed.get(place, []):
            lines.append([f"{shape:<31} {name}", FAILED, *[""] * (len(header) - 2)])
            shape = ""
    return format_table(header, lines)


def show_sweep(rows: Rows) -> str:
    """Return TFLOP/s forward / backward against the length, one block for each head dimension and mask."""
    blocks: dict[Place, dict[str, dict[int, str]]] = {}
    for (dtype, _, _, length, head_dim, mask, _), implementations in group(rows).items():
        for name, phases in implementations.items():
            cell = "/".join(number(phases[phase]["tflops"], ".0f") for phase in ("forward", "backward"))
            blocks.setdefault((dtype, head_dim, mask), {}).setdefault(name, {})[length] = cell
    for (dtype, _, _, length, head_dim, mask, _), names in failures(rows).items():
        for name in names:
            blocks.setdefault((dtype, head_dim, mask), {}).setdefault(name, {})[length] = FAILED
    return "\n".join(
        _by_length(f"TFLOP/s fwd/bwd, D{head_dim} {mask} {dtype}", block)
        for (dtype, head_dim, mask), block in blocks.items()
    )


def show_memory(rows: Rows) -> str:
    """Return the peak of forward and backward in MiB against the length."""
    cells = {
        name: {length: f"{peak:.0f}" for length, peak in by_length.items()} for name, by_length in _peaks(rows).items()
    }
    for place, names in failures(rows).items():
        for name in names:
            cells.setdefault(name, {})[place[3]] = FAILED
    return _by_length("peak MiB", cells)


def _by_length(title: str, block: Mapping[str, Mapping[int, str]]) -> str:
    lengths = sorted({length for cells in block.values() for length in cells})
    lines = [[name, *(cells.get(length, "-") for length in lengths)] for name, cells in block.items()]
    return format_table([title, *map(str, lengths)], lines)


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return every figure to reach for which these rows have a measurement."""
    by_table: dict[str, list[Any]] = {}
    for row in rows:
        by_table.setdefault(row["table"], []).append(row)
    found = [*_shape_claims(by_table.get("must-reach", [])), *_dense_claims(by_table.get("dense", []))]
    found += [*_packed_claims(by_table.get("packed", [])), *_documents_claims(by_table.get("documents", []))]
    return [*found, *_memory_claims(by_table.get("memory", []))]


def _place(row: Mapping[str, Any]) -> Place:
    return tuple(row[name] for name in _WORKLOAD)


def _shape(place: Place) -> str:
    dtype, batch, heads, length, head_dim, mask, bias = place
    kind = "" if bias == "table" else f" {bias.removeprefix('dense ').split(',')[0]}]"
    return f"{dtype} B{batch} H{heads} L{length} D{head_dim} {mask}{kind}"


def _cells(row: Mapping[str, Any], goal: float | None) -> list[str]:
    return [number(row["p50_ms"]), number(row["ratio"], ".2f"), number(goal, ".2f"), number(row["tflops"], ".0f")]


def _goals(name: str, place: Place) -> tuple[float, float] | None:
    """Return what an implementation should reach at this workload, if it is one of those with a figure."""
    _, batch, heads, length, head_dim, mask, _ = place
    standard = batch * length == 16_384 and heads == 12
    return targets.RATIOS.get(name, {}).get((length, head_dim, mask)) if standard else None


def _own(implementations: Mapping[str, Phases]) -> Iterator[tuple[str, Phases]]:
    return ((name, phases) for name, phases in implementations.items() if name.startswith("fat5-"))


def _speed_ups(phases: Phases, slower: Phases) -> tuple[float, float]:
    forward, backward = (slower[phase]["p50_ms"] / phases[phase]["p50_ms"] for phase in ("forward", "backward"))
    return forward, backward


def _shape_claims(rows: Rows) -> Iterator[Claim]:
    for place, implementations in group(rows).items():
        for name, phases in _own(implementations):
            goals = _goals(name, place)
            if name.endswith("-deterministic") and _goals(name.removesuffix("-deterministic"), place):
                text = f"{name} backward, {_shape(place)}, over {YARDSTICK}"
                yield Claim(text, phases["backward"]["ratio"], targets.DETERMINISTIC_BACKWARD, at_most=True)
            for phase, goal in zip(("forward", "backward"), goals or (), strict=False):
                text = f"{name} {phase}, {_shape(place)}, over {YARDSTICK}"
                yield Claim(text, phases[phase]["ratio"], goal, at_most=True)
            if goals and place[3] == 1024 and place[4] == 64 and MATERIALISED in implementations:
                speed_ups = _speed_ups(phases, implementations[MATERIALISED])
                for phase, speed_up, goal in zip(phases, speed_ups, targets.SPEED_UP_OVER_MATERIALISED, strict=True):
                    yield Claim(f"{name} {phase}, {_shape(place)}, faster than {MATERIALISED}", speed_up, goal)


def _dense_claims(rows: Rows) -> Iterator[Claim]:
    for place, implementations in group(rows).items():
        for name, phases in _own(implementations):
            if MATERIALISED in implementations:
                speed_ups = _speed_ups(phases, implementations[MATERIALISED])
                for phase, speed_up, goal in zip(phases, speed_ups, targets.DENSE_SPEED_UP, strict=True):
                    yield Claim(f"{name} {phase}, {_shape(place)}, faster than {MATERIALISED}", speed_up, goal)


def _packed_claims(rows: Rows) -> Iterator[Claim]:
    for place, implementations in group(rows).items():
        for name, phases in _own(implementations):
            if name.endswith("-packed") and MATERIALISED in implementations:
                slower = sum(row["p50_ms"] for row in implementations[MATERIALISED].values())
                speed_up = slower / sum(row["p50_ms"] for row in phases.values())
                text = f"{name} forward + backward, {_shape(place)}, faster than padded {MATERIALISED}"
                yield Claim(text, speed_up, targets.PACKED_SPEED_UP)


def _documents_claims(rows: Rows) -> Iterator[Claim]:
    """Compare each packed implementation with itself on rows without padding, at the same head dimension and mask."""
    rates: dict[Place, float] = {}
    for place, implementations in group(rows).items():
        dtype, _, heads, length, head_dim, mask, _ = place
        for name, phases in _own(implementations):
            for phase, row in phases.items():
                rates[name, phase, dtype, heads, length, head_dim, mask] = row["tflops"]
    for (name, phase, *rest), rate in rates.items():
        plain = rates.get((name.replace("-packed", ""), phase, *rest))
        if "-packed" in name and plain is not None:
            dtype, _, _, head_dim, mask = rest
            text = (
                f"{name} {phase}, documents of 100 to 1,024 tokens, {dtype} D{head_dim} {mask}, TFLOP/s over rows alone"
            )
            yield Claim(text, rate / plain, targets.DOCUMENTS_SHARE)


def _peaks(rows: Rows) -> dict[str, dict[int, float]]:
    peaks: dict[str, dict[int, float]] = {}
    for place, implementations in group(rows).items():
        for name, phases in implementations.items():
            (row,) = phases.values()
            if row["peak_mib"] is not None:
                peaks.setdefault(name, {})[place[3]] = row["peak_mib"]
    return peaks


def _memory_claims(rows: Rows) -> Iterator[Claim]:
    peaks = _peaks(rows)
    for name, by_length in peaks.items():
        if not name.startswith("fat5-") or 8192 not in by_length:
            continue
        at_8192, longest = by_length[8192], max(by_length)
        if 8192 in peaks.get(YARDSTICK, {}):
            ratio = at_8192 / peaks[YARDSTICK][8192]
            yield Claim(f"{name} peak memory at L8192, over {YARDSTICK}", ratio, targets.MEMORY_AT_8192, at_most=True)
        if longest > 8192:
            growth = by_length[longest] / (at_8192 * longest / 8192)
            text = f"{name} peak memory at L{longest}, over linear growth from L8192"
            yield Claim(text, growth, targets.LINEAR_GROWTH, at_most=True)
