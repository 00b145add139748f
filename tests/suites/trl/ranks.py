"""One of several processes of an SFT run: ``<launcher> ranks.py <folder>``; each writes the weights that it ends with.

Each takes one chat at a time, and two of them a step: with two processes a step sees four chats.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2]))
from scao_integrations.hf_trainer import scao_trainer_kwargs
from suites.trl.tuning import inner, losses, train

folder = Path(sys.argv[1])
kwargs = scao_trainer_kwargs(refresh_every=2)
halves = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
trainer = train(folder, kwargs, ddp_backend="gloo", max_steps=3, **halves)
found = {
    "weights": dict(trainer.accelerator.unwrap_model(trainer.model).state_dict()),
    "state": inner(trainer).state_dict()["state"],
    "steps": inner(trainer).report().steps,
    "processes": trainer.accelerator.num_processes,
    "wrapped": type(trainer.model_wrapped).__name__,
    "losses": losses(trainer),
}
torch.save(found, folder / f"{os.environ['RANK']}.pt")
