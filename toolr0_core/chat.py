"""A conversation with one model: whose prompts it knows, how a message is laid out, its answer as it comes. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolr0_core import prompts
from toolr0_core.config import Config, PhaseConfig, PromptConfig, SamplerConfig
from toolr0_core.menu import problems
from toolr0_core.parse import parse_calls
from toolr0_core.presets import PRESETS, validate
from toolr0_core.rng import fold
from toolr0_core.schema import Failure, Tool


class TextStream:
    """Tokens one at a time -> text as soon as it is certain: all pieces together are the text of all tokens.

    A character's bytes may come in several tokens, and half a character decodes as U+FFFD, so these are held back at the end.
    All tokens are decoded at every step, since what a token says may depend on those before it (a space at the beginning).
    """

    def __init__(self, decode):
        self.decode, self.tokens, self.text, self.given = decode, [], "", 0

    def push(self, token: int) -> str:
        """What this token makes certain."""
        self.tokens.append(token)
        self.text = self.decode(self.tokens)
        return self._upto(len(self.text.rstrip("\ufffd")))

    def rest(self) -> str:
        """What was held back, where no token follows."""
        return self._upto(len(self.text))

    def _upto(self, end: int) -> str:
        piece = self.text[self.given: end]
        self.given = max(self.given, end)
        return piece


@dataclass
class Chat:
    """A conversation with one model: how a message is laid out, what was said before, the answer as it comes.

    With a menu the first message is the Solver's prompt of training; where the chat remembers, earlier turns stand before
    the last one, as worked examples do.
    """

    sampler: Any
    tokenizer: Any
    config: Config
    system: str = ""  # in place of the layout's own
    asked: int = 0  # messages so far: each is sampled from a stream of its own

    def begin(self, menu: Sequence[Tool], remembers: bool, params: Any) -> None:
        """A new conversation with this menu and these sampling parameters; remembers: earlier turns stay in the prompt."""
        self.menu, self.remembers, self.params = tuple(menu), remembers, params
        self.turns: list[dict[str, str]] = []

    @property
    def prefix(self) -> str:
        """What is written for the model at the start of its answer."""
        return prompts.answer_prefix(self.config.prompts, "solver") if self.menu else ""

    def messages(self, message: str) -> list[dict[str, str]]:
        """The conversation up to this message."""
        layout = [{"role": "user", "content": message}]
        if self.menu:
            layout = prompts.solver_messages(message, self.menu, self.config.prompts)
        if self.system:
            layout = [{"role": "system", "content": self.system}, *(m for m in layout if m["role"] != "system")]
        return [*layout[:-1], *self.turns, layout[-1]]

    def ask(self, message: str, emit: Callable[[str], None]) -> dict[str, Any]:
        """The answer as --json has it; its text goes to `emit` piece by piece, and Ctrl-C ends it.

        Raises ValueError where there is no room for an answer.
        """
        messages = self.messages(message)
        ids = self.tokenizer.render(messages, prefix=self.prefix)
        room = self.room(len(ids))
        params = replace(self.params, seed=fold(self.params.seed, self.asked),
                         max_new_tokens=min(self.params.max_new_tokens, room))
        stops, tokens, finish = set(params.stop_token_ids), [], "interrupted"
        stream = TextStream(lambda tokens: self.tokenizer.decode([t for t in tokens if t not in stops]))

        def take(request: int, sample: int, token: int) -> None:
            tokens.append(token)
            emit(stream.push(token))

        try:
            emit(self.prefix)
            finish = self.sampler.generate([ids], [params], on_token=take)[0][0].finish_reason
        except KeyboardInterrupt:
            pass
        emit(stream.rest())
        self.asked += 1
        text = self.prefix + stream.text
        if self.remembers and stream.text:
            self.turns += [messages[-1], {"role": "assistant", "content": text}]
        return {"asked": message, "prefix": self.prefix, "text": text, "token_ids": tokens, "finish_reason": finish,
                "out_of_room": finish == "length" and params.max_new_tokens == room} | self.calls(text)

    def room(self, length: int) -> int:
        """Tokens that an answer may have after a prompt of this length."""
        positions = self.sampler.model.config.max_position_embeddings
        if length < positions:
            return positions - length
        what, remedy = ("conversation", "type /reset to begin again") if self.turns else ("message", "shorten it")
        raise ValueError(f"the {what} takes {length:,} tokens{' with its menu' * bool(self.menu)}, and the model has "
                         f"{positions:,} positions, so there is no room for an answer; {remedy}")

    def calls(self, text: str) -> dict[str, Any]:
        """The calls in an answer, or why there are none, where there is a menu."""
        if not self.menu:
            return {}
        found = parse_calls(text)
        if isinstance(found, Failure):
            return {"failure": {"reason": found.reason, "detail": found.detail}}
        return {"calls": [call.to_json() | {"problems": problems(call, self.menu)} for call in found]}


# -- whose prompts a model knows ---------------------------------------------------------------------------------------


def locate(model: str, role: str, preset: str) -> tuple[str, Config]:
    """What to load for --model, and the Config that the model was or will be trained with.

    A run directory stands for its hf/solver (or another role's); a preset's name for the preset's model. A directory of
    neither has the paper's settings, unless a preset is named. Raises ValueError.
    """
    path = Path(model)
    if not path.is_dir():
        config = PRESETS.get(model, Config)()
    elif (run := _run_of(path.resolve())) is None:
        config = Config()
    else:
        config = read_run(run)
        if run == path.resolve():
            path = path / "hf" / (role or "solver")
            if not path.is_dir():
                raise ValueError(f"--model {model} is a run without hf/{path.name}; wait until its first iteration is done, or "
                                 f"give a model's directory")
            return str(path), PRESETS[preset]() if preset else config
    if role:
        raise ValueError(f"--role is {role!r}; it chooses between the models of a run directory, which --model {model} is not; "
                         f"leave it out")
    return model, PRESETS[preset]() if preset else config


def _run_of(folder: Path) -> Path | None:
    """The run that this directory is, or whose hf/ROLE it is."""
    for place in (folder, folder.parents[1] if len(folder.parents) > 1 and folder.parent.name == "hf" else folder):
        try:
            if "grpo" in json.loads((place / "config.json").read_text(encoding="utf-8")):
                return place
        except (OSError, ValueError, TypeError, RecursionError):
            pass
    return None


def read_run(run: Path) -> Config:
    """The settings that asking a run's models needs. Raises ValueError where they are damaged."""
    path = run / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        config = replace(
            PRESETS[raw["preset"]](), prompts=PromptConfig(**raw["prompts"]), sampler=SamplerConfig(**raw["sampler"]),
            generator=PhaseConfig(**raw["generator"]), solver=PhaseConfig(**raw["solver"]))
        validate(config)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} does not hold a run's settings ({type(error).__name__}: {error}); put the file back as it "
                         f"was, or give --model another directory") from None
    return config
