"""The Hugging Face door: SCAO by its class, by ``optim="scao"``, in the Trainer's logs, and on PEFT's adapters."""

import json
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

from comparing import Tokens
from scao_core import SCAO, ConfigError, ParameterError, UnknownOptionError
from scao_integrations import hf_trainer as door
from scao_integrations import transformers_names

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
loraplus = pytest.importorskip("peft.optimizers")


def tiny():
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


def arguments(folder, **changes):
    return transformers.TrainingArguments(
        str(folder),
        **{
            "max_steps": 6,
            "save_strategy": "no",
            "logging_steps": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 2e-3,
            "weight_decay": 0.1,
            "adam_beta2": 0.99,
            "adam_epsilon": 1e-7,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **changes,
        },
    )


def build(folder, kwargs=None, model=None, **changes):
    model = tiny() if model is None else model
    return transformers.Trainer(model, arguments(folder, **changes), train_dataset=Tokens(), **(kwargs or {}))


def train(folder, kwargs=None, model=None, resume=None, **changes):
    trainer = build(folder, kwargs, model, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def inner(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def assert_same(a, b):
    for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def named():
    with door.registered():
        yield


# --- by its class -----------------------------------------------------------------------------------------------------


def test_settings_of_the_arguments_reach_scao(tmp_path):
    trainer = train(tmp_path, door.scao_trainer_kwargs(spike_rank="8"))
    optimizer = inner(trainer)
    assert type(optimizer) is SCAO
    assert optimizer.report().steps == 6
    assert optimizer.report().matrices > 0
    wanted = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-7, "spike_rank": 8}
    assert {name: optimizer.defaults[name] for name in wanted} == wanted
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_given_options_win_and_text_is_converted(tmp_path):
    trainer = build(tmp_path, door.scao_trainer_kwargs(lr="2e-4", betas="0.8,0.95", eps="1e-6", precond_freq=5))
    defaults = trainer.create_optimizer().defaults
    assert (defaults["lr"], defaults["betas"], defaults["eps"]) == (2e-4, (0.8, 0.95), 1e-6)
    assert defaults["refresh_every"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spike_rnk": 8}, "did you mean 'spike_rank'"),
        ({"damping": "much"}, "damping: expected a number"),
        ({"params": 1}, "unknown option 'params'"),
    ],
)
def test_wrong_options_are_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        door.scao_trainer_kwargs(**options)


def test_the_kwargs_without_their_callback_do_not_train_with_another_learning_rate(tmp_path):
    kwargs = door.scao_trainer_kwargs()
    trainer = build(tmp_path, {"optimizer_cls_and_kwargs": kwargs["optimizer_cls_and_kwargs"]})
    with pytest.raises(ConfigError, match="give the Trainer the callbacks too"):
        trainer.create_optimizer()


def test_a_learning_rate_that_changed_after_the_trainer_was_built_is_refused(tmp_path):
    trainer = build(tmp_path, door.scao_trainer_kwargs())
    trainer.args.learning_rate = 1.0
    with pytest.raises(ConfigError, match=r"lr is 1\.0 in the TrainingArguments but 0\.002 in SCAO"):
        trainer.train()


# --- by its name ------------------------------------------------------------------------------------------------------


def test_name_and_class_are_the_same_bit_for_bit(tmp_path, named):
    options = {"spike_rank": 2, "damping": 1e-2, "betas": (0.8, 0.95)}
    by_class = train(tmp_path, door.scao_trainer_kwargs(**options))
    by_name = train(tmp_path, optim="scao", optim_args="spike_rank=2, damping=1e-2,betas=0.8,0.95")
    assert type(inner(by_name)) is SCAO
    assert inner(by_name).defaults == inner(by_class).defaults
    assert_same(by_class, by_name)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("spike_rnk=8", UnknownOptionError, "did you mean 'spike_rank'"),
        ("spike_rank", ConfigError, "expected name=value"),
        ("spike_rank=many", ConfigError, "spike_rank='many' must be an integer"),
        ("factors=dense,spikd", ConfigError, "did you mean 'spiked'"),
        ("weight_decay=0.3", ConfigError, r"TrainingArguments.weight_decay \(here 0.1\)"),
    ],
)
def test_wrong_optim_args_are_refused_with_the_arguments(tmp_path, named, text, error, message):
    with pytest.raises(error, match=message):
        arguments(tmp_path, optim="scao", optim_args=text)


def test_resume_equals_an_uninterrupted_run(tmp_path, named):
    settings = {"optim": "scao", "optim_args": "refresh_every=2", "save_strategy": "steps", "save_steps": 3}
    whole = train(tmp_path, **settings)
    assert_same(whole, train(tmp_path, resume=str(tmp_path / "checkpoint-3"), **settings))


def test_arguments_survive_pickle_and_json(tmp_path, named):
    args = arguments(tmp_path, optim="scao")
    assert pickle.loads(pickle.dumps(args)).optim == args.optim == "scao"
    assert pickle.loads(pickle.dumps(args)).optim is args.optim
    assert json.loads(args.to_json_string())["optim"] == args.to_dict()["optim"] == "scao"
    assert args.set_optimizer(name="scao", args="spike_rank=8").optim_args == "spike_rank=8"


def test_command_lines_know_the_name(named, tmp_path):
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "scao", "--use_cpu"])
    assert args.optim == "scao"


def test_unregister_restores_the_very_objects(tmp_path):
    names = transformers.training_args.OptimizerNames

    def parts():
        owners = (
            (transformers.Trainer, "get_optimizer_cls_and_kwargs"),
            (transformers.TrainingArguments, "__post_init__"),
        )
        return [vars(owner)[name] for owner, name in owners]

    before, members, attributes = parts(), list(names), set(vars(names))
    door.register()
    door.register()
    ours = parts()
    assert list(names) == [*members, "scao"]
    assert names("scao") is names["SCAO"] is names.SCAO
    door.register()
    assert all(a is b for a, b in zip(parts(), ours, strict=True))
    door.unregister()
    door.unregister()
    assert all(a is b for a, b in zip(parts(), before, strict=True))
    assert list(names) == members
    assert set(vars(names)) == attributes
    with pytest.raises(ValueError, match="scao is not a valid OptimizerNames"):
        arguments(tmp_path, optim="scao")


def test_other_names_are_as_before(tmp_path):
    get = transformers.Trainer.get_optimizer_cls_and_kwargs
    plain = {name: get(arguments(tmp_path, optim=name)) for name in ("adamw_torch", "sgd", "adafactor", "rmsprop")}
    with door.registered():
        again = transformers.Trainer.get_optimizer_cls_and_kwargs
        assert plain == {name: again(arguments(tmp_path, optim=name)) for name in plain}
        with pytest.raises(ValueError, match="nonsense is not a valid OptimizerNames"):
            arguments(tmp_path, optim="nonsense")


def test_a_registration_inside_another_stays(named):
    with door.registered():
        pass
    assert "scao" in list(transformers.training_args.OptimizerNames)


def test_another_scao_is_refused_and_left_alone(named, monkeypatch):
    post_init = transformers.TrainingArguments.__post_init__
    with monkeypatch.context() as patch:
        patch.setattr(transformers_names, "_patches", [])  # as a process in which somebody else added the name
        with pytest.raises(ConfigError, match="already means something else"):
            door.register()
    assert transformers.TrainingArguments.__post_init__ is post_init


def test_a_later_change_is_not_dropped(named, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(transformers.TrainingArguments, "__post_init__", lambda self: None)
        with pytest.raises(ConfigError, match=r"TrainingArguments\.__post_init__ was replaced after"):
            door.unregister()
    assert "scao" in list(transformers.training_args.OptimizerNames)


def test_importing_the_door_loads_and_changes_nothing():
    code = (
        "import sys; from scao_integrations import hf_trainer; assert 'transformers' not in sys.modules; "
        "from transformers.training_args import OptimizerNames as names; assert 'scao' not in list(names); "
        "hf_trainer.register(); assert 'scao' in list(names)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("version", "message"), [("4.40.1", "found 4.40.1; run: pip install"), (None, "run: pip")])
def test_a_missing_or_old_transformers_is_one_sentence(monkeypatch, version, message):
    if version:
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    for ask in (door.register, door.scao_trainer_kwargs):
        with pytest.raises(door.FrameworkError, match=message):
            ask()


# --- the callback -----------------------------------------------------------------------------------------------------


def test_values_reach_the_history_and_every_logger(tmp_path, named, monkeypatch):
    seen = []

    class Logger(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    # Where the Trainer puts those of `report_to`: before the callbacks it is given.
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS, Logger])
    callbacks = {"callbacks": [door.ScaoCallback()]}
    trainer = train(tmp_path, callbacks, optim="scao", optim_args="refresh_every=1", lr_scheduler_type="constant")
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in history] == [2, 4, 6]
    wanted = {
        "scao/skipped_steps": 0,
        "scao/refresh_age": 0,
        "scao/failed_refreshes": 0,
        "scao/degraded_bases": 0,
        "scao/queued_refreshes": 0,
        "scao/waited_seconds": 0.0,
        "scao/lost_blocks": 0,
        "scao/device_bytes": trainer.optimizer.optimizer.report().state_bytes,
        "scao/host_bytes": None,  # nothing is there
        "scao/lr_0": 2e-3,
        "scao/lr_1": 2e-3,
    }
    assert len([entry for entry in seen if "loss" in entry]) == 3
    for entry in [*history, *(entry for entry in seen if "loss" in entry)]:
        assert {name: entry.get(name) for name in wanted} == wanted
    assert not any("scao/lr_0" in entry for entry in trainer.state.log_history if "train_runtime" in entry)


def test_skipped_steps_are_counted(tmp_path):
    class Spoil(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                next(p for p in model.parameters() if p.grad is not None).grad.fill_(float("nan"))

    kwargs = door.scao_trainer_kwargs()
    kwargs["callbacks"].append(Spoil())
    with pytest.warns(UserWarning, match="skipped a step"):
        trainer = train(tmp_path, kwargs)
    assert [e["scao/skipped_steps"] for e in trainer.state.log_history if "loss" in e] == [0, 1, 1]
    # Its last turn was at step 4.
    assert [e["scao/refresh_age"] for e in trainer.state.log_history if "loss" in e][-1] == 1


def test_without_scao_there_is_one_warning_and_nothing_else(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = train(tmp_path, {"callbacks": [door.ScaoCallback()]}, optim="adamw_torch")
    assert sum("ScaoCallback has nothing to report: the optimizer is AdamW" in str(w.message) for w in caught) == 1
    assert not any("scao" in name for entry in trainer.state.log_history for name in entry)


# --- what would drop SCAO ---------------------------------------------------------------------------------------------


class Loaded:
    """As transformers keeps a DeepSpeed config."""

    def __init__(self, **config):
        self.config = config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim_target_modules": ["q_proj"]}, "optim_target_modules=.* would have no effect"),
        ({"hf_deepspeed_config": Loaded(optimizer={"type": "AdamW"})}, '"optimizer" block .* would replace SCAO'),
        (
            {"hf_deepspeed_config": Loaded(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})},
            "ZeRO-Offload replaces it by DeepSpeedCPUAdam",
        ),
        ({"hf_deepspeed_config": Loaded(zero_optimization={"stage": 1})}, r"ZeRO \(stage 1\) hides the matrices"),
        ({"weight_decay": 0.3}, r"weight_decay=0.1 would have no effect.*\(here 0.3\)"),
    ],
)
def test_conflicts_are_refused_before_training(tmp_path, named, changes, message):
    for settings, kwargs in (
        ({"optim": "scao", "optim_args": "weight_decay=0.1"}, {}),
        ({}, door.scao_trainer_kwargs(weight_decay=0.1)),
    ):
        args = arguments(tmp_path, **settings)
        for name, value in changes.items():
            setattr(args, name, value)
        with pytest.raises(ConfigError, match=message):
            transformers.Trainer(tiny(), args, train_dataset=Tokens(), **kwargs).create_optimizer()


def test_a_deepspeed_optimizer_block_is_refused_with_the_arguments(tmp_path, named, monkeypatch):
    """There the Trainer would never ask for an optimizer, so the arguments must refuse."""
    monkeypatch.setattr(transformers.TrainingArguments, "hf_deepspeed_config", Loaded(optimizer={}), raising=False)
    arguments(tmp_path, optim="adamw_torch")
    monkeypatch.setattr(
        transformers.TrainingArguments, "hf_deepspeed_config", Loaded(optimizer={"type": "Adam"}), raising=False
    )
    arguments(tmp_path, optim="adamw_torch")
    with pytest.raises(ConfigError, match='"optimizer" block'):
        arguments(tmp_path, optim="scao")


def test_scaos_refusal_of_flat_shards_surfaces(tmp_path, named):
    model = tiny()
    next(model.parameters())._is_flat = True  # as FSDP1 marks its flat parameter
    with pytest.raises(ParameterError, match=r"got a flat shard .* from FSDP1 or DeepSpeed ZeRO"):
        train(tmp_path, model=model, optim="scao")


# --- PEFT -------------------------------------------------------------------------------------------------------------


def adapted(**config):
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], **config)
    return peft.get_peft_model(tiny(), lora)


def assert_preconditioned(optimizer):
    """Every adapter matrix has the state of a preconditioned one, and nothing that is frozen has any."""
    planned = optimizer.plans()
    assert sum(plan.is_matrix for _, plan in planned) >= 6
    for param, plan in planned:
        sides = {key.partition("_")[0] for key in optimizer.state[param]} & {"left", "right"}
        assert sides == ({"left", "right"} if plan.is_matrix else set())
    assert len(optimizer.state) == len(planned)


@pytest.mark.parametrize(
    "config",
    [{}, {"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 4}}],
    ids=["lora", "dora", "rslora", "rank_pattern"],
)
def test_adapters_train(tmp_path, config):
    model = adapted(**config)
    before = [p.clone() for p in model.parameters() if p.requires_grad]
    trainer = train(tmp_path, door.scao_trainer_kwargs(), model=model, max_steps=2)
    assert_preconditioned(inner(trainer))
    after = [p for p in model.parameters() if p.requires_grad]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_lora_plus(tmp_path):
    model = adapted()
    optimizer = loraplus.create_loraplus_optimizer(
        model, SCAO, lr=1e-3, loraplus_lr_ratio=16, betas=(0.9, 0.99), spike_rank=2
    )
    kwargs = {"optimizers": (optimizer, None), "callbacks": [door.ScaoCallback()]}
    trainer = train(tmp_path, kwargs, model=model, max_steps=2, logging_steps=1, lr_scheduler_type="constant")
    assert inner(trainer) is optimizer
    assert_preconditioned(optimizer)
    rates = {group["lr"] for group in optimizer.param_groups if group["params"]}
    assert rates == {1e-3, 16e-3}
    assert {trainer.state.log_history[0][f"scao/lr_{i}"] for i in range(4)} >= rates


def test_two_half_batches_are_one(tmp_path):
    """Gradient accumulation: the same gradient but for the order of its sums, so the same step but for rounding."""
    settings = {"max_steps": 3, "max_grad_norm": 0.0}
    whole = train(tmp_path, door.scao_trainer_kwargs(), per_device_train_batch_size=4, **settings)
    halves = train(
        tmp_path,
        door.scao_trainer_kwargs(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **settings,
    )
    assert inner(halves).report().steps == 3
    start = [p.clone() for p in tiny().parameters()]
    for a, b, p in zip(whole.model.parameters(), halves.model.parameters(), start, strict=True):
        moved = (a - p).norm()
        assert moved > 0
        assert (a - b).norm() <= 1e-3 * moved
