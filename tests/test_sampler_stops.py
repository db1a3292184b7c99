"""sampler: where sequences end, and how they go on when text is put in. Greedy, so that what is written is known."""

import pytest
import torch

from toolr0_core.sampler import Sampler, SamplingParams


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)


class Pieces:
    """A tokenizer with given bytes for some tokens, "-" for the others; what is no UTF-8 becomes U+FFFD."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids):
        return b"".join(self.pieces.get(i, b"-") for i in ids).decode("utf-8", "replace")


@pytest.fixture
def model(tiny):
    return tiny(tie_word_embeddings=False)  # tied random models repeat themselves


PROMPT = [35, 14, 71, 77]  # continued by 14 different tokens


def free_run(model, n=14):
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(n):
            ids.append(model.logits(torch.tensor([ids]))[0, -1].argmax().item())
    assert len(set(ids[len(PROMPT):])) == n
    return ids[len(PROMPT):]


def run(model, tokenizer=None, on_stop=None, prompt=PROMPT, **params):
    settings = SamplingParams(**{"temperature": 0, "max_new_tokens": 14, **params})
    ((completion,),) = Sampler(model, tokenizer).generate([prompt], settings, on_stop=on_stop)
    assert len(completion.logprobs) == len(completion.token_ids)
    return completion


@pytest.mark.parametrize("at", [0, 1, 6, 13])
def test_a_stop_token_ends_the_sequence_and_is_kept(model, at):
    tokens = free_run(model)
    end = tokens.index(tokens[at]) + 1
    c = run(model, stop_token_ids=(96, tokens[at], *tokens[at + 1:]))
    assert list(c.token_ids) == tokens[:end] and c.finish_reason == "stop"


def test_stop_tokens_inside_the_prompt_do_not_count(model):
    tokens = free_run(model)
    stops = tuple(set(PROMPT) - set(tokens))
    c = run(model, stop_token_ids=stops)
    assert stops and list(c.token_ids) == tokens and c.finish_reason == "length"


def test_the_length_limit_is_exact(model):
    tokens = free_run(model)
    for limit in (1, 2, 13):
        c = run(model, max_new_tokens=limit)
        assert list(c.token_ids) == tokens[:limit] and c.finish_reason == "length"


def test_rows_of_one_batch_stop_by_their_own_rules(model):
    tokens = free_run(model)
    params = [SamplingParams(temperature=0, max_new_tokens=m, stop_token_ids=s) for m, s in
              [(3, ()), (14, (tokens[5],)), (9, (tokens[8],)), (1, ()), (14, ())]]
    out = Sampler(model).generate([PROMPT] * 5, params)
    ends = [3, tokens.index(tokens[5]) + 1, tokens.index(tokens[8]) + 1, 1, 14]
    assert [list(c.token_ids) for (c,) in out] == [tokens[:end] for end in ends]


@pytest.mark.parametrize("start, size", [(0, 1), (0, 3), (3, 1), (3, 4), (10, 4)])
def test_a_stop_string_ends_where_its_last_token_does(model, start, size):
    tokens = free_run(model)
    text = Letters().decode(tokens)
    string = text[start: start + size]
    end = text.index(string) + size
    c = run(model, Letters(), stop_strings=("not this one!", string))
    assert c.text == text[:end] and list(c.token_ids) == tokens[:end] and c.finish_reason == "stop"


def test_a_stop_string_may_start_and_end_inside_tokens(model):
    tokens = free_run(model)
    assert len(set(tokens[:4])) == 4
    pieces = {tokens[0]: b"a<", tokens[1]: b"/to", tokens[2]: b"ol>b", tokens[3]: b"c"}
    c = run(model, Pieces(pieces), stop_strings=("</tool>",))
    assert c.text == "a</tool>b" and list(c.token_ids) == tokens[:3]


def test_a_stop_string_of_characters_that_are_split_over_tokens(model):
    tokens = free_run(model)
    one, two = "é".encode()
    c = run(model, Pieces({tokens[0]: b"x" + bytes([one]), tokens[1]: bytes([two])}), stop_strings=("é",))
    assert c.text == "xé" and list(c.token_ids) == tokens[:2]


def test_tokens_without_text_inside_a_stop_string_do_not_hide_it(model):
    tokens = free_run(model)
    pieces = {t: b"" for t in tokens} | {tokens[0]: b"<", tokens[-1]: b">"}
    last = tokens.index(tokens[-1])
    assert tokens.index(tokens[0]) == 0 and tokens.count(tokens[0]) == 1 and last > 6
    c = run(model, Pieces(pieces), stop_strings=("<>",))
    assert c.finish_reason == "stop" and len(c.token_ids) == last + 1


def test_a_stop_string_of_white_space_is_found_when_single_tokens_lose_theirs(model):
    tokens = free_run(model)

    class Stripping(Letters):
        def decode(self, ids):
            return "".join(" " if i == tokens[4] else "x" for i in ids).lstrip()
    c = run(model, Stripping(), stop_strings=("x ",))
    assert list(c.token_ids) == tokens[: tokens.index(tokens[4]) + 1]


def test_put_in_text_is_read_by_the_model_and_marked(model):
    tokens = free_run(model)
    asked = []

    def on_stop(request, sample, completion):
        asked.append((request, sample, completion.token_ids, completion.finish_reason))
        return [40, 41, 42] if len(asked) == 1 else None
    c = run(model, on_stop=on_stop, stop_token_ids=(tokens[2], 41), max_new_tokens=9)
    assert asked[0] == (0, 0, tuple(tokens[:3]), "stop")
    assert list(c.token_ids[:6]) == [*tokens[:3], 40, 41, 42]  # 41 is a stop token, but nobody sampled it
    assert c.sampled[:6] == (True,) * 3 + (False,) * 3 and all(c.sampled[6:]) and c.logprobs[3:6] == (0.0,) * 3
    ids = [*PROMPT, *c.token_ids]
    logp = model.logits(torch.tensor([ids]))[0].log_softmax(-1)
    for i, token in enumerate(c.token_ids):
        if c.sampled[i]:
            row = logp[len(PROMPT) + i - 1]
            assert row.argmax() == token and c.logprobs[i] == pytest.approx(row.max().item(), abs=1e-5)


def test_put_in_text_keeps_the_other_rows_and_later_draws_as_they_were(model):
    params = [SamplingParams(n=3, max_new_tokens=12, seed=i, stop_token_ids=tuple(range(20))) for i in range(4)]
    prompts = [PROMPT[: i + 1] for i in range(4)]
    plain = Sampler(model).generate(prompts, params)
    asked = set()

    def on_stop(request, sample, completion):
        first = (request, sample) not in asked
        asked.add((request, sample))
        return [50] if first and request == 1 else None
    mixed = Sampler(model, max_sequences=6).generate(prompts, params, on_stop=on_stop)
    assert [[c.token_ids for c in g] for i, g in enumerate(mixed) if i != 1] == [
        [c.token_ids for c in g] for i, g in enumerate(plain) if i != 1]
    for before, after in zip(plain[1], mixed[1]):
        stopped = before.finish_reason == "stop" and len(before.token_ids) < 12
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert (after.token_ids[len(before.token_ids):] != ()) == stopped
        assert (False in after.sampled) == stopped


def test_put_in_text_counts_against_the_limit_and_none_is_asked_for_without_room(model):
    tokens = free_run(model)
    stop = {"stop_token_ids": (tokens[2],), "on_stop": lambda *_: [40] * 100}
    c = run(model, max_new_tokens=6, **stop)
    assert list(c.token_ids) == [*tokens[:3], 40, 40, 40] and c.finish_reason == "length"
    c = run(model, max_new_tokens=3, **stop)
    assert list(c.token_ids) == tokens[:3] and c.finish_reason == "stop"


def test_a_stop_string_before_or_inside_put_in_text_does_not_stop_again(model):
    tokens = free_run(model)
    string = Letters().decode(tokens[1:3])
    calls = []

    def on_stop(request, sample, completion):
        calls.append(completion.text)
        return [*tokens[1:3], 9] if len(calls) == 1 else None
    c = run(model, Letters(), on_stop=on_stop, stop_strings=(string,), max_new_tokens=8)
    assert calls[0] == Letters().decode(tokens[:3]) and len(c.token_ids) > 6
    assert all(text.endswith(string) for text in calls)


@pytest.mark.parametrize("put_in", [[], [0], [0, 0, 1]])
def test_old_text_is_no_stop_even_when_new_tokens_could_end_one(model, put_in):
    """Every sampled token has the string's last letter, and the string stands just before it."""
    first = free_run(model)[0]
    calls = []

    def on_stop(request, sample, completion):
        calls.append(completion.token_ids)
        return put_in
    c = run(model, Pieces({i: b"b" for i in range(1, 97)} | {0: b"ab", first: b"ab"}), on_stop=on_stop, stop_strings=("ab",))
    again = [i for i, t in enumerate(c.token_ids) if i and c.sampled[i] and t in (0, first)]
    assert [len(ids) - 1 for ids in calls] == [0, *again] and len(c.token_ids) == 14


def test_an_empty_put_in_goes_on(model):
    tokens = free_run(model)
    c = run(model, on_stop=lambda *_: [], stop_token_ids=(tokens[3],))
    assert list(c.token_ids) == tokens and c.finish_reason == "length" and all(c.sampled)
