"""What cannot work stops before the first step, with a sentence."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from scao_core import ConfigError, UnknownOptionError
from suites.torchtune import tuning
from suites.torchtune.tuning import SCAO_CHOSEN, lora, replaced


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ("spike_rnk=8", UnknownOptionError, "unknown option 'spike_rnk'; did you mean 'spike_rank'"),
        ("weight_dcay=0.1", UnknownOptionError, "did you mean 'weight_decay'"),
        ("lr=fast", ConfigError, "lr: expected a number, got 'fast'"),
        ("lr=-1e-3", ConfigError, "lr"),
        ("betas=[0.9]", ConfigError, "betas"),
        ("spike_rank=[1,2]", ConfigError, "spike_rank"),
        ("factors=[dense,spikd]", ConfigError, "did you mean 'spiked'"),
        ("capturable=True", ConfigError, "capturable"),
        ("nested.option=1", UnknownOptionError, "unknown option 'nested'"),
    ],
)
def test_wrong_options_stop_before_training(tmp_path, model, steps, option, error, message):
    with pytest.raises(error, match=message):
        lora(model, tmp_path, f"optimizer.{option}")
    assert steps.optimizers == []
    assert not list(tmp_path.glob("epoch_*"))


def test_options_of_older_scao_code_are_taken_with_one_warning(tmp_path, model, steps):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lora(model, tmp_path, "optimizer.precond_freq=5", "optimizer.k_max=8")
    assert sum("options of older SCAO code" in str(w.message) for w in caught) == 1
    assert steps.optimizers[0].defaults["refresh_every"] == 5


def command(*arguments, folder):
    """A real command line, in a folder of its own."""
    # `tune run` takes the script as a module of its folder
    path = os.pathsep.join([str(Path(tuning.__file__).parents[2]), str(folder), os.environ.get("PYTHONPATH", "")])
    tune = Path(sys.executable).with_name("tune")
    run = subprocess.run(
        [tune, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path.strip(os.pathsep)},
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout + run.stderr


def test_the_command_fails_with_the_sentence(tmp_path, model):
    arguments = ("run", "lora_finetune_single_device", "--config", "llama3_2/1B_lora_single_device", SCAO_CHOSEN)
    code, text = command(*arguments, *replaced(model, tmp_path / "out"), "optimizer.dampng=1e-3", folder=tmp_path)
    assert code != 0
    assert "UnknownOptionError: unknown option 'dampng'; did you mean 'damping'" in text
    assert not list((tmp_path / "out").glob("epoch_*"))


@pytest.mark.parametrize("component", ["scao.SCAO", "torch.optim.AdamW"])
def test_fsdp2_is_refused_on_every_rank_where_adamw_would_train(tmp_path, model, component):
    """Two processes, torchtune's distributed LoRA recipe."""
    (tmp_path / "on_cpu.py").write_text(Path(tuning.__file__).with_name("on_cpu.py").read_text())
    arguments = replaced(model, tmp_path / "out", save_adapter_weights_only=True, max_steps_per_epoch=1)
    launch = ("run", "--nproc_per_node", "2", "on_cpu.py", "--config", "llama3_2/1B_lora")
    code, text = command(*launch, f"optimizer._component_={component}", *arguments, folder=tmp_path)
    refusals = text.count("ParameterError: got a DTensor parameter (FSDP2 or tensor parallel), which is not supported")
    if component == "scao.SCAO":
        assert code != 0
        assert refusals >= 1  # a rank is stopped as soon as another has failed
        assert "set up" not in text
    else:
        assert code == 0, text[-3000:]
        assert text.count("trained") == 2
