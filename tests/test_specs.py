"""specs: shares of what is asked, and domain files."""

import collections
import json
import random

import pytest

from toolr0_core.config import SpecConfig
from toolr0_core.specs import DOMAINS, load_domains, sample_spec, shape_shares


def test_specifications_follow_the_papers_shares():
    rng = random.Random(0)
    specs = [sample_spec(rng) for _ in range(20_000)]
    share = lambda test: sum(map(test, specs)) / len(specs)  # noqa: E731
    assert len(DOMAINS) == 32 == len({s.domain for s in specs})
    assert share(lambda s: s.context == "multi_turn") == pytest.approx(0.1, abs=0.01)
    assert share(lambda s: s.n_calls == 2) == pytest.approx(0.9 * 0.2, abs=0.01)
    assert all(s.n_calls == 1 for s in specs if s.context == "multi_turn")
    one = collections.Counter(s.n_tools for s in specs if s.n_calls == 1)
    two = collections.Counter(s.n_tools for s in specs if s.n_calls == 2)
    assert sorted(one) == list(range(2, 9)) and sorted(two) == [3, 4, 5]
    assert sum(one[m] for m in (2, 3, 4)) / one.total() == pytest.approx(0.4, abs=0.015)
    assert two[4] / two.total() == pytest.approx(0.4, abs=0.03)
    shares = shape_shares(SpecConfig())
    assert sum(shares.values()) == pytest.approx(1) and shares[2, 4] == pytest.approx(0.9 * 0.2 * 0.4)


def test_a_domain_file_replaces_names_and_weights(tmp_path):
    path = tmp_path / "domains.json"
    path.write_text(json.dumps({"a": {"weight": 3, "description": "things"}, "b": {"weight": 1}}))
    domains = load_domains(path)
    rng = random.Random(1)
    counts = collections.Counter(sample_spec(rng, SpecConfig(domains=str(path)), domains).domain for _ in range(4000))
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03) and domains["a"].description == "things"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"a": 1}', '{"a": {"weight": -1}}', '{"a": {"weight": "x"}}',
                                     '{"a": {"weight": true}}', '{"a": {"weight": NaN}}', '{"a": {"weight": 1' + "0" * 400 + "}}",
                                     '{"a": {"weight": 1e308}}', '{"a": {"weight": 1}, "a": {"weight": 2}}', "[" * 10**5, "\ud7ff",
                                     '{"a\\ud800": {}}', '{"a": {"description": "\\udc00 b"}}', '{"a": {"description": 5}}'])
def test_a_bad_domain_file_is_one_sentence(content, tmp_path):
    path = tmp_path / "domains.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="domains.json") as error:
        load_domains(path)
    assert "\n" not in str(error.value) and str(error.value).encode()


def test_a_domain_file_that_is_absent_or_binary_is_one_sentence(tmp_path):
    (tmp_path / "domains.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "domains.json", tmp_path / "none" / "domains.json", tmp_path):
        with pytest.raises(ValueError, match="it has to be a JSON object") as error:
            load_domains(path)
        assert "\n" not in str(error.value)


def test_the_same_stream_draws_the_same_specifications():
    draw = lambda seed: [sample_spec(random.Random(seed + i)) for i in range(50)]  # noqa: E731
    assert draw(3) == draw(3) != draw(4)


def test_shapes_of_the_configuration_are_those_that_are_drawn():
    config = SpecConfig(multi_turn=0.0, two_calls=0.5, one_call_menu={2: 1, 6: 3}, two_call_menu={3: 1})
    shares = shape_shares(config)
    assert shares == pytest.approx({(1, 2): 0.125, (1, 6): 0.375, (2, 3): 0.5})
    rng = random.Random(2)
    drawn = collections.Counter((s.n_calls, s.n_tools) for s in (sample_spec(rng, config) for _ in range(8000)))
    assert {k: n / 8000 for k, n in drawn.items()} == pytest.approx(shares, abs=0.02)
    assert set(shape_shares(SpecConfig(two_calls=0.0))) == {(1, m) for m in range(2, 9)}  # what is never asked has no share
