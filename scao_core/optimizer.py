"""SCAO as a ``torch.optim.Optimizer``: it keeps the books; the maths is in ``engines`` and ``curvature``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # what torch.optim uses; the public name imports the compiler

from . import gather, groups, stacks
from .config import DEFAULTS, OPTION_NAMES, Options, translate_legacy
from .distributed import any_rank
from .errors import ConfigError, NonFiniteGradientError
from .moves import decay_idle, full_precision, move
from .offload import Offload
from .plan import plan_key
from .refresh import Refreshes, Tally
from .saving import SavingOptimizer
from .schedule import Turns, assign_turns
from .staging import Losses
from .telemetry import StepReport, Telemetry


class SCAO(SavingOptimizer):
    r"""Sparse Curvature-Aware Adaptive Optimizer.

    For a matrix G (r × n, r <= n) it models the second moment of the gradient as L ⊗ R with a small exact factor L (r ×
    r) and a wide factor R of a few dominant directions and a diagonal rest, and moves along L^-1/2 M R^-1/2, M being the
    momentum. Vectors, scalars and vocabulary-sized tables take the Adam path. ``reference.py`` is the same algorithm
    for one tensor.

    Args:
        params: parameters, groups (each may override every option), or ``model.named_parameters()``.
        lr: learning rate; start from the one you use with AdamW. A 0-d tensor is kept, so in-place changes are seen.
        betas: decay of the momentum and of the second moments.
        eps: added to square roots, relative to the size of the tensor's first gradient (dimensionless).
        weight_decay: decoupled, as in AdamW.
        engine: ``"kl"``, ``"soap"`` or ``"spectral"``.
        factors: ``"auto"``, or the factors of the shorter and the longer side, e.g. ``"dense,spiked"``.
        spike_rank: dominant directions kept on a wide side.
        block_size: largest block of the blocked factor.
        max_dense_dim: largest side that gets one dense factor.
        max_dim: a matrix with a longer side takes the Adam path.
        bytes_per_param: state per matrix parameter that its factors may take it to, in bytes; what fits none takes Adam's 8.
            None: 8, or 12 for soap, which also keeps a second moment.
        refresh_every: steps between two refreshes of an eigenbasis.
        refresh_delay: steps between the snapshot that a basis is computed from and its installation, less than
            ``refresh_every``. None: 0, or 3 with ``runtime="thread"``, ``"stream"`` or ``"auto"``.
        runtime: ``"staggered"`` spreads refreshes over the interval, ``"inline"`` does all at once, ``"thread"`` spreads
            them and has host threads compute them; the delay is fixed, so the speed of a thread changes no bit. ``"stream"``
            also gives their transfers from and to a GPU a stream of their own. ``"auto"`` does so where a core is spare, and
            else computes the same within the step.
        memory_budget: bytes of covariances and bases that stay on the parameters' device, as a number or text ("2GiB"); the
            rest lies on the host (pinned). None: all stay. Results are the same to the bit.
        host_budget: bytes of them that may lie on the host; needs ``offload_dir``. None: 0 there.
        offload_dir: folder, on a fast local disk, of a scratch file with what fits neither.
        damping: added to eigenvalues, relative to their mean (dimensionless). None: 0.1, and 1e-3 for a matrix whose short
            side is over 64.
        norm_rule: ``"decrease"``: with the first-order decrease of Adam's step, whose lr so carries over; or ``"none"``.
        cautious: a matrix's entries move only where the step's sign is the gradient's, and farther (Liang et al. 2024).
        nesterov: (1 - β) G + β M in place of a matrix's momentum M.
        curvature_beta: decay of the factors; None: ``betas[1]``.
        momentum_dtype: storage of the momentum, e.g. ``torch.bfloat16``; None: that for bf16 parameters, as AdamW
            keeps it, else as computed.
        stochastic_rounding: round bf16 parameters at random, without bias, when they are written.
        on_nonfinite: ``"skip"`` leaves everything as it was when a gradient holds NaN or infinity; ``"raise"`` raises.
        maximize: ascend.
        foreach: False handles one tensor at a time.
        fused, capturable, differentiable: as torch.optim.AdamW takes them; fused=True is ignored with a warning, the
            other two are refused.

    Numbers may be text ("2e-4") and pairs any sequence. Options of older SCAO code (``precond_freq``, ``k_max``, …) are
    taken with their meaning here, or with one warning that says what to use instead.

    Raises:
        ConfigError: an option has a wrong type or value, or does not exist (the message names the nearest one).
        ParameterError: a parameter is a DTensor or a flat shard.
    """

    def __init__(
        self,
        params: Any,
        lr: float | str | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        engine: str = "kl",
        factors: str = "auto",
        spike_rank: int = 3,
        block_size: int = 256,
        max_dense_dim: int = 256,
        max_dim: int = 32768,
        bytes_per_param: float | None = None,
        refresh_every: int = 10,
        refresh_delay: int | None = None,
        runtime: str = "staggered",
        memory_budget: int | str | None = None,
        host_budget: int | str | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        damping: float | None = None,
        norm_rule: str = "decrease",
        cautious: bool = True,
        nesterov: bool = True,
        curvature_beta: float | None = None,
        momentum_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
        on_nonfinite: str = "skip",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        **older: Any,
    ) -> None:
        named = {
            name: value for name, value in locals().items() if name in OPTION_NAMES and _differs(value, DEFAULTS[name])
        }
        self._telemetry, self._turns, self._verified, self._refreshes = Telemetry(), None, {}, Refreshes()
        defaults = Options.from_mapping(self._translated({**named, **older}))
        self._offload = Offload(defaults.as_dict(), self._warn_once)
        if not isinstance(params, Tensor):  # torch names that error itself
            params = groups.ordered(params)
        super().__init__(params, defaults.as_dict())

    # --- groups -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; each option may be overridden, other keys are kept as torch keeps them.

        Raises:
            ConfigError: an option is wrong, or a key is so close to an option that it must be a typing error.
            ParameterError: a parameter is a DTensor or a flat shard.
        """
        if not isinstance(param_group, dict):
            raise ConfigError(
                f"a parameter group must be a dict with the key 'params', got {type(param_group).__name__}"
            )
        group = groups.prepared(self._translated(param_group), self.defaults)
        super().add_param_group(group)
        if group["fused"]:
            self._warn_once("fused", "SCAO has no fused kernel: fused=True is ignored")
        if elements := groups.only_large_vectors(self.param_groups):
            self._warn_once(
                "flat",
                f"no parameter is a matrix, and one is a vector of {elements:,} elements: preconditioning is off. If FSDP1 or "
                "DeepSpeed flattened the model, give SCAO the original matrices",
            )

    def _translated(self, options: Mapping[str, Any]) -> dict[str, Any]:
        result, remarks = translate_legacy(options)
        if remarks:
            self._warn_once("older", "options of older SCAO code: " + "; ".join(remarks))
        return result

    # --- one step -----------------------------------------------------------------------------------------------

    @_disable_dynamo  # torch.compile runs a step as it is: it reads counters on the host
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: recomputes the loss and the gradients; called once, with gradients enabled.

        Raises:
            GradientError: a gradient is sparse or complex; nothing has changed.
            NonFiniteGradientError: a gradient is not finite and ``on_nonfinite="raise"``; nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # gradients, and one flag for the whole step, agreed by all ranks
        jobs = self._gather()
        bad = [job.name for job in jobs if not all(map(math.isfinite, job.peaks))]
        device = jobs[0].param.device if jobs else torch.device("cpu")
        if any_rank(bool(bad), device):
            self._skip(jobs, bad)
            return loss
        with full_precision({job.param.device.type for job in jobs}):
            self._advance(jobs)
        return loss

    def _gather(self) -> list[stacks.Job]:
        jobs: list[stacks.Job] = []
        self._arrange()
        for number, (group, turns) in enumerate(zip(self.param_groups, self._schedule(), strict=True)):
            plans, names = groups.Plans(group), group.get("param_names")
            first = sum(len(before["params"]) for before in self.param_groups[:number])
            for i, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                name = names[i] if names else f"{i} of group {number}"
                gather.check_gradient(param, param.grad, name)
                job = stacks.Job(param, param.grad, plans[param], group, turns[i], name, first + i)
                job.state = self.state.get(param, {})
                if job.state and not (self._verified.get(param) is job.plan and stacks.settled(job)):
                    job.state = stacks.conformed(job.state, job, self._offload.device)
                    self._offload.moved()
                jobs.append(job)
        for job in jobs:  # only now: nothing is touched if one of them is refused
            if job.state:
                self.state[job.param], self._verified[job.param] = job.state, job.plan
        # The first gradient of a tensor sets its scale; later, on a CPU, a bound on its entries will do.
        rough = [stacks.has_scale(job) and job.plan.is_matrix and job.param.device.type == "cpu" for job in jobs]
        peaks = gather.peaks([job.grad for job in jobs], [math.prod(job.plan.batch) for job in jobs], rough)
        for job, values in zip(jobs, peaks, strict=True):
            job.peaks = values
        return jobs

    def _skip(self, jobs: list[stacks.Job], bad: list[str]) -> None:
        totals = self._telemetry.totals
        what = f"gradient with NaN or infinity in parameter {', '.join(bad[:5]) or '(on another rank)'}"
        if any(job.group["on_nonfinite"] == "raise" for job in jobs):
            raise NonFiniteGradientError(
                f"{what}: nothing was changed. on_nonfinite='skip' leaves such a step out instead"
            )
        self._warn_once("skip", f"SCAO skipped a step: {what}; later ones are counted in optimizer.report()")
        last = totals.last or StepReport(0)
        self._telemetry.record(
            StepReport(totals.steps, skipped=True, nonfinite=tuple(bad), ages=last.ages, tiers=last.tiers)
        )

    def _advance(self, jobs: list[stacks.Job]) -> None:
        units: list[stacks.Unit] = []
        for job in jobs:
            if not job.state:
                self.state[job.param] = job.state = stacks.create_state(job.plan, job.param, self._offload.device)
            self._offload.settle(job.param, job.state)
            active = stacks.advance(job)
            units += active
            decay_idle(job, active)
        losses = Losses()
        failed = sum(move(stack) for stack in self._offload.staged(stacks.stacks(units), losses))
        self._refreshes.forget(losses.restarted)
        tally = self._refreshes.run(units)
        self._offload.seal_bases(tally.rebased)
        tally.failed += failed
        if tally.failed:
            self._warn_once(
                "failed",
                f"{tally.failed} eigendecompositions failed in every retry: their last good bases stay in use; later failures "
                "are counted in optimizer.report()",
            )
        self._record(jobs, units, tally, losses)

    def _schedule(self) -> list[list[Turns]]:
        now = tuple(
            (group["refresh_every"], plan_key(group), tuple((id(p), p.shape) for p in group["params"]))
            for group in self.param_groups
        )
        if self._turns is None or self._turns[0] != now:
            plans = [groups.Plans(group) for group in self.param_groups]
            self._turns = now, assign_turns(self.param_groups, plans)
        return self._turns[1]

    def _record(self, jobs: list[stacks.Job], units: list[stacks.Unit], tally: Tally, losses: Losses) -> None:
        matrices = sum(unit.job.plan.is_matrix for unit in units)
        self._telemetry.record(
            StepReport(
                step=self._telemetry.totals.steps + 1,
                preconditioned=matrices,
                adam=len(units) - matrices,
                idle=sum(len(job.peaks) for job in jobs) - len(units),
                refreshed=tally.refreshed,
                failed=tally.failed,
                degraded=tally.degraded,
                queued=tally.queued,
                waited=tally.waited,
                ages=tally.ages,
                tiers=self._offload.bytes(self.state),
                lost_bases=losses.bases,
                restarted=len(losses.restarted),
            )
        )


def _differs(value: Any, default: Any) -> bool:
    return isinstance(value, Tensor) or type(value) is not type(default) or value != default
