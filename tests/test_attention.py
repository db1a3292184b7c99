"""attention: packed segments against attention written out token by token in fp64."""

import pytest
import torch

from toolr0_core.attention import PackedAttention, Segment, batch_attention

LAYOUTS = {
    "one": [Segment(0, 7)],
    "single tokens": [Segment(0, 1), Segment(1, 1), Segment(2, 1, (0, 1))],
    "uneven, no prefix": [Segment(0, 3), Segment(3, 9), Segment(12, 1)],
    "two prompts with uneven completions": [
        Segment(0, 5), Segment(5, 2, (0, 5)), Segment(7, 6, (0, 5)), Segment(13, 2), Segment(15, 4, (13, 2))],
    "order of segments is free": [Segment(5, 2, (0, 5)), Segment(0, 5), Segment(7, 3)],
    "an empty prefix": [Segment(0, 4, (0, 0)), Segment(4, 3, (0, 4))],
}


def written_out(segments, q_NHE, k_NKE, v_NKE):
    """Each query's softmax over the keys that it may see, one at a time, in fp64."""
    q, k, v = (x.double() for x in (q_NHE, k_NKE, v_NKE))
    group, out = q.shape[1] // k.shape[1], torch.zeros_like(q)
    for s in segments:
        prefix = list(range(s.prefix[0], sum(s.prefix))) if s.prefix else []
        for i in range(s.length):
            seen = [*prefix, *range(s.start, s.start + i + 1)]
            for h in range(q.shape[1]):
                scores = k[seen, h // group] @ q[s.start + i, h] / q.shape[-1] ** 0.5
                out[s.start + i, h] = scores.softmax(0) @ v[seen, h // group]
    return out


def drawn(segments, heads, kv_heads, size=8):
    torch.manual_seed(1)
    n = max(s.start + s.length for s in segments)
    return [torch.randn(n, h, size, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_gradients_equal_attention_written_out(layout, heads, kv_heads):
    segments = LAYOUTS[layout]
    ours, theirs = drawn(segments, heads, kv_heads), drawn(segments, heads, kv_heads)
    got, expected = PackedAttention(segments)(0, *ours), written_out(segments, *theirs)
    assert torch.allclose(got.double(), expected, atol=1e-6)
    weight = torch.randn(got.shape)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, theirs):
        assert torch.allclose(a.grad, b.grad, atol=2e-6)


def test_a_prompts_keys_get_gradients_from_every_completion():
    segments = [Segment(0, 2), Segment(2, 1, (0, 2)), Segment(3, 1, (0, 2))]
    q, k, v = drawn(segments, 2, 2)
    parts = []
    for rows in ([2], [3], [2, 3]):
        out = PackedAttention(segments)(0, q, k, v)
        parts.append(torch.autograd.grad(out[rows].sum(), v)[0][:2])
    assert parts[0].abs().min() > 0 and torch.allclose(parts[0] + parts[1], parts[2], atol=1e-6)


def test_completions_do_not_see_each_other():
    segments = LAYOUTS["two prompts with uneven completions"]
    q, k, v = drawn(segments, 4, 2)
    with torch.no_grad():
        before = PackedAttention(segments)(0, q, k, v)
        k[5:7] += 1
        v[5:7] -= 3
        after = PackedAttention(segments)(0, q, k, v)
    changed = (before != after).flatten(1).any(1)
    assert changed.tolist() == [5 <= i < 7 for i in range(19)]


def test_a_batch_is_segments_of_equal_length():
    segments = [Segment(0, 4), Segment(4, 4), Segment(8, 4)]
    q, k, v = drawn(segments, 4, 2)
    assert torch.equal(batch_attention(3, 4)(0, q, k, v), PackedAttention(segments)(0, q, k, v))
