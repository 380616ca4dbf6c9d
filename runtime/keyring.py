"""Bearer tokens: which tenant sends a request. A process of ours that only has to tell tokens apart knows their hashes.

Keyring are long and random (the configuration sees to the length), so a plain SHA-256 hides them.
"""

import hashlib
import os
from collections.abc import Mapping
from hmac import compare_digest

import msgspec

from forebay.runtime.config import RESERVED_TENANT, Configuration

OPERATOR = ""
"""The tenant of `http.token`, and of everybody where there are no tokens: it may see and do everything."""

TENANTS_VARIABLE = "FOREBAY_TENANTS"
DOOR_VARIABLE = "FOREBAY_DOOR_KEY"
CREDENTIAL_VARIABLE = "FOREBAY_CREDENTIAL"
"""What the scheduler tells its children, by environment variables: hashes by tenant (JSON), the secret at the end of
its front door's name, and the token with which its workers lend and borrow."""


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Keyring:
    """`digests`: SHA-256, hexadecimal, by tenant. Without any, nobody needs a token."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        self.digests = dict(digests)

    @classmethod
    def of_http(cls, configuration: Configuration) -> "Keyring":
        """Those that HTTP requests may carry."""
        digests = {tenant: digest(token) for tenant, token in configuration.lending.tokens.items()}
        if configuration.http.token:
            digests[OPERATOR] = digest(configuration.http.token)
        return cls(digests)

    @classmethod
    def of_parties(cls, configuration: Configuration, house: str) -> "Keyring":
        """Those that parties to a loan may carry; `house` is the one of the scheduler's own workers. None are needed
        where the configuration names no tenants."""
        if not configuration.lending.tokens:
            return cls({})
        return cls({**cls.of_http(configuration).digests, RESERVED_TENANT: digest(house)})

    @classmethod
    def from_environment(cls) -> "Keyring":
        return cls(msgspec.json.decode(os.environ.get(TENANTS_VARIABLE, "{}"), type=dict[str, str]))

    @property
    def variable(self) -> dict[str, str]:
        """For the environment of a process that calls `from_environment`."""
        return {TENANTS_VARIABLE: msgspec.json.encode(self.digests).decode()}

    def __bool__(self) -> bool:
        return bool(self.digests)

    def tenant(self, token: str) -> str | None:
        """Whose token it is; it takes the same time whoever's it is."""
        given, found = digest(token), None
        for tenant, known in self.digests.items():
            if compare_digest(given, known):
                found = tenant
        return found
