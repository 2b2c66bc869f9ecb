"""One run of one case: gate, time, record."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe_environment
from benchmarks.results import append_rows, write_json
from benchmarks.subject import Phase, Prepared, Subject
from benchmarks.timing import QUICK, Budget, measure_peak, measure_time, release_memory

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"


class Session:
    """Measures subjects and keeps the rows; each row is on disk before the next subject starts.

    Args:
        case: Name of the case.
        quick: Fewer repetitions; a case may leave things out too.
        results: Folder of the CSV files, or None to save nothing.
        json_file: File that gets all rows of this command.
        earlier_rows: Rows of the cases that ran before in this command, for `json_file`.
        command: What measures the same again; each row says it.

    Attributes:
        rows: All rows of this command.
        failures: Number of subjects of this case that failed.
        device: Where to measure: the current GPU if there is one.
        quick: As given.
    """

    def __init__(
        self,
        case: str,
        *,
        quick: bool = False,
        results: Path | None = None,
        json_file: Path | None = None,
        earlier_rows: Sequence[dict[str, Any]] = (),
        command: str | None = None,
    ) -> None:
        self.rows = list(earlier_rows)
        self.failures = 0
        self.quick = quick
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._case = case
        self._csv = None if results is None else results / f"{case}.csv"
        self._json = json_file
        self._budget = QUICK if quick else Budget()
        self._date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._origin = describe_environment() | ({} if command is None else {"command": command})
        self._yardsticks: dict[tuple, float] = {}

    def measure(self, subject: Subject) -> list[dict[str, Any]]:
        """Gate one implementation, time its phases, record and return a row for each phase.

        Whatever the implementation raises becomes one row with status FAILED and the error, and the run goes on: one
        peer that breaks on a card must not hide the others.
        """
        base = {**subject.parameters, "implementation": subject.implementation}
        if subject.unavailable is not None:
            return self.record([base | {"status": SKIPPED, "error": subject.unavailable}])
        started = time.perf_counter()
        try:
            rows = self._measured(subject, base)
        except Exception as error:
            self.failures += 1
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            rows = [base | {"status": FAILED, "error": message[:300]}]
        release_memory()
        _progress(subject, rows, time.perf_counter() - started)
        return self.record(rows)

    def record(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Complete rows with the run's columns, keep them, save them, and return them."""
        start = {"case": self._case, "date": self._date}
        complete = [start | dict(row) | self._origin for row in rows]
        self.rows += complete
        if self._csv is not None:
            append_rows(self._csv, complete)
        if self._json is not None:
            write_json(self._json, self.rows)
        return complete

    def _measured(self, subject: Subject, base: Mapping[str, Any]) -> list[dict[str, Any]]:
        prepared = subject.prepare()
        base = {**base, "status": OK, "gate": prepared.check(), **prepared.figures()}
        rows = [base | self._time(subject, phase) for phase in prepared.phases] or [base]
        peak = self._peak(prepared)
        return [row | {"peak_mib": peak} for row in rows]

    def _time(self, subject: Subject, phase: Phase) -> dict[str, Any]:
        device = torch.device("cpu") if phase.on_host else self.device
        timing = measure_time(phase.prepare(), device, self._budget)
        median = timing.p50_ms
        place = (*sorted(subject.parameters.items()), phase.name)
        if subject.implementation == subject.yardstick:
            self._yardsticks[place] = median
        unit = self._yardsticks.get(place) if subject.yardstick is not None else None
        return {
            "phase": phase.name,
            "repetitions": timing.repetitions,
            "p20_ms": timing.p20_ms,
            "p50_ms": median,
            "p80_ms": timing.p80_ms,
            "host_ms": timing.host_ms,
            "tflops": None if phase.flops is None else phase.flops / median / 1e9,
            "gb_per_s": None if phase.bytes is None else phase.bytes / median / 1e6,
            "yardstick": subject.yardstick,
            "ratio": None if unit is None else median / unit,
            **{f"{name}_per_s": amount / median * 1e3 for name, amount in phase.amounts.items()},
        }

    def _peak(self, prepared: Prepared) -> float | None:
        if prepared.peak is None:
            return None
        peak = measure_peak(prepared.peak, self.device)
        return None if peak is None else peak + prepared.held_mib


def _progress(subject: Subject, rows: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Say what was measured while the run goes on; the tables come at the end."""
    place = " ".join(str(value) for value in subject.parameters.values())
    times = ", ".join(f"{row['phase']} {row['p50_ms']:.3f} ms" for row in rows if "p50_ms" in row)
    what = rows[0].get("error") or times or rows[0]["status"]
    print(f"{place} {subject.implementation}: {what} ({seconds:.1f} s)", file=sys.stderr, flush=True)
