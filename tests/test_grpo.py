"""grpo: hand-computed numbers, an eager fp64 reference, and the faults that other trainers shipped."""

import copy
import dataclasses
import math

import pytest
import torch

from toolr0_core.config import GrpoConfig
from toolr0_core.distributed import World
from toolr0_core.grpo import Trainer, group_advantages, token_loss, token_weights, toy
from toolr0_core.schema import Completion, Prompt, Reward, Scored

ONE = World(0, 1, torch.device("cpu"), False)


def advantages(rewards, groups, **options):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), **options).tolist()


def test_advantages_by_hand():
    assert advantages([1.0, 3.0, 5.0], [0, 0, 0]) == pytest.approx([-2 / 2.0001, 0, 2 / 2.0001])  # std 2 with ddof 1
    assert advantages([1.0, 3.0, 7.0, 8.0], [0, 0, 1, 1], scale="none") == pytest.approx([-1, 1, -0.5, 0.5])
    std = torch.tensor([1.0, 3.0, 7.0, 8.0]).std().item() + 1e-4
    assert advantages([1.0, 3.0, 7.0, 8.0], [0, 0, 1, 1], scale="batch") == pytest.approx([x / std for x in (-1, 1, -0.5, 0.5)])


def test_equal_rewards_groups_of_one_and_missing_rewards_are_exact():
    nan = math.nan
    assert advantages([0.1] * 3 + [5.0], [0, 0, 0, 1]) == [0, 0, 0, 0]
    assert advantages([nan, 0.0, 1.0], [0, 0, 0], scale="none") == pytest.approx([0, -0.5, 0.5])  # 0.0 is a reward (fault 23)
    assert advantages([nan, nan], [0, 0]) == [0, 0] and advantages([nan, 2.0], [0, 0]) == [0, 0]
    with pytest.raises(ValueError, match="variance"):
        advantages([1.0], [0], scale="variance")


def test_weights_by_hand():
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert token_weights(mask, "sequence").tolist() == [[0.5, 0, 0, 0], [0.125] * 4, [0] * 4]
    assert token_weights(mask, "token")[1].tolist() == pytest.approx([0.2] * 4)
    assert token_weights(mask, "constant", max_length=10)[1].tolist() == pytest.approx([1 / 20] * 4)
    assert token_weights(mask[:1], "token", totals=(2, 5))[0, 0] == pytest.approx(0.2)
    assert token_weights(torch.zeros(2, 3), "token").sum() == 0  # all masked is no NaN (fault 6)


def test_loss_lowers_kl_and_raises_what_is_good():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    token_loss(logp, None, torch.tensor([1.0, -1.0]))[0].sum().backward()
    assert logp.grad.tolist() == [-1.0, 1.0]  # fault 2
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss, stats = token_loss(logp, None, torch.zeros(2), torch.tensor([-2.0, -2.0]), beta=1.0)
    loss.sum().backward()
    assert stats["kl"].tolist() == pytest.approx([math.exp(-1) + 1 - 1, math.exp(1) - 1 - 1])
    assert logp.grad[0] > 0 > logp.grad[1]  # a step down moves both towards the reference (fault 1)


def test_clipping_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    loss, stats = token_loss(ratio.log(), torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.3)
    assert loss.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8])
    assert stats["clipped_high"].tolist() == [1, 0, 0, 0] and stats["clipped_low"].tolist() == [0, 0, 0, 1]
    bounds = torch.tensor([0.6, 0.0, 0.0, 0.6])
    assert token_loss(ratio.log(), torch.zeros(4), torch.ones(4), clip_high=bounds)[0].tolist() == pytest.approx([-1.5, -1, -0.5, -0.5])
    weighted = token_loss(ratio.log(), torch.zeros(4), torch.ones(4), clip_high=9.0, is_weight=torch.full((4,), 0.5))[0]
    assert weighted.tolist() == pytest.approx([-0.75, -0.75, -0.25, -0.25])


def rollouts(groups=3, size=4, seed=0, lengths=(1, 9), flat=()):
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=g))  # noqa: E731
    rows, rewards = [], []
    for group in range(groups):
        prompt = tuple(draw(0, 96) for _ in range(draw(2, 12)))
        for k in range(size):
            n = draw(*lengths)
            ids = tuple(draw(0, 96) for _ in range(n))
            rows.append(Scored(Prompt(prompt, ""), Completion(ids, tuple(-draw(1, 40) / 8 for _ in ids), "length" if k == 1 else "stop"),
                               Reward(0.0), group))
            rewards.append(1.0 if group in flat else draw(0, 8) / 8)
    return rows, rewards


def gradients(model, config, rows, rewards, world=ONE, **options):
    """Gradients of the first update, before clipping and before the optimiser moves anything."""
    trainer = Trainer(model, dataclasses.replace(config, max_grad_norm=1e9), world, lr=0.0, steps=10, **options)
    stats = trainer.step(rows, rewards)
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]), stats


def reference_gradients(model, config, rows, rewards, temperature=1.0, max_length=20):
    """The same in fp64, one sequence after another, from the formulas."""
    model = model.double()
    model.zero_grad()
    usable = [not (config.mask_truncated and r.completion.finish_reason == "length") for r in rows]
    r = torch.tensor([x if u else math.nan for x, u in zip(rewards, usable)], dtype=torch.float64)
    groups = torch.tensor([row.group for row in rows])
    sequences, tokens = sum(usable), sum(len(x.completion.token_ids) for x, u in zip(rows, usable) if u)
    loss = 0.0
    for i, row in enumerate(rows):
        if not usable[i]:
            continue
        mine = r[(groups == row.group) & ~r.isnan()]
        std = {"std": mine.std(), "batch": r[~r.isnan()].std(), "none": torch.tensor(1.0 - 1e-4)}[config.scale]
        a = 0.0 if len(mine) < 2 or mine.std() == 0 else (r[i] - mine.mean()) / (std + 1e-4)
        ids, n = [*row.prompt.token_ids, *row.completion.token_ids], len(row.completion.token_ids)
        logits = model.logits(torch.tensor([ids]))[0, -n - 1: -1] / temperature
        logp = logits.log_softmax(-1).gather(1, torch.tensor(row.completion.token_ids)[:, None])[:, 0]
        old = torch.tensor(row.completion.logprobs, dtype=torch.float64) if config.updates > 1 else logp.detach()
        ratio = (logp - old).exp()
        each = -torch.minimum(ratio * a, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * a)
        weight = {"sequence": 1 / n / sequences, "token": 1 / tokens, "constant": 1 / sequences / max_length}[config.aggregation]
        loss = loss + (each * weight).sum()
    loss.backward()
    grad = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().float() for p in model.parameters()])
    model.float()
    model.zero_grad()
    return grad


@pytest.mark.parametrize("changes", [
    {}, {"scale": "batch"}, {"scale": "none"}, {"aggregation": "token"}, {"aggregation": "constant"}, {"mask_truncated": True},
    {"micro_batch_tokens": 24}, {"micro_batch_tokens": 24, "aggregation": "token", "mask_truncated": True}])
def test_gradients_equal_an_eager_fp64_reference(tiny, changes):
    model, (rows, rewards) = tiny(tie_word_embeddings="scale" in changes), rollouts(flat=(1,))
    config = GrpoConfig(beta=0.0, **changes)
    got, _ = gradients(model, config, rows, rewards, temperature=0.7, max_length=20)
    expected = reference_gradients(model, config, rows, rewards, temperature=0.7)
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_off_policy_updates_use_the_samplers_logprobs(tiny):
    model, (rows, rewards) = tiny(), rollouts()
    config = GrpoConfig(beta=0.0, updates=2, clip_low=0.4, clip_high=0.6)
    trainer = Trainer(model, dataclasses.replace(config, max_grad_norm=1e9), ONE, lr=0.0, steps=1)
    trainer.step(rows, rewards)  # lr 0: both updates see the same weights
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = reference_gradients(model, config, rows, rewards)
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_accumulation_does_not_change_a_gradient(tiny):
    rows, rewards = rollouts(groups=2, lengths=(1, 30), seed=4)  # lengths far apart (faults 3, 4, 7)
    for aggregation in ("sequence", "token"):
        both = [gradients(tiny(), GrpoConfig(beta=0.0, aggregation=aggregation, micro_batch_tokens=b), rows, rewards)[0]
                for b in (10_000, 45)]
        assert (both[0] - both[1]).norm() < 1e-5 * both[0].norm()


def test_recomputing_activations_does_not_change_a_gradient(tiny):
    rows, rewards = rollouts()
    plain, again = (gradients(tiny(), GrpoConfig(beta=0.0, checkpointing=on), rows, rewards)[0] for on in (False, True))
    assert plain.norm() > 0 and torch.equal(plain, again)


def test_kl_gradient_vanishes_at_the_reference_and_then_pulls_back(tiny):
    model, (rows, _) = tiny(), rollouts()
    trainer = Trainer(model, GrpoConfig(beta=1.0, schedule="constant"), ONE, lr=1e-3, steps=10)
    assert trainer.step(rows, [1.0] * len(rows))["grad_norm"] < 1e-4
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    first = trainer.step(rows, [1.0] * len(rows))["kl"]
    for _ in range(5):
        last = trainer.step(rows, [1.0] * len(rows))["kl"]
    assert last < first


def test_flat_groups_make_no_step(tiny):
    model, (rows, _) = tiny(), rollouts()
    before = [p.clone() for p in model.parameters()]
    stats = Trainer(model, GrpoConfig(beta=0.0, weight_decay=0.1), ONE, lr=0.1, steps=5).step(rows, [0.5] * len(rows))
    assert stats["flat_groups"] == 1.0 and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_truncated_completion_leaves_baseline_and_denominator(tiny):
    rows, rewards = rollouts(groups=1, size=3)  # row 1 is truncated (faults 5, 22)
    config = GrpoConfig(beta=0.0, mask_truncated=True)
    masked, _ = gradients(tiny(), config, rows, rewards)
    alone, _ = gradients(tiny(), config, [rows[0], rows[2]], [rewards[0], rewards[2]])
    assert torch.allclose(masked, alone, atol=1e-7)
    everything = [dataclasses.replace(r, completion=dataclasses.replace(r.completion, finish_reason="length")) for r in rows]
    assert gradients(tiny(), config, everything, rewards)[1]["loss"] == 0.0


def test_learning_rate_schedules():
    def rates(config, steps=4):
        trainer = Trainer(torch.nn.Linear(1, 1), config, ONE, lr=1.0, steps=steps)
        out = []
        for trainer.done in range(steps):
            trainer._schedule(0)
            out.append(trainer.optimizer.param_groups[0]["lr"])
        return out
    assert rates(GrpoConfig(beta=0)) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates(GrpoConfig(beta=0, schedule="constant", warmup=2)) == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_the_gap_to_the_sampler_is_measured(tiny):
    from toolr0_core.sampler import Sampler, SamplingParams

    model = tiny()
    out = Sampler(model).generate([[1, 2, 3], [4, 5]], SamplingParams(n=3, max_new_tokens=7, temperature=0.6))
    rows = [Scored(Prompt(((1, 2, 3), (4, 5))[g], ""), c, Reward(0.0), g) for g, group in enumerate(out) for c in group]
    stats = Trainer(model, GrpoConfig(beta=0.0), ONE, 1e-3, 5, temperature=0.6).step(rows, [0, 1, 2, 0, 1, 2])
    assert stats["logp_gap"] < 1e-5 and stats["ratio"] == pytest.approx(1.0)  # fault 19


def test_the_toy_learns(capsys):
    curve = toy(steps=25)
    assert curve[0] < 0.2 and curve[-1] > 0.7 and "loss is 0" in capsys.readouterr().out


def resumed(model, trainer, config):
    """A trainer that goes on from another's state with its weights, as after a restart."""
    other = copy.deepcopy(model)
    again = Trainer(other, config, ONE, trainer.lr, trainer.steps)
    again.load_state({k: v.clone() for k, v in trainer.state().items()}, trainer.done)
    return other, again


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_resumed_trainer_goes_on_exactly_and_against_the_same_reference(tiny, beta):
    model, (rows, rewards), config = tiny(), rollouts(), GrpoConfig(beta=beta, warmup=1)
    trainer = Trainer(model, config, ONE, lr=1e-3, steps=5)
    for _ in range(2):
        trainer.step(rows, rewards)
    other, again = resumed(model, trainer, config)
    assert trainer.step(rows, rewards) == again.step(rows, rewards)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    assert beta == 0 or trainer.step(rows, rewards)["kl"] > 1e-6  # of the weights at the phase's start, not at the restart


def test_text_that_was_put_in_is_left_out_of_loss_and_figures(tiny):
    (rows, rewards), g = rollouts(), torch.Generator().manual_seed(3)
    sampled = [tuple(bool(x) for x in torch.rand(len(r.completion.token_ids), generator=g) < 0.6) for r in rows]
    rows = [dataclasses.replace(r, completion=dataclasses.replace(r.completion, sampled=s)) for r, s in zip(rows, sampled)]
    model, config = tiny(), GrpoConfig(beta=0.0, aggregation="token")
    got, stats = gradients(model, config, rows, rewards)
    advantage = group_advantages(torch.tensor(rewards), torch.tensor([r.group for r in rows]))
    assert stats["tokens"] == sum(sum(s) for s, a in zip(sampled, advantage) if a) < sum(map(len, sampled))
    model.zero_grad()
    for row, keep, a in zip(rows, sampled, advantage):
        ids, n = [*row.prompt.token_ids, *row.completion.token_ids], len(keep)
        logp = model.logits(torch.tensor([ids]))[0, -n - 1: -1].log_softmax(-1).gather(1, torch.tensor(ids[-n:])[:, None])[:, 0]
        (-(logp * torch.tensor(keep)).sum() * a / sum(map(sum, sampled))).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (got - expected).norm() < 1e-5 * expected.norm()


def test_an_empty_completion_and_a_missing_reward_are_left_out(tiny):
    rows, rewards = rollouts(groups=2, size=3)
    empty = dataclasses.replace(rows[0], completion=Completion((), (), "stop"))
    got, stats = gradients(tiny(), GrpoConfig(beta=0.1), [empty, *rows], [1.0, *rewards])
    alone, _ = gradients(tiny(), GrpoConfig(beta=0.1), rows, rewards)
    assert torch.allclose(got, alone, atol=1e-7)
    got, _ = gradients(tiny(), GrpoConfig(beta=0.1), [rows[0], *rows], [math.nan, *rewards])
    assert torch.allclose(got, alone, atol=1e-7)


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights(tiny):
    model, (rows, rewards) = tiny(), rollouts()
    with torch.no_grad():
        model.norm.weight[0] = math.inf
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        Trainer(model, GrpoConfig(beta=0.0), ONE, lr=1e-3, steps=5).step(rows, rewards)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("budget", [10_000, 30])
def test_statistics_are_those_of_all_tokens_that_learn(tiny, budget):
    """Means and largest values by hand, whatever the micro-batches; a member with advantage 0 is dropped from them too."""
    model, (rows, rewards) = tiny(), rollouts()
    config = GrpoConfig(beta=0.0, updates=2, clip_low=0.3, clip_high=0.5, micro_batch_tokens=budget)
    advantage = group_advantages(torch.tensor(rewards), torch.tensor([r.group for r in rows]))
    ratio, a, gap, entropy = [], [], [], []
    for row, x in zip(rows, advantage):
        if x == 0:
            continue
        ids, n = [*row.prompt.token_ids, *row.completion.token_ids], len(row.completion.token_ids)
        logs = model.logits(torch.tensor([ids]))[0, -n - 1: -1].log_softmax(-1).detach()
        logp = logs.gather(1, torch.tensor(ids[-n:])[:, None])[:, 0]
        gap.append((logp - torch.tensor(row.completion.logprobs)).abs())
        ratio.append((logp - torch.tensor(row.completion.logprobs)).exp())
        entropy.append(-(logs.exp() * logs).sum(-1))
        a.append(x.expand(n))
    ratio, a, gap, entropy = map(torch.cat, (ratio, a, gap, entropy))
    stats = Trainer(model, config, ONE, lr=0.0, steps=5).step(rows, rewards)
    expected = {"ratio": ratio.mean(), "ratio_max": ratio.max(), "logp_gap": gap.mean(), "logp_gap_max": gap.max(),
                "entropy": entropy.mean(), "clipped_low": ((ratio < 0.7) & (a < 0)).float().mean(),
                "clipped_high": ((ratio > 1.5) & (a > 0)).float().mean(), "tokens": len(ratio)}
    assert {k: stats[k] for k in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-3)
    assert 0 < stats["clipped_low"] < 1 and 0 < stats["clipped_high"] < 1


def test_ratios_are_of_the_last_update_and_the_gap_of_the_first(tiny):
    from toolr0_core.sampler import Sampler, SamplingParams

    model = tiny()
    drawn = Sampler(model).generate([[1, 2, 3]], SamplingParams(n=4, max_new_tokens=7))[0]
    rows = [Scored(Prompt((1, 2, 3), ""), c, Reward(0.0), 0) for c in drawn]
    stats = Trainer(model, GrpoConfig(beta=0.0, updates=3, schedule="constant"), ONE, lr=1e-3, steps=5).step(rows, [0, 1, 2, 3])
    assert stats["logp_gap_max"] < 1e-4 and stats["ratio_max"] > 1.001
