"""How each optimizer of a comparison is built from named parameters, with its options checked.

A builder takes ``(named, lr, options, weight_decay)``. ``options`` come from YAML or a command line, so numbers may be
text and tuples may be lists. Where a default here differs from the library's, the builder says so and why; every one can
be overridden by an option.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from scao_tools.errors import MissingPackageError, OptionError
from scao_tools.peer_packages import runs_isolated

if TYPE_CHECKING:
    import torch

    Named = Mapping[str, torch.nn.Parameter]
    Optimizer = torch.optim.Optimizer

OLDER_SCAO = "scao==0.2.4"
# Set by the comparison itself, the same for all optimizers.
SHARED = ("lr", "weight_decay")


def adamw(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """torch's AdamW in its foreach form."""
    import torch

    return _construct("adamw", torch.optim.AdamW, named.values(), lr, weight_decay, {"foreach": True}, options)


def adamw_fused(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """torch's AdamW as one kernel."""
    import torch

    return _construct("adamw-fused", torch.optim.AdamW, named.values(), lr, weight_decay, {"fused": True}, options)


def adamw_cautious(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """AdamW with the cautious mask that SCAO has: what the mask gives without any curvature."""
    from scao_tools.cautious import CautiousAdamW

    return _construct("adamw-cautious", CautiousAdamW, named.values(), lr, weight_decay, {"foreach": True}, options)


def adamw8bit(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """bitsandbytes' AdamW; a tensor of fewer than ``min_8bit_size`` (4096) elements keeps 32-bit state there."""
    factory = importlib.import_module("bitsandbytes").optim.AdamW8bit
    return _construct("adamw8bit", factory, named.values(), lr, weight_decay, {}, options)


def loraplus(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """LoRA+ (arXiv 2402.12354): AdamW where A has the rate ``lr`` and B ``ratio`` times it.

    The groups are those of PEFT's ``create_loraplus_optimizer``, which needs a whole model: ``lora_B`` and vectors are
    fast, LoRA on embeddings has ``embedding_lr``, and biases have no weight decay. The paper and PEFT advise to lower ``lr``
    (by half, say) against plain LoRA.
    """
    import torch

    own, rest = _split("loraplus", torch.optim.AdamW, options, ratio=16.0, embedding_lr=1e-6)
    if own["ratio"] <= 0:
        raise OptionError(f"loraplus: ratio={own['ratio']:g} must be above 0; the paper uses 16")
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in named.items():
        if "lora_embedding_" in name:
            rate = own["embedding_lr"]
        else:
            rate = lr * own["ratio"] if "lora_B" in name or parameter.ndim == 1 else lr
        decay = 0.0 if "bias" in name else weight_decay
        groups.setdefault((rate, decay), []).append(parameter)
    made = [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]
    return _construct("loraplus", torch.optim.AdamW, made, lr, weight_decay, {"foreach": True}, rest)


def riemannian(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """PEFT's Riemannian-preconditioned LoRA (arXiv 2402.02347) over AdamW; ``reg`` damps the r × r matrices."""
    import torch

    optimizers: Any = importlib.import_module("peft.optimizers")
    if not hasattr(optimizers, "create_riemannian_optimizer"):
        raise MissingPackageError("the optimizer 'riemannian' needs PEFT 0.21; run: pip install --upgrade 'peft>=0.21'")
    own, rest = _split("riemannian", torch.optim.AdamW, options, reg=1e-2)
    # It asks a model for its parameters and for nothing else.
    model = SimpleNamespace(named_parameters=named.items, parameters=named.values)

    def factory(_: object, **arguments: Any) -> Optimizer:
        made: Optimizer = optimizers.create_riemannian_optimizer(model, torch.optim.AdamW, **own, **arguments)
        return made

    return _construct(
        "riemannian", factory, (), lr, weight_decay, {"foreach": True}, rest, known=option_names(torch.optim.AdamW)
    )


def muon(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """torch's Muon for matrices; vectors, embeddings and output heads go to AdamW, as its authors do.

    ``adjust_lr_fn`` is "match_rms_adamw" here, so that both parts share AdamW's learning rate; torch's is "original".
    """
    import torch

    from scao_tools.combined import CombinedOptimizer

    factory = getattr(torch.optim, "Muon", None)
    if factory is None:
        raise MissingPackageError("the optimizer 'muon' needs PyTorch 2.9; run: pip install --upgrade 'torch>=2.9'")
    matrices = [parameter for name, parameter in named.items() if _is_hidden_matrix(name, parameter)]
    taken = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in named.values() if id(parameter) not in taken]
    ours = {"adjust_lr_fn": "match_rms_adamw"}
    parts: list[Optimizer] = []
    # Muon is built in any case, so that its options are checked; torch refuses an optimizer without a parameter.
    made = _construct("muon", factory, matrices or [torch.zeros(1, 1)], lr, weight_decay, ours, options)
    if matrices:
        parts.append(made)
    if others:
        parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, foreach=True))
    return CombinedOptimizer(parts)


def _is_hidden_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    # The module that owns a parameter comes before its last dot; adapters on a head are owned by their adapter's name.
    owner = name.split(".")[-2] if "." in name else ""
    table = "embed" in owner or owner in ("lm_head", "wte", "wpe")
    return parameter.ndim == 2 and not table


def soap(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """pytorch_optimizer's SOAP. A side longer than ``max_precondition_dim`` is left unrotated.

    It is 256 here, the largest side to which SCAO gives a dense factor, and 10000 in the library, whose default builds
    two matrices of 1536 × 1536 for a LoRA matrix of 16 × 1536. The library does not move anything in the first step.
    """
    factory = importlib.import_module("pytorch_optimizer").SOAP
    return _construct("soap", factory, named.values(), lr, weight_decay, {"max_precondition_dim": 256}, options)


def shampoo(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """pytorch_optimizer's ScalableShampoo, set up for runs of some hundred steps.

    The library refreshes every 1000 steps and waits for step 25, so such a run would hardly be preconditioned. It takes
    step sizes from SGD and sums them up, so its learning rates have a scale of their own; RMSProp's, averaged, have Adam's.
    It flattens small matrices, which are then not preconditioned. Its second moments have no bias correction, so a decay
    of 0.999 would make the first steps 30 times too large.
    Sides longer than ``block_size`` are cut into blocks, 512 in the library.
    """
    factory = importlib.import_module("pytorch_optimizer").ScalableShampoo
    ours = {
        "betas": (0.9, 0.95),
        "start_preconditioning_step": 10,
        "preconditioning_compute_steps": 10,
        "graft_type": 3,  # LayerWiseGrafting.RMSPROP
        "moving_average_for_momentum": True,
        "decoupled_weight_decay": True,
        "shape_interpretation": False,
        "block_size": 128,
    }
    return _construct("shampoo", factory, named.values(), lr, weight_decay, ours, options)


def schedulefree(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """Schedule-free AdamW, in training mode. Call its ``eval()`` before an evaluation and ``train()`` after it."""
    factory = importlib.import_module("schedulefree").AdamWScheduleFree
    optimizer: Any = _construct("schedulefree", factory, named.values(), lr, weight_decay, {}, options)
    optimizer.train()
    made: Optimizer = optimizer
    return made


def scao(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """Ours; it checks its options itself and takes them as text, too."""
    from scao_core import SCAO, ScaoError

    _refuse_shared("scao", options)
    try:
        return SCAO(list(named.values()), lr=lr, weight_decay=weight_decay, **options)
    except ScaoError as error:
        raise OptionError(f"scao: {error}") from error


def older_scao(named: Named, lr: float, options: Mapping[str, Any], weight_decay: float) -> Optimizer:
    """The scao 0.2.4 that was published before this project's rewrite, with its own defaults."""
    if not runs_isolated(OLDER_SCAO):
        raise OptionError(
            f"older-scao is {OLDER_SCAO}, which has the name of our own package, so it cannot be used in this process; "
            "start another with scao_tools.peer_packages.peer_environment"
        )
    factory = importlib.import_module("scao").SCAO
    return _construct("older-scao", factory, list(named.values()), lr, weight_decay, {}, options)


def option_names(factory: Callable[..., Any]) -> tuple[str, ...]:
    """The named arguments of an optimizer's class, without parameters and what the comparison sets."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    arguments = list(inspect.signature(factory).parameters.values())[1:]
    return tuple(argument.name for argument in arguments if argument.kind in named and argument.name not in SHARED)


def plain(value: Any) -> Any:
    """A value from YAML or a command line as Python has it: numbers out of text, tuples out of lists."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _construct(
    name: str,
    factory: Callable[..., Any],
    params: Iterable[Any],
    lr: float,
    weight_decay: float,
    ours: Mapping[str, Any],
    options: Mapping[str, Any],
    known: Collection[str] = (),
) -> Optimizer:
    _refuse_unknown(name, options, known or option_names(factory))
    given = {key: plain(value) for key, value in options.items()}
    try:
        made: Optimizer = factory(list(params), lr=lr, weight_decay=weight_decay, **{**ours, **given})
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"{name}: {error}") from error
    return made


def _split(
    name: str, factory: Callable[..., Any], options: Mapping[str, Any], **own: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """Options that are numbers of our own, with their defaults, and those that go to ``factory``."""
    _refuse_unknown(name, options, (*own, *option_names(factory)))
    for key in own:
        value = plain(options.get(key, own[key]))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise OptionError(f"{name}: {key}={options[key]!r} must be a number that is at least 0")
        own[key] = float(value)
    return own, {key: value for key, value in options.items() if key not in own}


def _refuse_shared(name: str, options: Mapping[str, Any]) -> None:
    for key in SHARED:
        if key in options:
            raise OptionError(f"{name}: {key!r} is set for all optimizers together; take it out of the options")


def _refuse_unknown(name: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    _refuse_shared(name, options)
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise OptionError(f"{name}: unknown option {key!r}; {hint}(known: {', '.join(known)})")
