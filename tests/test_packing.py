"""packing: every token once, within the budget, seeing what it would see alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toolr0_kernels import linear_logprob

from toolr0_core.packing import Row, collate, make_rows, micro_batches, spread


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=25), st.integers(20, 60), st.integers(1, 5))
def test_every_completion_is_packed_once_within_the_budget(spec, budget, ranks):
    groups, completions = [g for g, _ in spec], [tuple(range(n)) for _, n in spec]
    prompts = [tuple(range(g + 2)) for g in groups]
    rows = make_rows(prompts, completions, groups, budget)
    assert sorted(i for row in rows for i in row.members) == [i for i, c in enumerate(completions) if c]
    assert all(row.tokens <= budget and row.prompt == prompts[i] for row in rows for i in row.members)
    shares = spread(rows, ranks)
    assert sorted(map(id, sum(shares, []))) == sorted(map(id, rows))
    packs = [batch for share in shares for batch in micro_batches(share, budget)]
    assert all(sum(r.tokens for r in batch) <= budget for batch in packs) and sum(map(len, packs)) == len(rows)


def test_a_completion_over_the_budget_is_refused_with_numbers():
    with pytest.raises(ValueError, match="prompt of 3 tokens with a completion of 9 .* 10"):
        make_rows([(1, 2, 3)], [tuple(range(9))], [0], 10)


def test_collated_rows_point_at_what_they_predict():
    batch = collate(make_rows([(5, 6)] * 2, [(7, 8), (9,)], [0, 0], 100), "cpu")
    assert batch.ids_N.tolist() == [5, 6, 7, 8, 9] and batch.positions_N.tolist() == [0, 1, 2, 3, 2]
    assert batch.source_M.tolist() == [1, 2, 1] and batch.target_M.tolist() == [7, 8, 9]
    assert batch.member_M.tolist() == [0, 0, 1] and batch.place_M.tolist() == [0, 1, 0]


def test_a_prompt_that_predicts_nothing_or_is_not_the_groups_is_refused():
    with pytest.raises(ValueError, match="completion 1 has a prompt of 0 tokens"):
        make_rows([(5, 6), ()], [(7,), (8,)], [0, 1], 100)
    with pytest.raises(ValueError, match="a group shares one prompt"):
        make_rows([(5, 6), (1, 2)], [(7,), (8,)], [0, 0], 100)


def logprobs(model, batch):
    return model(batch.ids_N, batch.positions_N, batch.attend,
                 lambda hidden, weight: linear_logprob(hidden[batch.source_M], weight, batch.target_M))


PROMPTS = [(5, 6, 7, 8, 9), (11,), (20, 21)]
COMPLETIONS = [[(1, 2, 3), (4,), (1, 2, 3, 4, 5, 6)], [(9, 9)], [(3, 1), (2,)]]


@pytest.mark.parametrize("tied", [True, False])
def test_shared_prompts_equal_sequences_on_their_own_in_loss_and_gradient(tiny, tied):
    rows = [Row(p, tuple(cs), tuple(range(10 * i, 10 * i + len(cs)))) for i, (p, cs) in enumerate(zip(PROMPTS, COMPLETIONS))]
    shared, single = tiny(tie_word_embeddings=tied), tiny(tie_word_embeddings=tied)
    batch = collate(rows, "cpu")
    assert len(batch.ids_N) == sum(map(len, PROMPTS)) + sum(len(c) for cs in COMPLETIONS for c in cs)  # each prompt once
    factor = torch.linspace(-1, 1, len(batch.target_M))
    logp = logprobs(shared, batch)
    (logp * factor).sum().backward()

    alone = []
    for prompt, completions in zip(PROMPTS, COMPLETIONS):
        for completion in completions:
            logits = single.logits(torch.tensor([[*prompt, *completion]]))[0, len(prompt) - 1: -1]
            alone.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    (torch.cat(alone) * factor).sum().backward()
    assert torch.allclose(logp, torch.cat(alone), atol=1e-5)
    for (name, a), b in zip(shared.named_parameters(), single.parameters()):
        assert (a.grad - b.grad).norm() < 1e-5 * b.grad.norm().clamp(min=1e-3), name


def test_a_completion_sees_no_other_and_nothing_of_another_row(tiny):
    """Neighbours change, what stays must not (faults 8 and 10: no token after, no padding before, changes a log-prob)."""
    model = tiny()
    first = logprobs(model, collate([Row((5, 6, 7), ((1, 2, 3), (4, 4)), (0, 1))], "cpu"))[:3]
    other = collate([Row((9,) * 6, ((8, 8),), (7,)), Row((5, 6, 7), ((50, 51, 52, 53), (1, 2, 3), (60,)), (2, 0, 3))], "cpu")
    assert torch.allclose(first, logprobs(model, other)[other.member_M == 0], atol=1e-5)
    longer = collate([Row((5, 6, 7), ((1, 2, 3, 40, 41),), (0,))], "cpu")
    assert torch.allclose(first, logprobs(model, longer)[:3], atol=1e-5)


def test_ranks_get_even_loads_and_one_may_get_nothing():
    rows = [Row((0,) * n, ((1,),), (i,)) for i, n in enumerate([90, 40, 30, 30, 20, 10])]
    loads = [sum(r.tokens for r in share) for share in spread(rows, 3)]
    assert max(loads) == 91 and sum(loads) == 226  # the longest row has a rank to itself: it cannot be evener
    assert [len(share) for share in spread(rows[:2], 3)] == [1, 1, 0] and micro_batches([], 10) == []
