"""selfplay: the loop itself on the embedded model, in small numbers; resume; three ranks; what goes wrong and how it says so."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.selfplay import finish
from toolr0_core import rundir
from toolr0_core.config import Config, RewardConfig
from toolr0_core.schema import TaskSpec
from toolr0_core.selfplay import SelfPlay

ROOT = Path(__file__).parents[1]
SMALL = ("--iterations 1 --generator.steps 2 --generator.completions 16 --solver.steps 3 --solver.completions 16 "
         "--curriculum.candidates 48 --curriculum.keep 12 --eval.limit 12 --eval.samples 2 --curriculum.probes 4").split()


def command(*options, ranks=1):
    launcher = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    return [*launcher, str(ROOT / "launch" / "selfplay.py"), *map(str, options)]


def play(*options, ranks=1, timeout=300):
    return subprocess.run(command(*options, ranks=ranks), capture_output=True, text=True, timeout=timeout)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_time(path):
    """summary.json less what differs between two runs of the same numbers."""
    return {k: v for k, v in json.loads(path.read_text()).items() if k != "seconds"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One small run through every phase."""
    out = tmp_path_factory.mktemp("run") / "out"
    done = play("--preset", "nano", "--out", out, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_a_copied_example_is_not_probed():
    """Else the Generator could earn the difficulty term by heart."""
    text = ("<question>{}</question><available_tools>[{{\"name\":\"wake\",\"parameters\":{{\"day\":\"string\"}}}}]</available_tools>"
            "<tool_call_answer>[{{\"name\":\"wake\",\"arguments\":{{\"day\":\"Friday\"}}}}]</tool_call_answer>")
    game, asked = SelfPlay.__new__(SelfPlay), []
    game.config = Config(rewards=RewardConfig(require_think=False, judge=False))
    game.position, game.shown = rundir.Position(), ["Please wake me on Friday."]
    game.generator = SimpleNamespace(text=lambda written: written)
    game.solver = SimpleNamespace(success_rates=lambda tasks, _: [asked.append(t.question) or 0.5 for t in tasks])
    spec = TaskSpec("time", "single_turn", 1, 1)
    earned, _ = game.score_tasks([spec], [[text.format("Please wake me on Friday."), text.format("Wake us up on Friday.")]])
    assert asked == ["Wake us up on Friday."] and [r.parts["difficulty"] for r in earned] == [0, 1]


def test_every_phase_leaves_its_files(run):
    out, printed = run
    metrics = lines(out / "metrics.jsonl")
    assert [(m["iteration"], m["phase"]) for m in metrics] == [
        (0, "evaluate"), (1, "generator"), (1, "generator"), (1, "curriculum"), *[(1, "solver")] * 3, (1, "evaluate")]
    counts = metrics[3]
    assert 48 <= counts["candidates"] <= 84 and counts["candidates"] == counts["filtered"] + sum(
        n for reason, n in counts["dropped"].items() if reason not in ("duplicate", "never solved"))
    assert counts["rows"] == len(lines(out / "curriculum" / "iteration_1.jsonl")) == 6
    assert sum(counts["dropped"].values()) == len(lines(out / "curriculum" / "iteration_1.dropped.jsonl"))
    assert len(lines(out / "rollouts.jsonl")) == 16 * 5
    summary = json.loads((out / "summary.json").read_text())
    assert summary["base"]["n"] == 12 and len(summary["iterations"]) == 1 and summary["final"] == summary["iterations"][-1]
    assert all(0 <= summary["final"][k]["low"] <= summary["final"][k]["value"] for k in ("greedy", "pass8"))
    assert "iteration 1" in printed and str(out) in printed and str(out / "report.html") in printed
    assert "<html" in (out / "report.html").read_text()


def test_training_consumes_the_curriculum_from_easy_to_hard(run):
    p = [row["p"] for row in lines(run[0] / "curriculum" / "iteration_1.jsonl")]
    assert all(x > 0 for x in p)
    from toolr0_core.curriculum import BUCKETS, bucket
    assert [BUCKETS.index(bucket(x)) for x in p] == sorted(BUCKETS.index(bucket(x)) for x in p)


def test_sampler_and_trainer_agree_on_every_token(run):
    assert all(m["logp_gap"] < 1e-4 for m in lines(run[0] / "metrics.jsonl") if "logp_gap" in m)


def test_both_roles_are_exported_for_transformers(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toolr0_core import model, tokenizer
    ids = []
    for role in ("generator", "solver"):
        folder = run[0] / "hf" / role
        reference, ours = AutoModelForCausalLM.from_pretrained(folder), model.load(folder)
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Book a table."}]
        ids = tokenizer.load(folder).render(messages)
        assert AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False) == ids
        ids = torch.tensor([ids])
        with torch.no_grad():
            mine, theirs, exact = ours.logits(ids), reference(ids).logits, reference.double()(ids).logits
        assert (mine - exact).abs().max() <= (theirs - exact).abs().max() + 1e-5


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_a_stopped_one_ends_the_same(run, tmp_path):
    out = tmp_path / "out"
    options = ["--preset", "nano", "--out", out, *SMALL]
    process = subprocess.Popen(command(*options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith("1 solver      1/3"):
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert any("solver" in p.name for p in (out / "checkpoints").iterdir())  # inside the phase
    done = play(*options, "--resume", "auto")
    assert done.returncode == 0 and "going on at iteration 1, solver" in done.stdout, done.stdout + done.stderr
    assert without_time(out / "summary.json") == without_time(run[0] / "summary.json")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (out / name).read_text() == (run[0] / name).read_text()


def test_a_killed_run_goes_on_from_its_last_phase(run, tmp_path):
    out = tmp_path / "out"
    options = ["--preset", "nano", "--out", out, *SMALL]
    process = subprocess.Popen(command(*options), stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("1 generator   2/2"):
            process.kill()
    process.wait()
    done = play(*options, "--resume", "auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "metrics.jsonl").read_text() == (run[0] / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_three_ranks_play_the_same_game(run, tmp_path):
    out = tmp_path / "out"
    done = play("--preset", "nano", "--out", out, *SMALL, ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    one, three = lines(run[0] / "metrics.jsonl"), lines(out / "metrics.jsonl")
    assert [(m["iteration"], m["phase"]) for m in one] == [(m["iteration"], m["phase"]) for m in three]
    assert three[0] == one[0]  # the base's figures: same draws on any number of ranks
    assert three[1]["reward"] == one[1]["reward"]
    assert three[1]["grad_norm"] == pytest.approx(one[1]["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ablation", ["frozen-generator", "shared-weights", "no-difficulty"])
def test_ablations_run(ablation, tmp_path):
    done = play("--preset", "nano", "--out", tmp_path / "out", *SMALL, "--ablate", ablation, "--eval.limit", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [m for m in lines(tmp_path / "out" / "metrics.jsonl") if m["phase"] == "generator"]
    assert len(steps) == (0 if ablation == "frozen-generator" else 2)
    assert all(("difficulty" in m) == (ablation != "no-difficulty") for m in steps)


def test_no_surviving_task_skips_the_solver_and_says_so(tmp_path):
    done = play("--preset", "nano", "--out", tmp_path / "out", *SMALL, "--curriculum.min_question", "100000", "--eval.limit", "2")
    assert done.returncode == 3 and "no task survived" in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["skipped_solver_phases"] == [1]


@pytest.mark.parametrize("options, named", [
    (["--grpo.group_size", "1"], "grpo.group_size is 1"), (["--rewards.low", "0.9"], "rewards.low is 0.9"),
    (["--generator.completions", "20"], "generator.completions is 20"), (["--grpo.beta", "-1"], "grpo.beta is -1"),
    (["--grpo.micro_batch_tokens", "50"], "micro_batch_tokens is 50"), (["--preset", "gpt"], "unknown preset 'gpt'"),
    (["--grpo.group-sice", "4"], "--grpo.group"), (["--solver.steps", "many"], "many"), (["--model", "/nowhere"], "/nowhere"),
    (["--specs.domains", "/nowhere.json"], "/nowhere.json"), (["--eval.data", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["--ablate", "everything"], "ablate is 'everything'"), (["--out", "/proc/x"], "--out /proc/x cannot be written"),
    (["--out", "/proc/x", "--dry-run"], "--out /proc/x cannot be written"), (["--json", "/nonexistent/x"], "--json /nonexistent/x")])
def test_bad_input_is_one_line_before_any_work(options, named, tmp_path):
    out = [] if "--out" in options else ["--out", tmp_path / "out"]
    done = play(*out, *options)
    assert done.returncode == 1 and named in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_run_directory_is_not_mixed_with_another_run(run):
    assert "holds a run already" in play("--preset", "nano", "--out", run[0], *SMALL).stderr
    other = play("--preset", "nano", "--out", run[0], *SMALL, "--resume", "auto", "--solver.lr", "0.1")
    assert other.returncode == 1 and "--solver.lr" in other.stderr


def test_a_damaged_checkpoint_is_named_and_the_former_one_used(run, tmp_path):
    import shutil
    out = tmp_path / "out"
    shutil.copytree(run[0], out)
    newest = max((out / "checkpoints").iterdir(), key=lambda p: json.loads((p / "state.json").read_text())["order"])
    (newest / "tensors.safetensors").write_bytes(b"damaged")
    done = play("--preset", "nano", "--out", out, *SMALL, "--resume", "auto")
    assert done.returncode == 0 and newest.name in done.stderr, done.stdout + done.stderr


def test_dry_run_prints_the_plan_without_a_directory():
    done = play("--preset", "nano", "--dry-run")
    assert done.returncode == 0 and "8 prompts x 8" in done.stdout and "first prompt of the solver" in done.stdout
    assert "in all" in done.stdout


def test_a_held_out_row_that_is_too_long_is_named(tmp_path):
    rows = [{"id": f"row {n}", "question": "Oslo " * n, "tools": [{"name": "visit"}], "gold": [[]]} for n in (1, 80_000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = play("--preset", "nano", "--dry-run", "--eval.data", tmp_path / "rows.jsonl")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "row 'row 80000' has a prompt of " in done.stderr, done.stderr
    assert "1024 positions, 96 of them for the answer" in done.stderr


def test_dry_run_leaves_nothing_in_the_directory_it_checks(tmp_path):
    done = play("--preset", "nano", "--dry-run", "--out", tmp_path / "a" / "b", "--json", tmp_path / "a" / "b" / "copy.json")
    assert done.returncode == 0 and not list(tmp_path.iterdir()), done.stderr


def test_a_long_phase_tells_a_log_file_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rundir, "SECONDS_BETWEEN_LINES", -1)
    parts = list(rundir.RunDir(tmp_path, writes=True).chunks(range(10), "probes", 4))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()] == ["probes: 4/10", "probes: 8/10"]


def test_a_run_without_matplotlib_is_whole_and_says_that_the_page_is_missing(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    finish(json.loads((run[0] / "summary.json").read_text()), run[0], None)
    assert "no report: matplotlib is not installed" in capsys.readouterr().out
