"""What every message is: a frozen struct that travels as a msgpack array `[tag, field, ...]`.

The tag is the class name. New fields go to the end, with a default: an older reader skips what it does not know.
"""

import msgspec

PROTOCOL_VERSION = 1
"""Raised by every change that an older peer would misread; both sides must name the same one."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all events on the wire. They hold values only, so no cycle can run through one, and the garbage collector
    need not look at them: a scheduler sees tens of thousands a second."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what travels inside a message: no tag of its own."""
