"""Text and chat messages to token ids: the `tokenizers` library and the model's own chat template, nothing more.

What is rendered is hostile: a question or a tool's description that a model wrote may spell "<|im_end|>", and the usual
way (render to text, then encode) would make that a control token: a forged turn. So a conversation is also encoded apart:
rendered with a sentinel in place of every content, the contents encoded alone, where control tokens are ordinary text.
Where both ways have the same control tokens, the contents made none, and the usual encoding is taken, which is exactly
what the model was trained on; otherwise the one encoded apart, whose control tokens are the template's alone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

_PROBE = "31415926"  # a message that survives a template's trimming and change of case

class Tokenizer:
    """encode, decode and render for one model directory; stop_token_ids are all tokens that end an answer."""

    def __init__(self, backend: Backend, template: str, variables: dict[str, Any], stop_token_ids: Sequence[int]):
        backend.no_truncation()  # a tokenizer.json may carry both from somebody's training script
        backend.no_padding()
        self.backend, self.variables, self.stop_token_ids = backend, variables, tuple(stop_token_ids)
        self.plain = Backend.from_str(backend.to_str())
        self.plain.encode_special_tokens = True  # spelled-out control tokens are ordinary text
        self.control_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.template = _environment().from_string(template)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; a model may have more rows than that, never fewer."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; control tokens that it spells out do not become control tokens."""
        ids = self.plain.encode(_printable(text), add_special_tokens=False).ids
        return [i for i in ids if i not in self.control_ids]  # a vocabulary that holds one as a word may still find it

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; ids that no token has are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def render(self, messages: Sequence[dict[str, Any]], tools: list | None = None, prefix: str = "") -> list[int]:
        """Ids of a conversation, up to where the assistant's next answer starts, and of the prefix that begins it.

        Raises weights.ModelError where the template refuses the conversation (as some do a system message).
        """
        usual = self._with_controls(self._apply(messages, tools))
        apart = self._encode_apart(messages, tools)
        return (usual if self._controls(usual) == self._controls(apart) else apart) + self.encode(prefix)

    def _encode_apart(self, messages: Sequence[dict[str, Any]], tools: list | None) -> list[int]:
        """The conversation with contents, and other strings that spell control tokens, encoded as ordinary text."""
        mark, hidden = secrets.token_hex(8), []

        def hide(text: str) -> str:
            hidden.append(text)
            return f"{mark}{len(hidden) - 1}{mark}"

        def hide_hostile(text: str) -> str:
            return hide(json.dumps(text, ensure_ascii=False)[1:-1]) if self._controls(self._with_controls(text)) else text

        slots = [{k: hide(v.strip()) if k == "content" and isinstance(v, str) else _map_strings(v, hide_hostile)
                  for k, v in m.items()} for m in messages]
        pieces = self._apply(slots, _map_strings(tools, hide_hostile)).split(mark)  # template, number, template, ...
        ids = [self.encode(hidden[int(p)]) if i % 2 else self._with_controls(p) for i, p in enumerate(pieces)]
        return [token for piece in ids for token in piece]

    def _apply(self, messages: Sequence[dict[str, Any]], tools: list | None) -> str:
        try:
            return self.template.render(messages=messages, tools=tools, add_generation_prompt=True, **self.variables)
        except Exception as error:  # a template is a stranger's program: it may divide by zero, recurse, use up the memory
            from toolr0_core.weights import ModelError

            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ModelError(f"the model's chat template refuses a conversation of {roles} ({_one_line(error)}); use a model "
                             f"whose template takes it, or change chat_template.jinja") from None

    def _with_controls(self, text: str) -> list[int]:
        return self.backend.encode(_printable(text), add_special_tokens=False).ids

    def _controls(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self.control_ids]


def load(path_or_preset: str | Path) -> Tokenizer:
    """The tokenizer of a model directory or preset. Raises weights.ModelError where a file is missing or unusable."""
    from toolr0_core.weights import MAX_SIZE, ModelError, model_path, read_json, read_number

    folder = model_path(path_or_preset)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; copy the tokenizer's files of the base model there")
    config = read_json(folder / "tokenizer_config.json", missing={})
    template = _template(folder, config)
    if not template:
        raise ModelError(f"{folder} has a tokenizer without a chat template; use an instruct model, or add chat_template.jinja")
    names = {key: _text(folder, key, _content(config.get(key))) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        if not backend.get_vocab():
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{folder}/tokenizer.json cannot be read ({_one_line(error)}); copy that of the base model "
                         f"there") from None
    stops = {backend.token_to_id(names["eos_token"] or "")} - {None}
    for path in (folder / "generation_config.json", folder / "config.json"):
        for i in _as_list(read_json(path, missing={}).get("eos_token_id")):
            stops |= {read_number(path, {"eos_token_id": i}, "eos_token_id", 0, MAX_SIZE)} if i is not None else set()
    if not stops:
        raise ModelError(f"{folder} names no token that ends an answer; set eos_token_id in its generation_config.json")
    try:
        tokenizer = Tokenizer(backend, template, {k: v or "" for k, v in names.items()}, sorted(stops))
    except Exception as error:  # Python's compiler refuses some of what jinja2 makes, and both recurse
        raise ModelError(f"{folder} has a chat template that does not parse ({_one_line(error)}); correct it, or copy that of "
                         f"the base model there") from None
    if _PROBE not in tokenizer._apply([{"role": "user", "content": _PROBE}], None):
        raise ModelError(f"{folder} has a chat template that leaves out what the user says; correct it, or copy that of the "
                         f"base model there")
    return tokenizer


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """The text of the chat template: its own file where there is one, as newer models have it, else the config's."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None)
    return _text(folder, "chat_template", template)


def _text(folder: Path, key: str, value: Any) -> str | None:
    """The value of the tokenizer's setting. Raises ModelError where it is neither a text nor absent."""
    from toolr0_core.weights import ModelError

    if value is not None and not isinstance(value, str):
        raise ModelError(f"{folder}/tokenizer_config.json says {key} {value!r:.80}; it must be a text; copy that of the base "
                         f"model there")
    return value


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox and the names that transformers gives to templates, which come from strangers."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: "01 Jan 2026"  # a prompt must not depend on the day
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return env


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it changed, the keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(k, change): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(v, change) for v in value]
    return value


def _printable(text: str) -> str:
    """Lone surrogates, which no encoding has, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]
