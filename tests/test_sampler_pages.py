"""sampler: the edges of pages, waits and errors, against the plain loop of test_sampler_schedules."""

import threading
from concurrent.futures import Future

import pytest
import torch
from test_sampler_schedules import TOKEN_BYTES, check, naive

from toolr0_core.sampler import Sampler, SamplingParams

B = 4  # tokens of a page in what follows


def ids(n, seed=0):
    return torch.randint(97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def gib(pages):
    """The memory of so many pages and of the one that is nobody's."""
    return (pages + 1) * B * TOKEN_BYTES / 2**30


def compare(model, prompts, params, **options) -> Sampler:
    """Runs them together, checks every sequence; the sampler that did it."""
    sampler = Sampler(model, page_size=B, **options)
    for prompt, p, group in zip(prompts, params, sampler.generate(prompts, params)):
        assert len(group) == p.n
        for k, c in enumerate(group):
            check(naive(model, prompt, p, k), c)
    assert sampler.pages_in_use == 0
    return sampler


@pytest.fixture
def model(tiny):
    return tiny(tie_word_embeddings=False)  # tied random models repeat themselves


@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, B + 2, 2 * B, 2 * B + 1])
def test_prompts_that_end_about_a_page(model, length):
    s = compare(model, [ids(length)], [SamplingParams(n=3, max_new_tokens=2 * B + 1)])
    own = -(-(length + 2 * B) // B) - (length - 1) // B  # the prompt's full pages once, the others for each sample
    assert s.stats.prefilled == length - 1 and s.stats.shared == 0
    assert s.stats.peak_pages == (length - 1) // B + 3 * own


@pytest.mark.parametrize("max_sequences", [1, 8])
@pytest.mark.parametrize("length, shared", [(2 * B, B), (2 * B + 1, 2 * B), (2 * B + 2, 2 * B), (B, 0)])
def test_the_same_prompt_twice_is_read_once_up_to_its_last_full_page(model, length, shared, max_sequences):
    params = [SamplingParams(max_new_tokens=9, seed=i) for i in range(2)]
    s = compare(model, [ids(length)] * 2, params, max_sequences=max_sequences)
    assert (s.stats.shared, s.stats.prefilled) == (shared, 2 * (length - 1) - shared)


@pytest.mark.parametrize("short", [1, B, B + 1, 2 * B, 2 * B + 2])
def test_a_prompt_that_begins_another_shares_full_pages_in_either_order(model, short):
    prompts, params = [ids(3 * B + 2)[:short], ids(3 * B + 2)], [SamplingParams(n=2, max_new_tokens=7, seed=i) for i in range(2)]
    for order in (1, -1):
        assert compare(model, prompts[::order], params[::order]).stats.shared == (short - 1) // B * B


def test_the_same_page_behind_another_beginning_is_not_shared(model):
    page, params = ids(B), [SamplingParams(max_new_tokens=6, seed=i) for i in range(3)]
    s = compare(model, [[*ids(B, 1), *page, 5], [*ids(B, 2), *page, 5], [*page, *page, 5]], params)
    assert s.stats.shared == 0


def test_a_page_that_was_needed_for_another_is_not_found_again(model):
    params = [SamplingParams(max_new_tokens=8, seed=i) for i in range(3)]  # 5 pages for the first and for the second
    s = compare(model, [ids(13, 1), ids(13, 2), ids(12, 1)], params, kv_gib=gib(5))
    assert s.stats.shared == 0 and s.stats.peak_pages == 5
    assert compare(model, [ids(13, 1), ids(13, 2), ids(12, 1)], params, kv_gib=gib(10)).stats.shared == 2 * B


def test_pages_that_wait_to_be_found_are_not_counted_as_free_by_who_finds_them(model):
    """The first has 4 pages, the second 6; then the third finds 3 of the first's, and there is none for what it adds."""
    params = [SamplingParams(max_new_tokens=m, seed=m) for m in (1, 10, 3)]
    s = compare(model, [ids(16, 1), ids(15, 2), ids(14, 1)], params, kv_gib=gib(9))
    assert s.stats.shared == 3 * B and s.stats.peak_pages == 6


@pytest.mark.parametrize("length", [2, B + 2, B + 3, 2 * B])
def test_samples_that_part_inside_a_page_keep_their_own_copies(model, length):
    s = compare(model, [ids(length)], [SamplingParams(n=5, max_new_tokens=2 * B)], max_sequences=3)
    assert s.stats.prefilled == length - 1 and s.stats.slots == 3


def test_more_samples_than_rows_and_one_row_for_all(model):
    params = [SamplingParams(n=n, max_new_tokens=m, seed=n) for n, m in ((7, 5), (2, 11), (4, 1))]
    s = compare(model, [ids(5), ids(9), ids(1)], params, max_sequences=1)
    assert s.stats.utilisation == 1 and s.stats.steps == s.stats.sampled


def test_a_stop_at_the_first_token_and_one_inside_the_prompt(model):
    prompt = ids(2 * B)
    (first,) = naive(model, prompt, SamplingParams(temperature=0, max_new_tokens=1)).tokens
    params = [SamplingParams(temperature=0, max_new_tokens=9, stop_token_ids=stops)
              for stops in ((first,), tuple(set(prompt) - {first}), (*prompt, first))]
    compare(model, [prompt] * 3, params)
    assert [len(naive(model, prompt, p).tokens) == 1 for p in params] == [True, False, True]


def fail(*_):
    raise ZeroDivisionError


def failed_future(*_):
    future = Future()
    future.set_exception(ZeroDivisionError())
    return future


@pytest.mark.parametrize("calls", [{"on_stop": fail}, {"on_stop": failed_future}, {"on_token": fail}, {"progress": fail}])
def test_an_error_of_the_caller_leaves_no_page_in_use_and_the_sampler_as_it_was(model, calls):
    sampler = Sampler(model, page_size=B, max_sequences=3)
    prompts, params = [ids(9), ids(9), ids(30)], SamplingParams(n=2, max_new_tokens=12, stop_token_ids=tuple(range(20)))
    before = sampler.generate(prompts, params)
    with pytest.raises(ZeroDivisionError):
        sampler.generate(prompts, params, **calls)
    assert sampler.pages_in_use == 0
    assert sampler.generate(prompts, params) == before and sampler.pages_in_use == 0


@pytest.mark.parametrize("max_sequences", [1, 2])
def test_others_go_on_while_one_waits_for_its_text(model, max_sequences):
    """The text of the first comes when the second is done, whose row it may need; a timer ends a wait that would not end."""
    prompts, waits, gave_up = [ids(9), ids(5)], Future(), []
    params = [SamplingParams(temperature=0, max_new_tokens=8, stop_token_ids=(naive(
        model, prompts[0], SamplingParams(temperature=0, max_new_tokens=1)).tokens[0],)), SamplingParams(max_new_tokens=8)]
    timer = threading.Timer(3, lambda: (gave_up.append(True), waits.set_result([11, 12])))
    timer.start()
    order, in_use = [], []

    def progress(n):
        order.append(n)
        in_use.append(sampler.pages_in_use)
        if len(order) == 1 and not gave_up:
            waits.set_result([11, 12])
    sampler = Sampler(model, page_size=B, max_sequences=max_sequences)
    (one,), (two,) = sampler.generate(prompts, params, progress=progress,
                                      on_stop=lambda i, k, c: None if i or waits.done() else waits)
    timer.cancel()
    assert not gave_up
    assert order == [1, 1] and in_use[0] >= 2  # the waiting one has kept its pages
    check(naive(model, prompts[0], params[0], 0, lambda count: [11, 12] if count == 1 else None), one)
    check(naive(model, prompts[1], params[1]), two)
