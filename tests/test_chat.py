"""chat: menus from files, hostile text, streams of tokens, the Solver's layout, sessions on a pipe and on a terminal."""

import json
import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from dataclasses import replace
from pathlib import Path

import chat as program
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolr0_core import model, options, presets, tokenizer
from toolr0_core.assets import grammar
from toolr0_core.chat import Chat, TextStream, locate
from toolr0_core.config import Config, PromptConfig
from toolr0_core.distributed import World
from toolr0_core.menu import escaped, one_line, problems, read_menu, shown_call, shown_tool
from toolr0_core.parse import parse_calls
from toolr0_core.roles import Player, Purpose
from toolr0_core.rundir import RunDir
from toolr0_core.sampler import Sampler, SamplingParams
from toolr0_core.schema import Tool, ToolCall

ROOT = Path(__file__).parents[1]
LAUNCH = str(ROOT / "launch" / "chat.py")
HOTEL = {"name": "book_hotel", "description": "Books a room", "parameters": {"city": {"type": "string"}, "nights": {"type": "integer"}},
         "required": ["city"]}


@pytest.fixture(scope="module")
def nano():
    """Sampler and tokenizer of the embedded model."""
    text = tokenizer.load("nano")
    return Sampler(model.load("nano"), text), text


def begun(nano, menu=(), remembers=True, config=None, system="", **params):
    sampler, text = nano
    out = Chat(sampler, text, config or presets.nano(), system)
    out.begin(menu, remembers, SamplingParams(**{"temperature": 0.0, "max_new_tokens": 24, "stop_token_ids": text.stop_token_ids,
                                                 **params}))
    return out


def tasks(n, seed=3):
    rng = random.Random(seed)
    return [grammar.sample_task(rng) for _ in range(n)]


def menu_file(folder, value):
    path = folder / "menu.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


# -- menus -------------------------------------------------------------------------------------------------------------


def test_a_menu_in_the_projects_form_and_in_openais_is_the_same(tmp_path):
    wrapped = {"type": "function", "function": HOTEL | {"parameters": {"type": "object", "properties": HOTEL["parameters"],
                                                                      "required": ["city"]}, "strict": True}}
    del wrapped["function"]["required"]
    for entry in (HOTEL, wrapped):
        assert read_menu(menu_file(tmp_path, [entry])) == (Tool.from_json(HOTEL),)
    for task in tasks(3):
        assert read_menu(menu_file(tmp_path, [t.to_json() for t in task.tools])) == task.tools
    assert read_menu(menu_file(tmp_path, "\ufeff" + json.dumps([{"name": "stop"}]))) == (Tool("stop"),)


@pytest.mark.parametrize("value, named", [
    ("[", "line 1 column 2"), ("[" * 10**5, "recursion"), ("", "Expecting value"), ({"tools": []}, "holds a dict"), ([], "an empty list"), ("5", "a int"),
    ([HOTEL, "x"], "entry 2: a tool without a name"), ([HOTEL, {"name": " "}], "entry 2: a tool without a name"),
    ([{"name": "a", "parameters": []}], "entry 1: parameters of 'a'"), ([{"name": "a", "required": "city"}], "entry 1: required of 'a'"),
    ([{"name": "a", "parameters": {"city": 5}}], "neither a type nor a schema"), ([HOTEL | {"description": 5}], "no text"),
    ([HOTEL, HOTEL | {"input_schema": {}}], "entry 2: the tool has 'input_schema'"), ([HOTEL | {"required": ["town"]}], "requires 'town'"),
    ([{"type": "function", "function": HOTEL | {"returns": {}}}], "'returns'"), ([HOTEL, {"name": "b"}, HOTEL], "entries 1, 3 are all named 'book_hotel'"),
    ('[{"name": "a", "description": "\\ud800"}]', "entry 1: bad_json"), ('[{"name": "a\\u001b[2J", "x": NaN}]', "entry 1: bad_json")])
def test_a_bad_menu_is_one_line_that_names_the_entry_and_says_what_is_legal(value, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:  # and the model, which is none, is not looked for
        program.main(["--model", "no-such-model", "--tools", str(menu_file(tmp_path, value))])
    err = capsys.readouterr().err
    assert stop.value.code == 1 and err.startswith("error: menu ") and err.count("\n") == 1 and named in err and "\x1b" not in err
    assert any(remedy in err for remedy in ("a tool is {", "a JSON file with a list of tools", "a name of its own"))


def test_menus_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b'[{"name": "caf\xe9"}]')
    for name, why in (("none", "No such file"), (".", "Is a directory"), ("latin", "utf-8")):
        with pytest.raises(ValueError, match=f"cannot be read .*{why}"):
            read_menu(tmp_path / name)


def test_what_keeps_a_call_from_being_made():
    menu = (Tool.from_json(HOTEL),)
    assert problems(ToolCall("book_hotel", {"city": "Oslo"}), menu) == []
    assert problems(ToolCall("book_flight", {"city": "Oslo"}), menu) == ["not in the menu"]
    assert problems(ToolCall("book_hotel", {"nights": 3, "x\x1b": 1}), menu) == ["lacks city", "has no parameter x\\x1b"]


def test_tools_and_calls_are_one_line_each():
    assert shown_tool(Tool.from_json(HOTEL)) == "book_hotel(city: string, [nights: integer])  Books a room"
    assert shown_call(ToolCall("f", {"a": 'é"', "b": [1, {"c": None}], "d": True})) == 'f(a="é\\"", b=[1, {"c": null}], d=true)'
    assert shown_call(ToolCall("f\ncall: g", {"\t": "\n\x9b\u202e"})) == 'f\\ncall: g(\\t="\\n\\x9b\\u202e")'


# -- hostile text --------------------------------------------------------------------------------------------------------


def is_hostile(c):
    """By the Unicode database: controls, surrogates, line and paragraph separators, and what sets a direction."""
    return (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"
            or unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI") or c in "\u200e\u200f\u061c")


def test_every_control_character_is_escaped_and_no_other_character_is():
    for i in range(0x110000):
        c = chr(i)
        assert (escaped(c) != c) == is_hostile(c), hex(i)


@pytest.mark.parametrize("text, shown", [
    ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"), ("\x1b]0;title\x07", "\\x1b]0;title\\x07"), ("\x9b2J", "\\x9b2J"), ("a\rb", "a\\rb"),
    ("\u202eabc", "\\u202eabc"), ("\u2066x\u2069", "\\u2066x\\u2069"), ("a\x08b\x7f\x00", "a\\x08b\\x7f\\x00"), ("\ud83d", "\\ud83d"),
    ("zwj 👩\u200d🔬 é\n\tö", "zwj 👩\u200d🔬 é\n\tö")])
def test_escapes_are_shown_and_not_sent(text, shown):
    assert escaped(text) == shown and one_line(text) == shown.replace("\n", "\\n").replace("\t", "\\t")


class Parrot:
    """A sampler that says what it is told to."""

    def __init__(self, sampler, tokens):
        self.model, self.tokens = sampler.model, tokens

    def generate(self, prompts, params, on_token):
        for token in self.tokens:
            on_token(0, 0, token)
        return [[type("Done", (), {"finish_reason": "stop"})()]]


def test_an_answer_that_means_harm_reaches_the_terminal_escaped(nano, capsys):
    sampler, text = nano
    calls = [{"name": "x\ncall: forged\x1b[2J", "arguments": {"\u202eq": "\x9b\x07"}}]
    said = "".join(map(chr, range(32))) + "\x7f\x85\x9b31m\u202e\u2066 <tool_call_answer>" + json.dumps(calls, ensure_ascii=False) + "</tool_call_answer>"
    talk = begun(nano, menu=(Tool.from_json(HOTEL),))
    talk.sampler = Parrot(sampler, text.encode(said) + list(text.stop_token_ids))
    turn = program.answer(talk, "hello")
    out, err = capsys.readouterr()
    assert not any(is_hostile(c) for c in out + err) and "\\x1b" in out and "\\u202e" in out
    assert turn["text"] == said and "<|end|>" not in out
    assert [line for line in out.splitlines() if line.startswith("call: ")] == [
        'call: x\\ncall: forged\\x1b[2J(\\u202eq="\\x9b\\u0007") | not in the menu']


# -- streams -------------------------------------------------------------------------------------------------------------


def streamed(decode, ids):
    stream = TextStream(decode)
    pieces = [stream.push(i) for i in ids]
    return pieces, stream.rest()


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_streamed_are_the_text_of_all(ids):
    decode = lambda ids: bytes(ids).decode("utf-8", "replace")  # noqa: E731
    pieces, rest = streamed(decode, ids)
    assert "".join(pieces) + rest == decode(ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
def test_characters_appear_with_their_last_byte(text):
    ids, decode = list(text.encode()), lambda ids: bytes(ids).decode("utf-8", "replace")
    pieces, rest = streamed(decode, ids)
    ends = {len(text[: i + 1].encode()) - 1: c for i, c in enumerate(text)}
    assert rest == "" and pieces == [ends.get(i, "") for i in range(len(ids))]


@given(st.lists(st.text(max_size=8) | st.integers(0, 1279), max_size=12))
def test_the_embedded_tokenizers_tokens_streamed_are_the_text_of_all(parts):
    text = TEXT
    ids = [i for part in parts for i in (text.encode(part) if isinstance(part, str) else [part])]
    pieces, rest = streamed(text.decode, ids)
    assert "".join(pieces) + rest == text.decode(ids)


TEXT = tokenizer.load("nano")


def test_a_character_in_several_tokens_is_no_question_mark():
    ids = TEXT.encode("a😀汉")
    assert len(ids) > 5
    pieces, rest = streamed(TEXT.decode, ids)
    assert [p for p in pieces if p] == ["a", "😀", "汉"] and rest == ""


# -- the layout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_the_first_message_is_the_solvers_prompt_to_the_token(preset, nano):
    sampler, text = nano
    config, (task,) = presets.PRESETS[preset](), tasks(1)
    player = Player(sampler.model, text, config, World(0, 1, torch.device("cpu"), False), "solver")
    talk = begun(nano, task.tools, config=config)
    assert tuple(text.render(talk.messages(task.question), prefix=talk.prefix)) == player.answer_prompts([task])[0].token_ids
    assert talk.prefix == player.prefix


def test_earlier_turns_stand_before_the_last_one(nano):
    (task,) = tasks(1)
    talk = begun(nano, task.tools)
    single = talk.messages("second")
    first = talk.ask("first", lambda text: None)
    assert talk.messages("second") == [single[0], begun(nano, task.tools).messages("first")[-1],
                                       {"role": "assistant", "content": first["text"]}, single[-1]]
    alone = begun(nano, task.tools, remembers=False)
    alone.ask("first", lambda text: None)
    assert alone.messages("second") == single


def test_plain_chat_and_a_system_prompt_of_ones_own(nano):
    user = {"role": "user", "content": "hello"}
    assert begun(nano).messages("hello") == [user]
    assert begun(nano, system="Be kind.").messages("hello") == [{"role": "system", "content": "Be kind."}, user]
    with_menu = begun(nano, tasks(1)[0].tools).messages("hello")
    own = begun(nano, tasks(1)[0].tools, system="Be kind.").messages("hello")
    assert own == [{"role": "system", "content": "Be kind."}, *with_menu[1:]] and len(own) == 2


def test_the_answer_is_that_of_the_greedy_evaluation(nano):
    sampler, text = nano
    config = presets.nano()
    player = Player(sampler.model, text, config, World(0, 1, torch.device("cpu"), False), "solver")
    for task in tasks(2):
        (((wanted,),)) = player.sample(player.answer_prompts([task]), Purpose(0, "greedy"), n=1, temperature=0.0)
        own = program.parse(["--model", "nano", "--tools", "x"])
        talk = Chat(sampler, text, config)
        program.begin(talk, own, task.tools)
        turn = talk.ask(task.question, lambda text: None)
        assert turn["token_ids"] == list(wanted.token_ids) and turn["text"] == player.text(wanted)


# -- the session -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c():
    """As in a terminal; a process started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_the_answer_and_keeps_the_session(nano, ctrl_c):
    talk, seen = begun(nano, max_new_tokens=200), []

    def emit(text):
        seen.append(text)
        if len(seen) == 6:
            signal.raise_signal(signal.SIGINT)

    stopped = talk.ask("domain: travel", emit)
    assert stopped["finish_reason"] == "interrupted" and 4 <= len(stopped["token_ids"]) <= 6 and talk.sampler.pages_in_use == 0
    assert talk.turns[-1] == {"role": "assistant", "content": stopped["text"]}
    talk.turns.clear()
    again = talk.ask("domain: travel", lambda text: None)
    assert again["text"].startswith(stopped["text"]) and len(again["token_ids"]) > 6


def test_a_conversation_without_room_says_what_to_do(nano):
    talk = begun(nano)
    with pytest.raises(ValueError, match=r"the message takes \d,\d+ tokens, and the model has 1,024 positions, .*; shorten it"):
        talk.ask("word " * 1100, lambda text: None)
    talk.ask("7 " * 480, lambda text: None)  # two tokens each
    with pytest.raises(ValueError, match="the conversation takes .* type /reset"):
        talk.ask("7 " * 100, lambda text: None)
    program.command("/reset", talk, None)
    assert talk.ask("hello", lambda text: None)["token_ids"]


def test_an_answer_ends_where_the_positions_do(nano, capsys):
    talk = begun(nano, max_new_tokens=200)
    ids = len(talk.tokenizer.render(talk.messages("")))
    message = "7 " * ((1024 - ids) // 2 - 4)
    left = 1024 - len(talk.tokenizer.render(talk.messages(message.strip())))
    turn = program.answer(talk, message.strip())
    assert 0 < left < 20 and (turn["out_of_room"], len(turn["token_ids"])) == (True, left)
    assert "positions are full; /reset" in capsys.readouterr().err


def test_draws_depend_on_the_seed_and_the_message_alone(nano):
    def drawn(seed):
        talk = begun(nano, remembers=False, temperature=1.0, seed=seed)
        return [talk.ask("hello", lambda text: None)["token_ids"] for _ in range(2)]

    first = drawn(0)
    assert first == drawn(0) and first[0] != first[1] and first != drawn(1)


@pytest.mark.parametrize("argv, named", [
    ([], "--model is missing"), (["--model", "nono"], "presets are nano, smollm2-135m"), (["--model", "nano", "--top_p", "2"], "--top_p is 2.0"),
    (["--model", "nano", "--temperature", "-1"], "0 (greedy) or from"), (["--model", "nano", "--top-k", "x"], "whole number"),
    (["--model", "nano", "--max_new_tokens", "-1"], "--max_new_tokens is -1"), (["--model", "nano", "--kv_gib", "1e-9"], "--kv_gib is 1e-09"),
    (["--model", "nano", "--device", "tpu"], "here it can be auto, cpu"), (["--model", "nano", "--role", "generator"], "leave it out"),
    (["--model", "nano", "--message", " "], "--message is ' '"), (["--model", "nano", "--preset", "x"], "invalid choice: 'x'"),
    (["--model", "nano", "--json", "/no/such/place"], "--json /no/such/place cannot be written"), (["--modle", "nano"], "--model"),
    (["--model", "nano", "--history", "maybe"], "neither true nor false"), (["--model", str(ROOT / "tests")], "config.json cannot be read")])
def test_errors_are_one_line(argv, named, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 1 and err.startswith("error: ") and err.count("\n") == 1 and named in err


def test_help_is_quick_and_imports_no_torch():
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-X", "importtime", LAUNCH, "--help"], capture_output=True, text=True)
    assert time.monotonic() - started < 2
    assert done.returncode == 0 and "--tools FILE" in done.stdout and "toolr0_core.menu" in done.stderr
    assert not any(line.endswith("| torch") for line in done.stderr.splitlines())


def test_without_the_package_it_says_what_to_type(tmp_path):
    done = subprocess.run([sys.executable, "-S", "-E", LAUNCH, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "source .venv/bin/activate" in done.stderr


# -- programs --------------------------------------------------------------------------------------------------------------


def test_a_piped_session_shows_the_calls(tmp_path):
    rng = random.Random(5)
    task = grammar.sample_task(rng, grammar.Draw(plain=True))
    path, out = menu_file(tmp_path, [t.to_json() for t in task.tools]), tmp_path / "out.json"
    asked = [task.question, "  /etc is no command", task.question.replace("Please ", "")]
    piped = f"{asked[0]}\n\n/tools\n{asked[1]}\n{asked[2]}"
    done = subprocess.run([sys.executable, LAUNCH, "--model", "nano", "--tools", str(path), "--json", str(out)], input=piped,
                          capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [turn["asked"] for turn in record["turns"]] == [a.strip() for a in asked]
    for turn in record["turns"]:
        assert escaped(turn["text"]) in done.stdout and TEXT.decode(turn["token_ids"]) == turn["text"]
        found = parse_calls(turn["text"])
        if isinstance(found, tuple):
            assert [ToolCall.from_json(c) for c in turn["calls"]] == list(found)
            assert all(f"call: {shown_call(call)} | " in done.stdout for call in found)
        else:
            assert turn["failure"]["reason"] == found.reason and f"no calls: {found.reason}" in done.stdout
    assert record["turns"][0]["calls"] and done.stdout.count("call: ") >= 1
    assert "tools in the menu, greedy" in done.stderr and shown_tool(task.tools[0]) in done.stderr
    assert shown_tool(task.tools[0]) not in done.stdout


def test_a_session_on_a_terminal():
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, LAUNCH, "--model", "nano", "--max_new_tokens", "8"], dict(os.environ, TERM="dumb"))
    out, deadline = b"", time.monotonic() + 30

    def until(wanted):
        """Reads on, until this stands in what was not there before."""
        nonlocal out
        start = len(out)
        while wanted not in out[start:] and select.select([fd], [], [], max(0, deadline - time.monotonic()))[0]:
            try:
                out += os.read(fd, 4096)
            except OSError:  # the program has ended
                break
        return out[start:]

    try:
        assert b"no tools in the menu, temperature 0.7" in until(b"> ")
        for line, shown in ((b"hello\n", b"(cut at 8 tokens"), (b"\x03", b"Ctrl-D leaves"), (b"/help\n", b"/reset"), (b"/what\n", b"no command")):
            time.sleep(0.2)  # until it listens, as people do
            os.write(fd, line)
            assert shown in until(b"\n> ")
        os.write(fd, b"\x04")
        until(b"never")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
    finally:
        os.close(fd)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# -- runs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A run directory with settings of its own and one model."""
    config = replace(presets.nano(), prompts=PromptConfig(form="full", solver_examples=1), out=str(tmp_path / "run"))
    made = RunDir(tmp_path / "run", writes=True)
    made.hold()
    made.write_config(config)
    shutil.copytree(presets.ASSETS, tmp_path / "run" / "hf" / "solver")
    return tmp_path / "run", config


def test_a_run_stands_for_its_solver_and_its_prompts(run, monkeypatch):
    folder, config = run
    for name in (str(folder), str(folder / "hf" / "solver")):
        place, found = locate(name, "", "")
        assert Path(place) == folder / "hf" / "solver" and found.prompts == config.prompts and found.solver == config.solver
    monkeypatch.chdir(folder / "hf" / "solver")
    assert locate(".", "", "")[1].prompts == config.prompts
    assert locate(str(folder), "solver", "smollm2-135m")[1].prompts == presets.smollm2().prompts
    assert locate(str(presets.ASSETS), "", "")[1] == Config() and locate("nano", "", "") == ("nano", presets.nano())


def test_runs_that_cannot_be_talked_to(run):
    folder, _ = run
    with pytest.raises(ValueError, match="without hf/generator; wait"):
        locate(str(folder), "generator", "")
    with pytest.raises(ValueError, match="which --model .* is not"):
        locate(str(folder / "hf" / "solver"), "solver", "")
    for damaged in ({"grpo": {}}, {"grpo": {}, "preset": "x"}, json.loads((folder / "config.json").read_text()) | {"prompts": {"x": 1}},
                    json.loads((folder / "config.json").read_text()) | {"prompts": {"form": "odd"}}):
        (folder / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="does not hold a run's settings"):
            locate(str(folder), "", "")


def test_options_have_both_spellings():
    assert program.parse(["--model", "nano", "--max-new-tokens", "3"]).max_new_tokens == 3
    assert options.reader(0)("7") == 7
