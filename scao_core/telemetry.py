"""What happened in a step, for people and for loggers; no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepReport:
    """One call of ``step``.

    Args:
        step: number of steps taken so far in this process, this one included if it was not skipped.
        skipped: True if a gradient was not finite, so that nothing changed.
        nonfinite: names (or positions) of the parameters whose gradient was not finite on this rank.
        preconditioned: matrices that moved along a preconditioned direction.
        adam: tensors that took the Adam path.
        idle: matrices and tensors whose gradient was exactly zero; only weight decay moved them.
        refreshed: bases that were recomputed.
        failed: bases whose decomposition failed in every retry; the last good one stays.
        queued: jobs of the workers that are not done yet.
        waited: seconds for which this step waited for a basis that was due.
        degraded: bases given up after three failures in a row, which take the diagonal path until a refresh succeeds.
        ages: for each basis in use in this step ("layers.0.q_proj.weight.left"), the steps of its matrix since the snapshot
            that it was computed from; at most ``refresh_every + refresh_delay - 1`` in a healthy run.
        tiers: bytes of state on the device, on the host and in the file.
        lost_bases: bases whose checksum was wrong when they were read from the file, computed anew.
        restarted: matrices that started over because a factor's checksum was wrong.
    """

    step: int
    skipped: bool = False
    nonfinite: tuple[str, ...] = ()
    preconditioned: int = 0
    adam: int = 0
    idle: int = 0
    refreshed: int = 0
    failed: int = 0
    degraded: int = 0
    queued: int = 0
    waited: float = 0.0
    ages: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, int] = field(default_factory=dict)
    lost_bases: int = 0
    restarted: int = 0

    @property
    def oldest(self) -> int:
        """The largest of the ages, 0 without any."""
        return max(self.ages.values(), default=0)


@dataclass
class Report:
    """Totals since the optimizer was made (loading resets nothing); ``print(optimizer.report())`` shows a table."""

    steps: int = 0
    skipped_steps: int = 0
    refreshed: int = 0
    failed_refreshes: int = 0
    degraded: int = 0
    waited: float = 0.0
    lost_bases: int = 0
    restarted: int = 0
    last: StepReport | None = None
    matrices: int = 0
    adam_tensors: int = 0
    state_bytes: int = 0

    def add(self, report: StepReport) -> None:
        """Count one step."""
        self.steps += not report.skipped
        self.skipped_steps += report.skipped
        self.refreshed += report.refreshed
        self.failed_refreshes += report.failed
        self.degraded += report.degraded
        self.waited += report.waited
        self.lost_bases += report.lost_bases
        self.restarted += report.restarted
        self.last = report

    def __str__(self) -> str:
        rows = [
            ("steps taken", self.steps),
            ("steps skipped (gradient not finite)", self.skipped_steps),
            ("matrices preconditioned", self.matrices),
            ("tensors on the Adam path", self.adam_tensors),
            ("optimizer state", f"{self.state_bytes:,} bytes"),
            *((f"  of it {words}", f"{self._on(tier):,} bytes") for tier, words in _TIERS.items() if self._on(tier)),
            ("bases refreshed", self.refreshed),
            ("age of the oldest basis", f"{self.last.oldest if self.last else 0} steps"),
            ("refreshes failed", self.failed_refreshes),
            ("bases degraded to diagonal", self.degraded),
            ("waited for refreshes", f"{self.waited:.3f} s"),
            ("damaged bases computed anew", self.lost_bases),
            ("matrices that started over", self.restarted),
        ]
        return "\n".join(f"{label:<38}{value}" for label, value in rows)

    def _on(self, tier: str) -> int:
        return self.last.tiers.get(tier, 0) if self.last else 0


_TIERS = {"host": "on the host", "nvme": "in the file of offload_dir"}
StepCallback = Callable[[StepReport], None]


@dataclass
class Telemetry:
    """Counters and callbacks of one optimizer. Nothing here changes a result, so none of it is in a checkpoint."""

    totals: Report = field(default_factory=Report)
    callbacks: dict[int, StepCallback] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def __getstate__(self) -> dict[str, object]:
        # A callback may hold a file or a logger; a copied or pickled optimizer starts without any.
        return {"totals": self.totals, "callbacks": {}, "warned": set(self.warned)}

    def record(self, report: StepReport) -> None:
        """Count a step and tell the callbacks."""
        self.totals.add(report)
        for callback in list(self.callbacks.values()):
            callback(report)

    def first(self, what: str) -> bool:
        """True the first time it is asked for ``what``: a warning is given once."""
        new = what not in self.warned
        self.warned.add(what)
        return new
