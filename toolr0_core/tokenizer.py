"""Text and chat messages to token ids: the `tokenizers` library and the model's own chat template, nothing more.

Content is hostile: a question that a model wrote may spell "<|im_end|>". So the template is rendered with a sentinel in
place of every content, and contents are encoded apart from it, without special tokens: only the template makes those.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend


class Tokenizer:
    """encode, decode and render for one model directory."""

    def __init__(self, backend: Backend, template: str, variables: dict[str, Any], stop_token_ids: Sequence[int]):
        self.backend, self.variables, self.stop_token_ids = backend, variables, tuple(stop_token_ids)
        self.plain = Backend.from_str(backend.to_str())
        self.plain.encode_special_tokens = True  # spelled-out special tokens are ordinary text
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: "01 Jan 2026"  # a prompt must not depend on the day
        environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        self.template = environment.from_string(template)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; control tokens that it spells out do not become control tokens."""
        return self.plain.encode(_printable(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def render(self, messages: Sequence[dict[str, str]], tools: list | None = None, prefix: str = "") -> list[int]:
        """Ids of a conversation, up to where the assistant's next answer starts, and of the prefix that begins it."""
        mark = secrets.token_hex(8)
        slots = [{**m, "content": f"{mark}{i:04d}{mark}"} for i, m in enumerate(messages)]
        text = self.template.render(messages=slots, tools=tools, add_generation_prompt=True, **self.variables)
        ids: list[int] = []
        pieces = text.split(mark)  # template, slot number, template, slot number, ..., template
        for i, piece in enumerate(pieces):
            if i % 2 == 0:
                ids += self.backend.encode(piece, add_special_tokens=False).ids
            else:
                ids += self.encode(messages[int(piece)]["content"].strip())
        return ids + self.encode(prefix)


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _raise(message: str) -> None:
    raise TemplateError(message)


def load(path_or_preset: str | Path) -> Tokenizer:
    """The tokenizer of a model directory or preset. Raises weights.ModelError where a file is missing or unusable."""
    from toolr0_core.weights import ModelError, model_path

    folder = model_path(path_or_preset)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; copy the tokenizer's files of the base model there")
    config = _read_json(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if not template:
        raise ModelError(f"{folder} has a tokenizer without a chat template; use an instruct model, or add chat_template.jinja")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    names = {k: _content(config.get(k)) for k in ("bos_token", "eos_token", "pad_token", "unk_token")}
    stops = _as_list(_read_json(folder / "generation_config.json").get("eos_token_id"))
    stops += _as_list(_read_json(folder / "config.json").get("eos_token_id"))
    stops += [backend.token_to_id(names["eos_token"])] if names["eos_token"] else []
    variables = {k: v or "" for k, v in names.items()}
    return Tokenizer(backend, template, variables, sorted({s for s in stops if s is not None}))


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
