"""The ways from a worker to front doors: tokens go straight there."""

from typing import Any

from forebay.transport.addresses import RefusedAddress
from forebay.transport.messages import ToFrontDoor
from forebay.transport.zeromq import ZmqFeed

KEPT_FEEDS = 4
"""Front doors whose connections are kept; one that is gone is replaced by a newer one."""


class Feeds:
    """Connections by the endpoint at which a front door collects. `log` is told what cannot be delivered."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._feeds: dict[str, ZmqFeed[ToFrontDoor]] = {}

    def deliver(self, sink: str, messages: tuple[ToFrontDoor, ...]) -> None:
        try:
            feed = self._feed(sink)
        except RefusedAddress as error:
            self._log.error("tokens cannot be delivered", sink=sink, error=str(error))
            return
        for message in messages:
            feed.send(message)

    def _feed(self, sink: str) -> "ZmqFeed[ToFrontDoor]":
        feed = self._feeds.get(sink)
        if feed is None:
            while len(self._feeds) >= KEPT_FEEDS:
                self._feeds.pop(next(iter(self._feeds))).close()
            feed = self._feeds[sink] = ZmqFeed(sink)
        return feed

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.close()
