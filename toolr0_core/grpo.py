"""GRPO, all of it: advantages, weights, loss, update. Run `python -m toolr0_core.grpo` for a toy that learns.

For each prompt a group of completions is sampled and rewarded. A completion's advantage is its reward relative to its
group (arXiv 2402.03300, section 4.1), every token of it shares that advantage, and the clipped policy-gradient loss of PPO
does the rest; there is no value network. Packing into rows and micro-batches is packing.py.

Shape suffixes: B completions, T time, M completion tokens of a micro-batch, V vocabulary, D hidden.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from toolr0_kernels import linear_grpo_loss, linear_logprob
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from toolr0_core.config import GrpoConfig
from toolr0_core.distributed import World
from toolr0_core.model import Model, ModelConfig
from toolr0_core.packing import MicroBatch, collate, make_rows, micro_batches, spread
from toolr0_core.schema import Scored


def group_advantages(rewards_B: Tensor, group_ids_B: Tensor, scale: str = "std", eps: float = 1e-4) -> Tensor:
    """(reward - mean of its group) / (spread + eps), [B] in fp32.

    scale: "std", the group's standard deviation (ddof 1); "batch", that of all rewards; "none", 1. A NaN reward is left
    out of every statistic and gets 0; a group of equal rewards, or of one, gets exactly 0.
    """
    if scale not in ("std", "batch", "none"):
        raise ValueError(f"scale is {scale!r}; it has to be std, batch or none")
    rewards_B, known_B = rewards_B.float(), ~rewards_B.isnan()
    advantages_B = torch.zeros_like(rewards_B)
    batch_std = rewards_B[known_B].std() if known_B.sum() > 1 else torch.tensor(0.0)
    for group in group_ids_B.unique():
        members = (group_ids_B == group) & known_B
        r = rewards_B[members]
        if len(r) < 2 or bool((r == r[0]).all()):
            continue
        spread_ = {"std": r.std(), "batch": batch_std, "none": None}[scale]
        advantages_B[members] = r - r.mean() if spread_ is None else (r - r.mean()) / (spread_ + eps)
    return advantages_B


def token_weights(mask_BT: Tensor, aggregation: str, max_length: int | None = None,
                  totals: tuple[int, int] | None = None) -> Tensor:
    """Weights [B, T] with which loss = sum(weights * token losses) is the wanted mean.

    aggregation: "sequence", the mean over sequences of their token means (GRPO); "token", the mean over all tokens (DAPO);
    "constant", the sum over (sequences * max_length) (Dr. GRPO). Sequences without tokens count nowhere.
    totals: (sequences, tokens) of the whole step over all ranks and micro-batches, so that neither accumulation nor
    packing nor the number of ranks changes a gradient; from the mask where None.
    """
    mask_BT = mask_BT.float()
    length_B1 = mask_BT.sum(-1, keepdim=True)
    sequences, tokens = totals or (int((length_B1 > 0).sum()), int(mask_BT.sum()))
    if aggregation == "sequence":
        return mask_BT / length_B1.clamp(min=1) / max(sequences, 1)
    if aggregation == "token":
        return mask_BT / max(tokens, 1)
    if aggregation == "constant":
        if not max_length:
            raise ValueError("aggregation constant needs max_length, the length that every sequence counts as")
        return mask_BT / (max(sequences, 1) * max_length)
    raise ValueError(f"aggregation is {aggregation!r}; it has to be sequence, token or constant")


def token_loss(logp: Tensor, old_logp: Tensor | None, advantage: Tensor, ref_logp: Tensor | None = None, beta: float = 0.0,
               clip_low: float | Tensor = 0.2, clip_high: float | Tensor = 0.2,
               is_weight: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of every token: -min(ratio A, clip(ratio) A) + beta KL, in the shape of logp, and per-token statistics.

    ratio = exp(logp - old_logp); old_logp None means on-policy: ratio 1 with the gradient of logp. is_weight, detached,
    multiplies the policy term alone. KL is the k3 estimator exp(ref - logp) - (ref - logp) - 1 (GRPO, eq. 4), its
    log-ratio clamped to +-20 so that one outlier stays finite.
    """
    ratio = (logp - (logp.detach() if old_logp is None else old_logp)).exp()
    low, high = (torch.as_tensor(bound, dtype=ratio.dtype) for bound in (1 - clip_low, 1 + clip_high))
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if is_weight is not None:
        loss = loss * is_weight.detach()
    stats = {"ratio": ratio.detach(), "clipped_low": ((ratio < low) & (advantage < 0)).float(),
             "clipped_high": ((ratio > high) & (advantage > 0)).float()}
    if ref_logp is not None:
        d = (ref_logp - logp).clamp(-20, 20)
        kl = d.exp() - d - 1
        loss, stats["kl"] = loss + beta * kl, kl.detach()
    return loss, stats


class Trainer:
    """One phase of training: optimiser, schedule, reference, and `step`, which is GRPO's update.

    `model` is what samples; where it is sharded (distributed.py) the optimiser's fp32 copy is another module, and each step
    ends by writing its weights back into `model`. max_length: what aggregation "constant" counts a sequence as.
    """

    def __init__(self, model: Model, config: GrpoConfig, world: World, lr: float, steps: int, temperature: float = 1.0,
                 max_length: int | None = None, weights: dict[str, Tensor] | None = None):
        self.config, self.world, self.lr, self.steps = config, world, lr, steps
        self.temperature, self.max_length = temperature, max_length
        self.model, self.trained = model, world.trainable(model, weights, config.checkpointing)
        self.reference = copy.deepcopy(model).requires_grad_(False) if config.beta > 0 else None
        self.optimizer = torch.optim.AdamW(self.trained.parameters(), lr=lr, weight_decay=config.weight_decay,
                                           betas=(config.adam_beta1, config.adam_beta2))
        self.done = 0

    def step(self, rows: Sequence[Scored], rewards: Sequence[float]) -> dict[str, float]:
        """One batch of rollouts, the same on every rank: `config.updates` optimiser steps. Returns statistics."""
        c = self.config
        groups_B = torch.tensor([row.group for row in rows])
        cut_B = torch.tensor([row.completion.finish_reason == "length" for row in rows])
        usable_B = torch.tensor([len(row.completion.token_ids) > 0 for row in rows]) & ~(cut_B & c.mask_truncated)
        rewards_B = torch.tensor([float(r) for r in rewards]).masked_fill(~usable_B, math.nan)
        usable_B = usable_B & ~rewards_B.isnan()
        advantages_B = group_advantages(rewards_B, groups_B, c.scale)
        weights_BT = self._weights(rows, usable_B)
        learns_B = usable_B & ((advantages_B != 0) | (c.beta > 0))  # what has weight 0 is dropped exactly
        batches = self._batches(rows, learns_B)
        stats: dict[str, float] = {}
        for update in range(c.updates):
            self._schedule(update)
            gaps = {k: v for k, v in stats.items() if k.startswith("logp_gap")}  # of the weights that sampled: the first's
            stats = self._update(rows, batches, advantages_B, weights_BT) | gaps
        self.done += 1
        self.world.copy_weights(self.trained, self.model)
        uneven = {int(g) for g, a in zip(groups_B, advantages_B) if a != 0}
        return stats | {"lr": self.optimizer.param_groups[0]["lr"], "flat_groups": 1 - len(uneven) / len(groups_B.unique()),
                        "truncated": cut_B.float().mean().item(),
                        "length": sum(len(r.completion.token_ids) for r in rows) / len(rows)}

    def _weights(self, rows: Sequence[Scored], usable_B: Tensor) -> Tensor:
        drawn = [torch.tensor(c.sampled or [True] * len(c.token_ids), dtype=torch.bool) for c in (r.completion for r in rows)]
        mask_BT = pad_sequence(drawn, batch_first=True) & usable_B[:, None]  # text that was put in is not the model's doing
        return token_weights(mask_BT, self.config.aggregation, self.max_length)

    def _batches(self, rows: Sequence[Scored], learns_B: Tensor) -> list[tuple[MicroBatch, bool]]:
        """This rank's micro-batches, as many as every other rank's; one that only fills up counts for nothing."""
        budget = self.config.micro_batch_tokens
        completions = [row.completion.token_ids if learn else () for row, learn in zip(rows, learns_B.tolist())]
        shares = spread(make_rows([row.prompt.token_ids for row in rows], completions, [row.group for row in rows], budget),
                        self.world.size)
        packs = [micro_batches(share, budget) for share in shares]
        mine = packs[self.world.rank]
        missing = max(map(len, packs)) - len(mine)
        filler = [next(pack[0][0] for pack in packs if pack)] if missing else []
        return [(collate(rows, self.world.device), True) for rows in mine] + \
            [(collate(filler, self.world.device), False) for _ in range(missing)]

    def _update(self, rows: Sequence[Scored], batches: list[tuple[MicroBatch, bool]], advantages_B: Tensor,
                weights_BT: Tensor) -> dict[str, float]:
        """Gradients of all micro-batches, clipped, one optimiser step; sums over ranks of the token statistics."""
        length = weights_BT.shape[1]
        sampled_BT = torch.tensor([[*r.completion.logprobs, *[0.0] * (length - len(r.completion.logprobs))] for r in rows])
        sums, tops = {}, {}
        self.optimizer.zero_grad()
        for batch, counts in batches:
            pick = lambda x_BT, b=batch: x_BT.to(b.member_M.device)[b.member_M, b.place_M]  # noqa: E731
            weight_M = pick(weights_BT) * counts
            sampled_M = pick(sampled_BT)
            advantage_M = advantages_B.to(weight_M.device)[batch.member_M]
            loss, stats = self._loss(batch, advantage_M, weight_M, sampled_M)
            loss.backward()
            stats |= {"logp_gap": (stats.pop("logp") - sampled_M).abs(), "tokens": torch.ones_like(weight_M)}
            seen_M = weight_M > 0
            for name, value in stats.items():
                sums[name] = sums.get(name, 0) + (value * seen_M).sum()
            for name in ("ratio", "logp_gap"):
                tops[name] = torch.maximum((stats[name] * seen_M).max(), tops.get(name, torch.zeros_like(weight_M[0])))
            sums["loss"] = sums.get("loss", 0) + loss.detach()
        if not batches:  # every group was flat: there is nothing to learn, and no step
            return {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0}
        norm = self.world.item(torch.nn.utils.clip_grad_norm_(self.trained.parameters(), self.config.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm} and the weights are as before the step; lower the learning "
                                     f"rate, or look for NaN in the model")
        self.optimizer.step()
        totals, largest = self.world.sum_dict(sums), self.world.max_dict(tops)
        tokens = max(totals["tokens"], 1.0)
        means = {k: v if k in ("loss", "tokens") else v / tokens for k, v in totals.items()}
        return means | {f"{k}_max": v for k, v in largest.items()} | {"grad_norm": norm}

    def _loss(self, batch: MicroBatch, advantage_M: Tensor, weight_M: Tensor, sampled_M: Tensor) -> tuple[Tensor, dict]:
        """Sum of weight * token loss, at the temperature that sampled the tokens, and their statistics."""
        c, stream, target_M, ref_M = self.config, (batch.ids_N, batch.positions_N, batch.attend), batch.target_M, None
        if self.reference:
            with torch.no_grad():
                ref_M = self.reference(*stream, lambda hidden_ND, weight_VD: linear_logprob(
                    hidden_ND[batch.source_M], weight_VD, target_M, self.temperature))
        old_M = sampled_M if c.updates > 1 else None  # None: on-policy
        return self.trained(*stream, lambda hidden_ND, weight_VD: linear_grpo_loss(
            hidden_ND[batch.source_M], weight_VD, target_M, advantage_M, weight_M, old_M, ref_M, None, c.beta, c.clip_low,
            c.clip_high, self.temperature))

    def state(self) -> dict[str, Tensor]:
        """The optimiser's moments, by parameter name, and the reference; whole, on the CPU. With `done` and the weights, all
        that a phase needs to go on."""
        named = [(n, self.optimizer.state.get(p, {})) for n, p in self.trained.named_parameters()]
        named += [(n, {"reference": p}) for n, p in (self.reference.named_parameters() if self.reference else ())]
        return {f"{kind}.{name}": self.world.whole(value) for name, s in named for kind, value in s.items()}

    def load_state(self, state: dict[str, Tensor], done: int) -> None:
        """What `state` returned, at any number of ranks."""
        self.done = done
        if self.reference:  # the model that entered the phase, not the one that goes on
            self.reference.load_state_dict({k[len("reference."):]: v for k, v in state.items() if k.startswith("reference.")})
        for name, p in self.trained.named_parameters():
            kinds = {k: state[f"{k}.{name}"] for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}.{name}" in state}
            self.optimizer.state[p] = {k: v if k == "step" else self.world.like(v, p) for k, v in kinds.items()}

    def _schedule(self, update: int) -> None:
        """Linear warm-up, then constant or linear to 0 at the phase's last step."""
        c, now = self.config, self.done + update / self.config.updates
        scale = min(1.0, (now + 1) / (c.warmup + 1))
        if c.schedule == "linear":
            scale *= max(0.0, 1 - now / max(self.steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * scale


def toy(steps: int = 60, seed: int = 0) -> list[float]:
    """A tiny model learns to repeat its prompt's only token; reward: the share of its four tokens that do."""
    from toolr0_core.distributed import setup
    from toolr0_core.sampler import Sampler, SamplingParams
    from toolr0_core.schema import Prompt, Reward

    torch.manual_seed(seed)
    model = Model(ModelConfig(16, 64, 128, 2, 4, 4, 16))
    model.embed_tokens.weight.data.normal_(0, 0.1)
    trainer = Trainer(model, GrpoConfig(group_size=8, beta=0.0, schedule="constant"), setup(), lr=3e-3, steps=steps)
    print("On-policy, the loss is 0 at every step and its gradient is not: advantages sum to 0 and every ratio is 1.")
    curve = []
    for step in range(steps):
        asked = [[(step + i) % 16] for i in range(16)]
        drawn = Sampler(model).generate(asked, SamplingParams(n=8, max_new_tokens=4, seed=step))
        rows = [Scored(Prompt(tuple(ids), ""), c, Reward(sum(t == ids[0] for t in c.token_ids) / 4), group)
                for group, (ids, completions) in enumerate(zip(asked, drawn)) for c in completions]
        stats = trainer.step(rows, [row.reward.total for row in rows])
        curve.append(sum(row.reward.total for row in rows) / len(rows))
        if step % 5 == 0 or step + 1 == steps:
            print(f"step {step:3}  reward {curve[-1]:.3f}  loss {stats['loss']:+.4f}  gradient norm {stats['grad_norm']:.3f}")
    return curve


if __name__ == "__main__":
    toy()
