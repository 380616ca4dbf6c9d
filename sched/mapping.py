"""Which GPU lends to which: pairs of producer and consumer, many to many, by physical number."""


class Mapping:
    """The pairs in the order in which they were made."""

    def __init__(self) -> None:
        self._producers: dict[int, dict[int, None]] = {}  # by consumer
        self._pairs: dict[tuple[int, int], None] = {}

    def __contains__(self, pair: tuple[int, int]) -> bool:
        return pair in self._pairs

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(producer, consumer)"""
        return tuple(self._pairs)

    def add(self, producer: int, consumer: int) -> None:
        """Raises ValueError for a GPU and itself, and for a pair that is there."""
        if producer == consumer:
            raise ValueError(f"GPU {producer} cannot be its own producer; name two different ones")
        if (producer, consumer) in self._pairs:
            raise ValueError(f"GPU {producer} lends to GPU {consumer} already")
        self._pairs[producer, consumer] = None
        self._producers.setdefault(consumer, {})[producer] = None

    def remove(self, producer: int, consumer: int) -> None:
        """Raises KeyError for a pair that is not there."""
        del self._pairs[producer, consumer]
        del self._producers[consumer][producer]
        if not self._producers[consumer]:
            del self._producers[consumer]

    def producers(self, consumer: int) -> tuple[int, ...]:
        """Of a consumer; without any it may borrow from every GPU."""
        return tuple(self._producers.get(consumer, ()))

    def allows(self, lender: int, borrower: int) -> bool:
        """Whether a party on GPU `borrower` may have slabs of GPU `lender`. Never its own: that is no one else's
        memory."""
        mine = self._producers.get(borrower)
        return lender != borrower and (mine is None or lender in mine)
