"""Short runs of LLaMA-Factory, and its own commands in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

RECIPES = Path(__file__).resolve().parents[3] / "configs" / "llamafactory"


def settings(**changes):
    """A short LoRA run of the small model, with SCAO; ``None`` leaves a key out."""
    given = {
        "model_name_or_path": "./small",
        "template": "smollm2",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 4,
        "lora_target": "all",
        "dataset": "stdlib_docs",
        "dataset_dir": "./data",
        "cutoff_len": 64,
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "learning_rate": 2.0e-3,
        "weight_decay": 0.1,
        "max_steps": 8,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "use_cpu": True,
        "disable_gradient_checkpointing": True,
        "optim": "scao",
        "optim_args": "spike_rank=2,refresh_every=3",
        **changes,
    }
    return {name: value for name, value in given.items() if value is not None}


def written(folder, name, **changes):
    """The file of such a run."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings(output_dir=name, **changes)))
    return path.name


def started(folder, *command, output=subprocess.PIPE, **variables):
    """A command in the folder and in a session of its own, its output in one pipe, or in a file."""
    program = Path(sys.executable).parent / command[0]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SCAO_AUTOLOAD", "USE_V1"))}
    environment |= {"OMP_NUM_THREADS": "1", "GRADIO_ANALYTICS_ENABLED": "False", **variables}
    return subprocess.Popen(
        [str(program), *command[1:]],
        cwd=folder,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ran(folder, *command, code=0, **variables):
    """What a command printed, which has to end with that exit code."""
    process = started(folder, *command, **variables)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == code, output[-6000:]
    assert code or "ConfigError" not in output, output[-6000:]  # one that a clean-up raised at the exit
    return output


def losses(folder, name):
    """The losses in full precision, by step."""
    entries = map(json.loads, (folder / name / "trainer_log.jsonl").read_text().splitlines())
    return {entry.get("current_steps") or entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
