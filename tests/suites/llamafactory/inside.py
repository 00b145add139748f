"""Runs of LLaMA-Factory in this process, and an eye on their optimizer."""

import transformers
from llamafactory.train import tuner

from suites.llamafactory.running import settings


class Watch(transformers.TrainerCallback):
    """The optimizer that stepped, and the losses."""

    def on_train_end(self, args, state, control, optimizer=None, model=None, **_):
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def trained(tmp_path, **changes):
    """A run of four steps, and what was seen of it."""
    watch = Watch()
    changes = {"max_steps": 4, "save_strategy": "no", **changes}
    tuner.run_exp(settings(output_dir=str(tmp_path / f"run{changes.get('optim')}"), **changes), [watch])
    return watch
