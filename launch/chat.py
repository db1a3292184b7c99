"""Talks to a model: plain chat, or with a menu of tools, as the Solver is asked in training and evaluation.

    python launch/chat.py --model runs/nano --tools tools.json
    echo "Book a hotel in Oslo." | python launch/chat.py --model nano --tools tools.json --json answers.json
"""

from __future__ import annotations

import os
import signal
import sys


def stop_at_once(*_) -> None:
    """Ctrl-C until there is an answer to stop."""
    os.write(2, b"\n")
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop_at_once)

import argparse  # noqa: E402
import json  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

try:
    from toolr0_core import options
    from toolr0_core.chat import Chat, locate
    from toolr0_core.menu import escaped, one_line, read_menu, shown_call, shown_tool
    from toolr0_core.presets import PRESETS, new_tokens
    from toolr0_core.schema import Tool, ToolCall
except ModuleNotFoundError as error:
    sys.exit(f"error: this Python has no {error.name}; type `source .venv/bin/activate` in the repository, which "
             f"launch/setup.sh makes, or `pip install -e .`")

PLAIN_TEMPERATURE, PLAIN_TOKENS = 0.7, 512  # of an answer without a menu
HELP = """/tools        the menu; /tools FILE reads another one
/reset        forget the conversation so far
/quit         leave; so does Ctrl-D
Ctrl-C stops an answer. A message that begins with a slash: put a blank before it."""


# -- the terminal ------------------------------------------------------------------------------------------------------


def say(notice: str) -> None:
    print(notice, file=sys.stderr, flush=True)


def emit(text: str) -> None:
    """Text of a model onto the terminal."""
    print(escaped(text), end="", flush=True)


def messages(own: argparse.Namespace) -> Iterator[str]:
    """What the user says: --message, or line by line to the end of the input."""
    if own.message is not None:
        yield own.message
        return
    if sys.stdin.isatty():
        import readline  # noqa: F401  input() then edits lines and remembers them
    while True:
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                line = input("> ")
            else:
                print("> " * sys.stdin.isatty(), end="", file=sys.stderr, flush=True)
                line = sys.stdin.readline()
                if not line:
                    return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            say("\n/quit or Ctrl-D leaves")
            continue
        yield line.rstrip("\r\n")


def command(line: str, chat: Chat, own: argparse.Namespace) -> None:
    """Does what a line with a slash says. Raises ValueError for a command that is none, or a menu that cannot be read."""
    word, _, rest = line.strip().partition(" ")
    if word == "/help":
        say(HELP)
    elif word == "/reset":
        chat.turns.clear()
        say("a new conversation")
    elif word == "/tools" and rest:
        begin(chat, own, read_menu(Path(rest.strip())))
    elif word == "/tools":
        say("\n".join(map(shown_tool, chat.menu)) or "no menu; /tools FILE reads one")
    else:
        raise ValueError(f"{one_line(word)} is no command; they are /help, /reset, /tools and /quit; put a blank before a "
                         f"message that begins with a slash")


def answer(chat: Chat, message: str) -> dict[str, Any]:
    """Prints the answer and what it comes to; the record of it."""
    turn = chat.ask(message, emit)
    print()
    for call in turn.get("calls", ()):
        print(f"call: {shown_call(ToolCall.from_json(call))} | {'; '.join(call['problems']) or 'fits the menu'}")
    if turn.get("calls") == []:
        print("no calls: the answer is an empty list")
    if "failure" in turn:
        print(f"no calls: {one_line(': '.join(filter(None, turn['failure'].values())))}")
    sys.stdout.flush()
    if turn["finish_reason"] == "interrupted":
        say("(stopped)")
    elif turn["out_of_room"]:
        say(f"(cut: the model's positions are full{'; /reset begins again' if chat.turns else ''})")
    elif turn["finish_reason"] == "length":
        say(f"(cut at {len(turn['token_ids'])} tokens; --max_new_tokens allows more)")
    return turn


def keep(own: argparse.Namespace, turns: list[dict[str, Any]]) -> None:
    """Writes --json, one line a turn."""
    if own.json:
        rows = ",\n".join(map(json.dumps, turns))
        Path(own.json).write_text(f'{{"model": {json.dumps(own.model)}, "turns": [\n{rows}\n]}}\n')


def talk(chat: Chat, own: argparse.Namespace) -> int:
    """The session; the exit status."""
    turns, status, person = [], 0, sys.stdin.isatty() and own.message is None
    keep(own, turns)
    for line in messages(own):
        if not line.strip():
            continue
        if own.message is None and line.strip() == "/quit":
            break
        try:
            if own.message is None and line.startswith("/"):
                command(line, chat, own)
                continue
            turns.append(answer(chat, line.strip()))
        except (ValueError, FloatingPointError) as error:
            say(f"error: {error}")
            status = 0 if person else 1
            continue
        except KeyboardInterrupt:  # just when the answer had ended
            if not person:
                raise
            continue
        keep(own, turns)
        if turns[-1]["finish_reason"] == "interrupted" and not person:
            return 130
    return status


# -- options -----------------------------------------------------------------------------------------------------------

WHOLE, NUMBER, FLAG = options.reader(0), options.reader(0.0), options.reader(False)
RULES = (("temperature", lambda x: x is None or x == 0 or 1e-3 <= x <= 100, "0 (greedy) or from 0.001 to 100"),
         ("top_p", lambda x: 1e-3 <= x <= 1, "from 0.001 to 1"),
         ("top_k", lambda x: 0 <= x <= 10**7, "from 0 (off) to 10,000,000"),
         ("max_new_tokens", lambda x: 0 <= x <= 10**7, "from 0 (the default) to 10,000,000"),
         ("kv_gib", lambda x: x == 0 or 1e-3 <= x <= 10**6, "0 (what fits) or from 0.001 to 1,000,000"))


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, checked as far as that needs no model. Raises ValueError; exits where argparse does."""
    parser = options.Parser(description=__doc__.splitlines()[0], allow_abbrev=False,
                            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110))

    def add(name: str, help: str, **more) -> None:
        other = [f"--{name.replace('_', '-')}"] if "_" in name else []
        parser.add_argument(f"--{name}", *other, dest=name, help=help, **more)

    add("model", f"a model's directory, a run's, or a preset: {', '.join(PRESETS)}", metavar="DIR|PRESET")
    add("tools", "a menu: JSON file with a list of tools, in this project's form or OpenAI's", metavar="FILE", type=Path)
    add("message", "ask this alone and end", metavar="TEXT")
    add("json", "write what was asked and answered there", metavar="FILE")
    add("system", "a system prompt; with a menu, in place of the one that the Solver is trained with", metavar="TEXT",
        default="")
    add("role", "which model of a run directory [solver]", choices=["solver", "generator"], default="")
    add("preset", "lay the menu out as this preset does [the model's or the run's; else the paper's]", metavar="NAME",
        choices=list(PRESETS), default="")
    add("history", "keep earlier turns in the prompt [true; with a menu false: the Solver is trained on single questions]",
        metavar="true|false", type=FLAG)
    add("temperature", f"0: greedy [{PLAIN_TEMPERATURE}; with a menu 0, as the greedy figures]", metavar="X", type=NUMBER)
    add("top_p", "nucleus [1]", metavar="X", type=NUMBER, default=1.0)
    add("top_k", "0: off [0]", metavar="N", type=WHOLE, default=0)
    add("max_new_tokens", f"length limit of an answer [{PLAIN_TOKENS}; with a menu the Solver's]", metavar="N", type=WHOLE,
        default=0)
    add("seed", "names the random stream [0]", metavar="N", type=WHOLE, default=0)
    add("device", "auto, cpu, cuda or cuda:N [auto]", metavar="NAME", default="auto")
    add("dtype", "[bfloat16 on GPUs, float32 on CPUs]", choices=["float32", "bfloat16"], default="")
    add("kv_gib", "memory for keys and values in GiB [0: what fits]", metavar="X", type=NUMBER, default=0.0)
    own = parser.parse_args(argv)
    if own.model is None:
        raise ValueError(f"--model is missing; give a directory, or a preset: {', '.join(PRESETS)}")
    if own.message is not None and not own.message.strip():
        raise ValueError(f"--message is {own.message!r}; give it a text")
    for name, holds, rule in RULES:
        if not holds(getattr(own, name)):
            raise ValueError(f"--{name} is {getattr(own, name)}; it has to be {rule}")
    return own


def load(own: argparse.Namespace) -> Chat:
    """The model that the options ask for, in a chat that begin() can begin."""
    import torch

    from toolr0_core import model, tokenizer
    from toolr0_core.sampler import Sampler
    from toolr0_core.weights import check_model, model_path

    name, config = locate(own.model, own.role, own.preset)
    device = chosen_device(own.device)
    source = model_path(name)
    check_model(source)
    dtype = getattr(torch, own.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    text = tokenizer.load(source)
    return Chat(Sampler(model.load(source, device, dtype), text, own.kv_gib or None), text, config, own.system)


def begin(chat: Chat, own: argparse.Namespace, menu: tuple[Tool, ...]) -> None:
    """A new conversation, with the defaults that go with this menu."""
    from toolr0_core.roles import ANSWER_END
    from toolr0_core.sampling_params import SamplingParams

    limit, temperature = (new_tokens(chat.config, own.role or "solver"), 0.0) if menu else (PLAIN_TOKENS, PLAIN_TEMPERATURE)
    chat.begin(menu, not menu if own.history is None else own.history, SamplingParams(
        1, temperature if own.temperature is None else own.temperature, own.top_p, own.top_k, own.max_new_tokens or limit,
        chat.tokenizer.stop_token_ids, (ANSWER_END,) if menu and chat.config.sampler.stop_at_answer else (), own.seed))
    how = f"temperature {chat.params.temperature:g}" if chat.params.temperature else "greedy"
    say(f"{len(menu) or 'no'} tool{'s' * (len(menu) != 1)} in the menu, {how}, "
        f"{'earlier turns stay in the prompt' if chat.remembers else 'every message stands alone'}; /help lists commands")


def chosen_device(name: str) -> Any:
    """The torch.device of --device. Raises ValueError."""
    import torch

    count = torch.cuda.device_count()
    legal = ["auto", "cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if name not in legal:
        raise ValueError(f"--device is {name!r:.80}; here it can be {', '.join(legal)}")
    return torch.device(name if name != "auto" else "cuda" if count else "cpu")


def main(argv: list[str]) -> int:
    try:
        own = parse(argv)
        menu = read_menu(own.tools) if own.tools else ()
        if own.json:
            from toolr0_core.rundir import check_file

            check_file("--json", Path(own.json))
        chat = load(own)
        begin(chat, own, menu)
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return talk(chat, own)
    except BrokenPipeError:  # whoever read the answers has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (ValueError, OSError, FloatingPointError) as error:
        options.fail(error)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
