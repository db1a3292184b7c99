"""options, presets and the plan of a run."""

import dataclasses
import re
import subprocess
import sys

import pytest

from toolr0_core import options, presets
from toolr0_core.config import Config


def parse(*argv):
    return options.parse(argv, "a program")[0]


def failure(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def test_options_override_the_preset():
    config = parse("--preset", "qwen2.5-1.5b", "--grpo.beta", "0", "--solver.steps=7", "--rewards.judge", "false",
                   "--curriculum.min-question", "3", "--specs.one_call_menu", '{"2": 1, "3": 0.5}')
    assert (config.preset, config.grpo.beta, config.solver.steps, config.rewards.judge) == ("qwen2.5-1.5b", 0.0, 7, False)
    assert config.curriculum.min_question == 3 and config.specs.one_call_menu == {2: 1.0, 3: 0.5}
    assert config.generator == Config().generator


def test_paper_presets_hold_the_papers_numbers():
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "llama-3.2-3b"):
        c = parse("--preset", name)
        assert (c.generator.completions, c.solver.completions, c.grpo.group_size, c.iterations) == (24, 32, 4, 3)
        assert (c.generator.steps, c.solver.steps, c.generator.lr, c.grpo.schedule) == (50, 50, 1e-6, "linear")
        assert (c.curriculum.candidates, c.curriculum.keep, c.curriculum.probes) == (10_000, 2_000, 8)
        assert (c.curriculum.probe_temperature, c.sampler.max_new_tokens, c.grpo.beta) == (0.7, 2048, 0.001)
        assert (c.prompts.form, c.rewards.require_think, c.rewards.format_reduce) == ("full", True, "sum")
        presets.validate(c)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_valid(name):
    presets.validate(presets.resolve(presets.PRESETS[name]()))


@pytest.mark.parametrize("argv, named", [
    (("--grop.beta", "1"), "--grpo.beta"), (("--preset", "nono"), "nano"), (("--solver.steps", "x"), "solver.steps"),
    (("--rewards.judge", "maybe"), "true nor false"), (("--specs.one_call_menu", "[]"), "one_call_menu"), (("stray",), "stray"),
    (("--specs.one_call_menu", '{"two": 1}'), "whole numbers"), (("--specs.one_call_menu", '{"2": NaN}'), "finite"),
    (("--specs.one_call_menu", "{"), '{"2": 0.5}'), (("--specs.one_call_menu", '{"2":' + "[" * 10**5), '{"2": 0.5}'),
    (("--specs.one_call_menu", '{"2": 1' + "0" * 400 + "}"), "finite"), (("--specs.one_call_menu", '{"2": []}'), "weights"),
    (("--solver.lr", "inf"), "finite"), (("--grpo.beta", "nan"), "finite"),
    (("--solver.steps", "2.5"), "whole number"), (("--curriculum.keep",), "--curriculum.keep")])
def test_a_wrong_option_is_one_line_that_says_what_is_legal(argv, named, capsys):
    assert named in (line := failure(capsys, *argv)) and len(line) < 300


@pytest.mark.parametrize("group, changes, named", [
    ("grpo", {"group_size": 1}, "group_size is 1"), ("grpo", {"beta": -0.1}, "beta"), ("grpo", {"scale": "max"}, "scale"),
    ("grpo", {"clip_low": 1.0}, "clip_low"), ("grpo", {"updates": 0}, "updates"), ("grpo", {"aggregation": "x"}, "aggregation"),
    ("rewards", {"low": 0.8}, "rewards.low"), ("rewards", {"high": 1.2}, "rewards.low"), ("rewards", {"sigma": 0.0}, "sigma"),
    ("curriculum", {"easy": 0.9}, "easy"), ("curriculum", {"probes": 0}, "probes"), ("sampler", {"temperature": 0.0}, "temperature"),
    ("sampler", {"top_p": 0.0}, "top_p"), ("generator", {"completions": 25}, "generator.completions is 25"),
    ("solver", {"lr": 0.0}, "solver.lr"), ("specs", {"two_calls": 1.5}, "two_calls"), ("prompts", {"form": "long"}, "form"), ("prompts", {"examples": "none"}, "prompts.examples"), ("solver", {"steps": -1}, "solver.steps"),
    ("curriculum", {"probe_temperature": 0.0}, "probe_temperature"), ("curriculum", {"temperature": 0.0}, "curriculum.temperature"),
    ("curriculum", {"easy": -0.3, "medium": 1.0, "hard": 0.3}, "curriculum.easy"), ("curriculum", {"near_duplicate": 0.0}, "near_d"),
    ("curriculum", {"min_p": 1.0}, "min_p"), ("curriculum", {"again": -1.0}, "again"), ("grpo", {"warmup": -1}, "warmup"),
    ("grpo", {"max_grad_norm": 0.0}, "max_grad_norm"), ("grpo", {"adam_beta2": 1.0}, "adam_beta2"), ("eval", {"limit": -1}, "limit"),
    ("grpo", {"schedule": "cosine"}, "'cosine'"), ("rewards", {"rule": "exact"}, "rule"), ("eval", {"samples": 0}, "samples"),
    ("specs", {"one_call_menu": {}}, "one_call_menu"), ("specs", {"one_call_menu": {0: 1.0}}, "one_call_menu"),
    ("specs", {"two_call_menu": {3: -1.0, 4: 2.0}}, "two_call_menu"), ("specs", {"two_call_menu": {3: 0.0}}, "two_call_menu")])
def test_impossible_numbers_are_named_with_their_rule(group, changes, named):
    config = presets.nano()
    config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **changes)})
    with pytest.raises(ValueError, match=named) as error:
        presets.validate(config)
    assert "has to be" in str(error.value) and "\n" not in str(error.value)


NUMBERS = {name: value for name, (value, _) in options.leaves(Config()).items() if type(value) in (int, float) and name != "seed"}


@pytest.mark.parametrize("name, value", [
    *((name, -value if sign else value) for name in NUMBERS for value in ([10**20] if type(NUMBERS[name]) is int else [1e300])
      for sign in (0, 1)),
    *((name, 1e-320) for name in ("rewards.sigma", "sampler.temperature", "curriculum.temperature", "sampler.top_p",
                                  "curriculum.probe_temperature", "sampler.kv_gib", "solver.lr", "grpo.max_grad_norm")),
    ("specs.one_call_menu", {2: 1e308}), ("specs.two_call_menu", {10**20: 1.0})])
def test_no_number_is_without_bounds(name, value):
    with pytest.raises(ValueError, match=name) as error:
        presets.validate(options.with_values(presets.nano(), {name: value}))
    assert "has to be" in str(error.value) and len(str(error.value)) < 250


def test_the_ablation_of_the_difficulty_reward_turns_its_term_off():
    assert parse("--ablate", "no-difficulty").rewards.difficulty  # as asked; resolve draws the conclusion
    assert not presets.resolve(parse("--ablate", "no-difficulty")).rewards.difficulty
    for other in ("", "shared-weights", "frozen-generator"):
        assert presets.resolve(parse("--ablate", other)).rewards.difficulty
    with pytest.raises(ValueError, match="one of shared-weights, frozen-generator, no-difficulty"):
        presets.validate(parse("--ablate", "nothing"))


def test_programs_add_options_of_their_own():
    def add(parser):
        parser.add_argument("--json")

    config, own = options.parse(["--json", "x", "--seed", "5"], "a program", add)
    assert (vars(own), config.seed) == ({"json": "x"}, 5)


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        parse("--nothing")
    assert stop.value.code == 1 and capsys.readouterr().err == ""


def test_a_micro_batch_holds_the_longest_sequence():
    config = presets.nano()
    presets.check_budget(config, "generator", config.grpo.micro_batch_tokens - config.generator.max_new_tokens)
    with pytest.raises(ValueError, match="micro_batch_tokens is .* the generator's longest sequence"):
        presets.check_budget(config, "generator", config.grpo.micro_batch_tokens - config.generator.max_new_tokens + 1)


def test_text_modules_import_no_torch():
    names = "schema specs prompts parse matching rewards curriculum config options presets rng".split()
    code = f"import sys; {'; '.join(f'import toolr0_core.{n}' for n in names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_shows_every_setting_and_imports_no_torch():
    done = subprocess.run([sys.executable, "-X", "importtime", "launch/selfplay.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and all(f"--{name}" in done.stdout for name in options.leaves(Config()))
    assert re.search(r"\|\s+toolr0_core.presets\b", done.stderr) and not re.search(r"\|\s+torch\b", done.stderr)
