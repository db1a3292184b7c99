"""roles: how requests are divided among ranks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from toolr0_core.packing import deal
from toolr0_core.roles import _parts, _tokens
from toolr0_core.sampling_params import SamplingParams

requests = st.lists(st.builds(lambda length, n, new: ([1] * length, SamplingParams(n=n, max_new_tokens=new)),
                              st.integers(1, 300), st.integers(1, 9), st.integers(1, 200)), max_size=12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(requests, st.integers(1, 8))
def test_parts_are_all_samples_once_in_order(asked, ranks):
    parts = _parts(asked, ranks)
    for i, (ids, params) in enumerate(asked):
        mine = [p for j, (same, p) in parts if j == i and same == ids]
        assert [p.first + k for p in mine for k in range(p.n)] == list(range(params.n))
    assert [i for i, _ in parts] == sorted(i for i, _ in parts)


def test_three_prompts_keep_four_ranks_busy():
    """24 completions of the paper's step; by requests, one rank would have nothing to do."""
    parts = _parts([([1] * 100, SamplingParams(n=8, max_new_tokens=2048))] * 3, 4)
    loads = [sum(_tokens(parts[i][1]) for i in share) for share in deal([_tokens(r) for _, r in parts], 4)]
    assert max(loads) < 1.25 * sum(loads) / 4


def test_work_is_dealt_by_cost_not_by_count():
    assert deal([8, 1, 1, 1, 5], 2) == [[0], [4, 1, 2, 3]]
