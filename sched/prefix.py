"""Keys of KV blocks by content: a block's key depends on all tokens up to and with it, so equal keys mean equal text.

Models do not share keys: the pool keeps them apart.
"""

from hashlib import blake2b

from forebay.transport.messages import BLOCK_TOKENS

TOKEN_BYTES = 4
KEY_BYTES = 16
"""128 bits: two texts meet in one key with less probability than memory flips a bit."""


class KeyChain:
    """The keys of one sequence's full blocks, made once each, as its tokens become known."""

    __slots__ = ("_keys", "_tokens")

    def __init__(self, tokens: bytes) -> None:
        self._tokens = bytearray(tokens)
        self._keys: list[bytes] = []

    def append(self, token: int) -> None:
        self._tokens += token.to_bytes(TOKEN_BYTES, "little")

    @property
    def known(self) -> int:
        """Tokens whose values are known."""
        return len(self._tokens) // TOKEN_BYTES

    def first(self, count: int) -> list[bytes]:
        """Keys of the first `count` blocks; that many are full."""
        size = BLOCK_TOKENS * TOKEN_BYTES
        assert count * size <= len(self._tokens), "a block has no key before all its tokens are known"
        for index in range(len(self._keys), count):
            before = self._keys[-1] if self._keys else b""
            block = self._tokens[index * size : (index + 1) * size]
            self._keys.append(blake2b(before + block, digest_size=KEY_BYTES).digest())
        return self._keys[:count]
