"""``stage:`` other than SFT: pretraining, reward model, DPO, KTO, each by LLaMA-Factory's own trainer for it."""

import json
import math
import shutil

import pytest
import torch

from scao_core import SCAO
from suites.llamafactory.inside import trained

PAIR = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
LABELED = {"prompt": "prompt", "response": "chosen", "kto_tag": "good"}


@pytest.fixture
def data(folder, material, tmp_path, monkeypatch):
    """Pairs, and the same chats as single answers that are good or bad; text as it stands."""
    monkeypatch.chdir(folder)
    place = tmp_path / "data"
    place.mkdir()
    shutil.copy(material / "text.jsonl", place)
    pairs = [json.loads(line) for line in (material / "preference.jsonl").read_text().splitlines()]
    (place / "pairs.json").write_text(json.dumps(pairs))
    (place / "labeled.json").write_text(json.dumps([{**pair, "good": i % 2 == 0} for i, pair in enumerate(pairs)]))
    info = {
        "text": {"file_name": "text.jsonl", "columns": {"prompt": "text"}},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": PAIR},
        "labeled": {"file_name": "labeled.json", "columns": LABELED},
    }
    (place / "dataset_info.json").write_text(json.dumps(info))
    return str(place)


@pytest.mark.parametrize(
    ("stage", "name", "first", "within"),
    [
        ("pt", "text", math.log(49152), 0.05),  # random weights: chance
        ("rm", "pairs", math.log(2), 0.5),  # of two answers one is better; the random head already has an opinion
        ("dpo", "pairs", math.log(2), 0.05),  # policy and reference are one
        ("kto", "labeled", 0.5, 0.05),
    ],
)
def test_each_stage_trains_with_scao(data, registered, tmp_path, stage, name, first, within):
    """The first loss is the one that follows from an untrained adapter; then each adapter matrix is preconditioned."""
    watch = trained(tmp_path, stage=stage, dataset=name, dataset_dir=data, max_steps=3)
    assert type(watch.optimizer) is SCAO
    assert watch.optimizer.report().steps == 3
    assert watch.optimizer.report().matrices >= 2 * 2 * 7  # A and B of 7 linear layers in 2 blocks
    assert watch.losses[0] == pytest.approx(first, rel=within)
    assert all(map(math.isfinite, watch.losses))
    moved = [weight for key, weight in watch.weights.items() if "lora_B" in key]
    assert moved
    assert all(torch.count_nonzero(weight) for weight in moved)
