"""launch/pretrain_nano.py: the order of its documents, and a killed call goes on as if it had not been."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from launch import pretrain_nano
from toolr0_core.assets import documents

NANO = Path(pretrain_nano.documents.__file__).parent / "nano"


@pytest.fixture
def args(tmp_path):
    return Namespace(seed=0, steps=6, tokens=300, lr=0.02, plain=0.2, familiar=0.4, clean=0.7, hold=0.5, generator_share=0.5,
                     every=2, resume=False, out=tmp_path / "nano")


def test_a_killed_call_goes_on_to_the_same_weights(args, monkeypatch):
    monkeypatch.setattr(pretrain_nano, "forced_accuracy", lambda *_: 0.0)
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    whole = pretrain_nano.pretrain(args, tokenizer, lambda *_: None).state_dict()
    keep = pretrain_nano.keep

    def killed(file, step, *rest):
        keep(file, step, *rest)
        if step == 4:
            raise KeyboardInterrupt
    monkeypatch.setattr(pretrain_nano, "keep", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain_nano.pretrain(args, tokenizer, lambda *_: None)
    args.resume = True
    resumed = pretrain_nano.pretrain(args, tokenizer, lambda *_: None).state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_documents_become_harder_then_faulty_and_the_rate_falls_to_a_fiftieth(args):
    args.steps = 1000
    plan = [pretrain_nano.schedule(args, step) for step in range(args.steps)]
    assert plan[0][0].plain and not plan[300][0].plain and plan[300][0].random_tools == 0 < plan[999][0].random_tools
    assert plan[699][1] == documents.CLEAN != plan[700][1]
    assert [plan[s][2] for s in (0, 49, 500, 750, 999)] == pytest.approx([0.02, 1, 1, 0.5, 0.02])
