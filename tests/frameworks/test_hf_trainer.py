"""Hugging Face's Trainer, unmodified: it builds SCAO from its class and resumes it exactly."""

import pytest
import torch

from comparing import Tokens
from scao import SCAO

transformers = pytest.importorskip("transformers")


def train(folder, resume=None):
    transformers.set_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=8,
        save_steps=4,
        per_device_train_batch_size=4,
        weight_decay=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Tokens(), optimizer_cls_and_kwargs=(SCAO, {"lr": 1e-3, "betas": (0.9, 0.99)})
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer.optimizer


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole, optimizer = train(tmp_path)
    assert isinstance(getattr(optimizer, "optimizer", optimizer), SCAO)
    # The Trainer's own grouping reaches SCAO: norms and biases do not decay.
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    resumed, _ = train(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
