"""Talks to a model: plain chat, or with a menu of tools, as the Solver is asked in training and evaluation.

    python launch/chat.py --model runs/nano --tools tools.json
    echo "Book a hotel in Oslo." | python launch/chat.py --model nano --tools tools.json --json answers.json
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until there is an answer to stop

import argparse  # noqa: E402
import json  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

try:
    from toolr0_core import options, prompts
    from toolr0_core.chat import TextStream, escaped, locate, one_line, problems, read_menu, shown_call, shown_tool
    from toolr0_core.config import Config
    from toolr0_core.parse import parse_calls
    from toolr0_core.presets import PRESETS, new_tokens
    from toolr0_core.rng import fold
    from toolr0_core.schema import Failure, Tool
except ModuleNotFoundError as error:
    sys.exit(f"error: this Python has no {error.name}; type `source .venv/bin/activate` in the repository, which "
             f"launch/setup.sh makes, or `pip install -e .`")

PLAIN_TOKENS = 512  # of an answer without a menu
HELP = """/tools        the menu; /tools FILE reads another one
/reset        forget the conversation so far
/quit         leave; so does Ctrl-D
Ctrl-C stops an answer. A message that begins with a slash: put a blank before it."""


@dataclass
class Chat:
    """A conversation with one model: how a message is laid out, what was said before, the answer as it comes.

    With a menu the first message is the Solver's prompt of training; where the chat remembers, earlier turns stand before
    the last one, as worked examples do.
    """

    sampler: Any
    tokenizer: Any
    config: Config
    params: Any
    menu: Sequence[Tool] = ()
    system: str = ""
    remembers: bool = True
    turns: list[dict[str, str]] = field(default_factory=list)
    asked: int = 0

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
        params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room), seed=fold(self.params.seed, self.asked))
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
        raise ValueError(f"the {what} takes {length:,} tokens{' with its menu' * bool(self.menu)}, and the model has {positions:,} "
                         f"positions, so there is no room for an answer; {remedy}")

    def calls(self, text: str) -> dict[str, Any]:
        """The calls in an answer, or why there are none, where there is a menu."""
        if not self.menu:
            return {}
        found = parse_calls(text)
        if isinstance(found, Failure):
            return {"failure": {"reason": found.reason, "detail": found.detail}}
        return {"calls": [call.to_json() | {"problems": problems(call, self.menu)} for call in found]}
