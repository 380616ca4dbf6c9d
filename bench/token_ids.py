"""Token ids in four bytes each: a list of them takes ten times as much, which a large workload cannot afford."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, overload

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids, equal to any sequence of the same ids."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = array("I", ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "TokenIds": ...
    def __getitem__(self, place: int | slice) -> "int | TokenIds":
        return TokenIds(self._ids[place]) if isinstance(place, slice) else self._ids[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self._ids == other._ids
        return self._ids.tolist() == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return f"TokenIds({self._ids.tolist()})"


def of_json(type_: type, value: Any) -> TokenIds:
    """Decoding hook of msgspec. Raises ValueError with the place within the ids, to which msgspec adds theirs."""
    if type_ is not TokenIds:
        raise NotImplementedError(f"{type_!r} cannot be decoded")
    try:
        return TokenIds(msgspec.convert(value, list[TokenId]))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def to_json(value: Any) -> list[int]:
    """Encoding hook of msgspec."""
    if not isinstance(value, TokenIds):
        raise NotImplementedError(f"{type(value)!r} cannot be encoded")
    return list(value)
