"""A plugin of Axolotl that kills its own process in the middle of a run, as a power cut would, where a variable says so."""

import os
import signal

import torch
from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback


class Killer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(os.environ.get("KILL_AFTER_STEP", "0")):
            os.kill(os.getpid(), signal.SIGKILL)


class KillPlugin(BasePlugin):
    def pre_model_load(self, cfg):
        torch.manual_seed(0)  # an adapter's start, which 0.19 draws before it seeds: two runs could not be compared

    def add_callbacks_pre_trainer(self, cfg, model):
        return [Killer()]
