"""Options: numbers from any source are understood, everything else is refused with a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from scao import SCAO, ConfigError, ScaoError, UnknownOptionError


def params() -> list[Parameter]:
    return [Parameter(torch.zeros(4, 6)), Parameter(torch.zeros(3))]


def silently(**options: Any) -> SCAO:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return SCAO(params(), **options)


# --- case 56: numbers as text ----------------


@pytest.mark.parametrize("text", ["2e-4", "1e-08", "1E-4", "1.0e4", "2.0e-4", "2.e-4", " 0.1 ", "1"])
@pytest.mark.parametrize("option", ["lr", "eps", "weight_decay", "damping", "bytes_per_param"])
def test_numbers_as_text(option: str, text: str) -> None:
    yaml = pytest.importorskip("yaml")
    for value in (text, yaml.safe_load(text)):
        opt = silently(**{option: value})
        assert opt.param_groups[0][option] == float(text)
        assert type(opt.param_groups[0][option]) is float


def test_numbers_as_text_in_groups_override_the_defaults() -> None:
    a, b = params()
    opt = SCAO(
        [{"params": [a], "lr": "3e-4", "betas": "0.8,0.9"}, {"params": [b], "weight_decay": "0", "engine": "SOAP "}],
        lr="1e-3",
        weight_decay="0.1",
        refresh_every="5",
    )
    first, second = opt.param_groups
    assert (first["lr"], first["betas"], first["weight_decay"], first["engine"]) == (3e-4, (0.8, 0.9), 0.1, "kl")
    assert (second["lr"], second["betas"], second["weight_decay"], second["engine"]) == (
        1e-3,
        (0.9, 0.999),
        0.0,
        "soap",
    )
    assert all(g["refresh_every"] == 5 and type(g["refresh_every"]) is int for g in opt.param_groups)


def test_not_a_number_says_so() -> None:
    with pytest.raises(ConfigError, match="lr: expected a number, got 'fast'"):
        SCAO(params(), lr="fast")
    with pytest.raises(ValueError, match="weight_decay: expected a number"):
        SCAO(params(), weight_decay=[0.1])


@pytest.mark.parametrize("word", ["true", "True", "yes", "on", "1", True, 1])
def test_flags_as_words(word: Any) -> None:
    assert silently(maximize=word).param_groups[0]["maximize"] is True
    assert silently(foreach=word).param_groups[0]["foreach"] is True


@pytest.mark.parametrize("word", ["false", "False", "no", "off", "0", False, 0])
def test_negative_flags_as_words(word: Any) -> None:
    assert silently(maximize=word).param_groups[0]["maximize"] is False
    assert silently(fused=word).param_groups[0]["fused"] is False
    assert silently(capturable=word, differentiable=word).param_groups[0]["capturable"] is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, "torch.bfloat16", "bfloat16", "bf16", "BF16"])
def test_dtypes_by_any_name(dtype: Any) -> None:
    opt = silently(momentum_dtype=dtype)
    assert opt.param_groups[0]["momentum_dtype"] == "bfloat16"
    for p in opt.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    opt.step()
    assert all(s["exp_avg"].dtype == torch.bfloat16 for s in opt.state.values())


@pytest.mark.parametrize("word", ["none", "None", "null", "", None])
def test_nothing_as_a_word(word: Any) -> None:
    assert (
        silently(momentum_dtype=word, bytes_per_param=word, curvature_beta=word, foreach=word).param_groups[0][
            "momentum_dtype"
        ]
        is None
    )


# --- case 48: bad values ----------------

NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    *(
        ("lr", v)
        for v in (NAN, INF, -1e-3, "nan", "-1", None, [], True, torch.tensor([1.0, 2.0]), torch.tensor(NAN), 1j)
    ),
    *(("weight_decay", v) for v in (-0.1, NAN, INF, None, "heavy")),
    *(("eps", v) for v in (-1e-8, NAN, INF, "tiny")),
    *(("damping", v) for v in (-1e-3, NAN, INF)),
    *(
        ("betas", v)
        for v in ((0.9, 1.0), (1.0, 0.9), (-0.1, 0.9), (0.9,), (0.9, 0.99, 0.999), 0.9, None, "0.9", (NAN, 0.9))
    ),
    *(("betas", v) for v in ({"a": 0.9, "b": 0.95}, ("x", 0.9), [[0.9, 0.95]])),
    *(("refresh_every", v) for v in (0, -1, 2.5, NAN, INF, "often", True, None)),
    *(("spike_rank", v) for v in (0, -4, 1.5)),
    *(("block_size", v) for v in (0, -256)),
    *(("max_dense_dim", v) for v in (0, -1)),
    *(("max_dim", v) for v in (0, "large")),
    *(("bytes_per_param", v) for v in (-1, NAN, "few")),
    *(("curvature_beta", v) for v in (1.0, -0.1, NAN)),
    *(("engine", v) for v in ("k1", "", None, 3, "adam")),
    *(("runtime", v) for v in ("async", None)),
    *(("factors", v) for v in ("dense", "dense,dense,dense", "dense,spikes", None, ("dense", 3), {})),
    *(("momentum_dtype", v) for v in ("int8", torch.int32, "float33")),
    *(("on_nonfinite", v) for v in ("ignore", None)),
    *(("maximize", v) for v in ("maybe", None, 2)),
    *(("stochastic_rounding", v) for v in ("sometimes",)),
    *(("capturable", v) for v in (True, "perhaps")),
    ("differentiable", True),
    ("fused", "fast"),
    ("foreach", 7),
]


@pytest.mark.parametrize(("option", "value"), BAD, ids=lambda v: str(v)[:30])
def test_bad_values_are_refused_by_name_and_value(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option) as caught:
        SCAO(params(), **{option: value})
    assert isinstance(caught.value, ConfigError)
    if isinstance(value, (int, float, str)):
        assert repr(value) in str(caught.value)
    a, b = params()
    with pytest.raises(ConfigError, match=option):
        SCAO([{"params": [a]}, {"params": [b], option: value}])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    option=st.sampled_from(
        [
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "engine",
            "factors",
            "refresh_every",
            "damping",
            "momentum_dtype",
            "maximize",
        ]
    ),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=6),
        st.binary(max_size=4),
        st.lists(st.one_of(st.floats(), st.text(max_size=3)), max_size=3),
        st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
        st.sets(st.integers(), max_size=2),
        st.just(object()),
    ),
)
def test_any_value_is_taken_or_refused_with_a_sentence(option: str, value: Any) -> None:
    message, got = option, None
    try:
        got = SCAO(params(), **{option: value}).param_groups[0][option]
    except ScaoError as error:
        message = str(error)
    assert option in message
    assert type(got) in (float, int, bool, str, tuple, type(None))


# --- case 59: misspelt options ----------------

MISSPELT = [
    ("wieght_decay", "weight_decay"),
    ("weight_decy", "weight_decay"),
    ("refresh_evry", "refresh_every"),
    ("engin", "engine"),
    ("beta", "betas"),
    ("precond_frq", "precond_freq"),
    ("precond_frequ", "precond_freq"),
    ("k_maxx", "k_max"),
    ("momentum_dtyp", "momentum_dtype"),
    ("stochastic_roundin", "stochastic_rounding"),
]


@pytest.mark.parametrize(("word", "meant"), MISSPELT)
def test_misspelt_options_are_refused_with_the_nearest_one(word: str, meant: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"did you mean '{meant}'") as caught:
        SCAO(params(), **{word: 1})
    assert isinstance(caught.value, (TypeError, ValueError))
    assert word in str(caught.value)


@pytest.mark.parametrize(("word", "meant"), MISSPELT)
def test_misspelt_options_in_a_group_are_refused_too(word: str, meant: str) -> None:
    a, b = params()
    with pytest.raises(UnknownOptionError, match=f"did you mean '{meant}'"):
        SCAO([{"params": [a]}, {"params": [b], word: 1}])
    opt = SCAO([a])
    with pytest.raises(UnknownOptionError, match=meant):
        opt.add_param_group({"params": [b], word: 1})
    assert len(opt.param_groups) == 1


def test_the_sentence_separates_hint_and_list() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        SCAO(params(), wieght_decay=1)
    assert "'weight_decay'?" in str(caught.value)
    with pytest.raises(UnknownOptionError) as caught:
        SCAO(params(), nonsense_word=True)  # nothing is near: the list follows, after a stop
    assert "'nonsense_word' Options" not in str(caught.value)
    assert "weight_decay" in str(caught.value)


@pytest.mark.parametrize(
    "key", ["name", "initial_lr", "max_lr", "min_lr", "lr_scale", "layer_id", "swanlab", "max_momentum"]
)
def test_other_keys_of_groups_are_kept(key: str) -> None:
    """Schedulers and frameworks store their own."""
    opt = SCAO([{"params": params(), key: 0.5}])
    assert opt.param_groups[0][key] == 0.5
    assert opt.state_dict()["param_groups"][0][key] == 0.5


# --- older options ----------------

OLDER: dict[str, Any] = {
    "k_min": 2,
    "k_max": 8,
    "sparsity": 0.5,
    "max_precond_dim": 512,
    "use_int8_ema": True,
    "warmup_steps": 10,
    "min_precond_updates": 3,
    "factor_mode": "lowrank",
}


def test_older_refresh_interval_keeps_its_meaning() -> None:
    opt = silently(precond_freq="7")
    assert opt.param_groups[0]["refresh_every"] == 7
    assert "precond_freq" not in opt.param_groups[0]
    a, b = params()
    opt = SCAO([{"params": [a], "precond_freq": 3}, {"params": [b]}], precond_freq=9)
    assert [g["refresh_every"] for g in opt.param_groups] == [3, 9]


@pytest.mark.parametrize("given", [*[(k,) for k in OLDER], tuple(OLDER)], ids=str)
def test_older_options_give_one_warning_that_names_them(given: tuple[str, ...]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        opt = SCAO(params(), **{name: OLDER[name] for name in given})
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        opt.step()
    assert len(seen) == 1
    for name in given:
        assert name in str(seen[0].message)
        assert name not in opt.param_groups[0]
    opt.state_dict()


def test_older_options_as_text_and_in_groups_warn_once() -> None:
    a, b = params()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        SCAO([{"params": [a], "k_max": "8"}, {"params": [b], "sparsity": "0.5"}], use_int8_ema="true")
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"k_min": 9, "k_max": 8}, ("k_min", "k_max", "9", "8")),
        ({"precond_freq": 0}, ("precond_freq", "0")),
        ({"precond_freq": 2.5}, ("precond_freq", "2.5")),
        ({"max_precond_dim": 0}, ("max_precond_dim", "0")),
        ({"sparsity": 2}, ("sparsity", "2")),
        ({"sparsity": -0.1}, ("sparsity", "-0.1")),
        ({"k_min": 0}, ("k_min", "0")),
        ({"k_max": "many"}, ("k_max", "many")),
        ({"warmup_steps": -1}, ("warmup_steps", "-1")),
        ({"min_precond_updates": -1}, ("min_precond_updates", "-1")),
        ({"use_int8_ema": "maybe"}, ("use_int8_ema", "maybe")),
        ({"precond_freq": 5, "refresh_every": 7}, ("precond_freq", "refresh_every")),
    ],
    ids=str,
)
def test_bad_older_options_are_refused(options: dict[str, Any], names: tuple[str, ...]) -> None:
    a, b = params()
    for build in (lambda: SCAO(params(), **options), lambda: SCAO([{"params": [a]}, {"params": [b], **options}])):
        with pytest.raises(ConfigError) as caught:
            build()
        assert all(name in str(caught.value) for name in names)


# --- case 64: options of torch.optim ----------------


def test_fused_is_ignored_with_one_warning() -> None:
    a, b = params()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        opt = SCAO([{"params": [a]}, {"params": [b]}], fused=True)
        for p in (a, b):
            p.grad = torch.ones_like(p)
        opt.step()
    assert len(seen) == 1
    assert "fused" in str(seen[0].message)
    for fused in (None, False, "false", "none"):
        silently(fused=fused)


def test_the_same_options_as_adamw_are_accepted() -> None:
    """Everything that a recipe passes to torch.optim.AdamW by name, at its default."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCAO(
            params(),
            1e-3,
            (0.9, 0.999),
            1e-8,
            1e-2,
            maximize=False,
            foreach=None,
            capturable=False,
            differentiable=False,
            fused=None,
        )


# --- what is optimized ----------------


@pytest.mark.parametrize(
    "what", [None, 3, "params", [], [1.0], [{"lr": 1e-3}], [torch.zeros(3).requires_grad_() * 2]], ids=str
)
def test_parameters_that_are_none_are_refused_at_once(what: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        SCAO(what)


def test_parameters_in_a_set_are_refused() -> None:
    """Checkpoints know parameters by position, and the order of a set differs from run to run."""
    with pytest.raises((ConfigError, TypeError), match=r"order|set"):
        SCAO([{"params": set(params())}])
    with pytest.raises((ConfigError, TypeError), match=r"order|set"):
        SCAO(set(params()))


def test_parameters_from_generators_dicts_and_tuples() -> None:
    model = torch.nn.Linear(4, 6)
    for source in (
        model.parameters(),
        list(model.parameters()),
        tuple(model.parameters()),
        dict(model.named_parameters()).values(),
        model.named_parameters(),
        list(model.named_parameters()),
        (p for p in model.parameters()),
        [{"params": model.parameters()}],
        [{"params": model.named_parameters()}],
        [{"params": model.weight}, {"params": [model.bias]}],
    ):
        opt = SCAO(source)
        assert sum(len(g["params"]) for g in opt.param_groups) == 2
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step()


# --- importing ----------------


@pytest.mark.parametrize("module", ["scao_core", "scao"])
def test_importing_is_light(module: str) -> None:
    """No framework, no thread, no CUDA context, no compiler, no change of torch's settings."""
    script = f"""
        import sys, threading, torch
        def settings():
            noise = torch.get_rng_state().sum().item()
            return torch.get_num_threads(), torch.get_default_dtype(), noise, threading.active_count()
        before = settings()
        loaded = set(sys.modules)
        import {module}
        new = set(sys.modules) - loaded
        heavy = ("transformers", "peft", "axolotl", "torchtune", "trl", "accelerate", "numpy", "scipy", "datasets", "litgpt",
                 "llamafactory", "bitsandbytes", "torch._dynamo", "torch._inductor", "triton", "yaml", "omegaconf")
        bad = [m for m in new if any(m == h or m.startswith(h + ".") for h in heavy)]
        assert not bad, bad
        after = settings()
        assert before == after, (before, after)
        assert "torch._dynamo" not in sys.modules
        assert not torch.cuda.is_initialized()
        assert not torch.distributed.is_available() or not torch.distributed.is_initialized()
        """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    assert not done.stderr
