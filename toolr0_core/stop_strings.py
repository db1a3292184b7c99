"""Where a stop string ends, in whatever tokens it is written.

Most tokens are out at once: a string can only end in a token whose own text has its last character, or has part of a character
(U+FFFD), or where decoding may swallow white space. Else the last tokens are decoded together, as many as hold the longest
string and a little more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_UNKNOWN, _NO, _MAYBE = 0, 1, 2


class StopStrings:
    """Some stop strings and a tokenizer: anything with decode(ids) -> str."""

    def __init__(self, strings: Sequence[str], tokenizer, vocab_size: int):
        self.strings, self.tokenizer = tuple(strings), tokenizer
        self.ends = np.zeros(vocab_size, np.int8)  # of each token: whether a string could end in it
        self.pieces: dict[int, str] = {}
        self.bytes = max(len(s.encode("utf-8", "replace")) for s in strings) + 4

    def may_end(self, tokens: np.ndarray) -> np.ndarray:
        """Whether a string could end in each of these tokens."""
        for token in np.unique(tokens[self.ends[tokens] == _UNKNOWN]).tolist():
            piece = self._piece(token)
            able = any(s[-1] in piece or s[-1].isspace() or "\ufffd" in piece for s in self.strings)
            self.ends[token] = _MAYBE if able else _NO
        return self.ends[tokens] == _MAYBE

    def end(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a string."""
        start, size = len(tokens), 0
        while start > 0 and size < self.bytes:  # a piece never has more characters than its tokens have bytes
            start -= 1
            size += len(self._piece(tokens[start]))
        text = self.tokenizer.decode(tokens[start:])
        return any(s in text for s in self.strings)

    def _piece(self, token: int) -> str:
        """The text of one token by itself, remembered."""
        if token not in self.pieces:
            self.pieces[token] = self.tokenizer.decode([token])
        return self.pieces[token]
