"""On whose account a request runs, where there are tokens: invented users gain nobody a larger share."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forebay.runtime.keyring import OPERATOR, Keyring, digest
from forebay.runtime.text import ModelText
from tests.runtime.front import Peer, front_door, ready_model
from tests.runtime.tiny_text import byte_level

TENANTS = {"red": digest("red-token"), "blue": digest("blue-token")}
OPERATORS = {OPERATOR: digest("operators-own")}

Accounts = Callable[..., Awaitable[str]]


@asynccontextmanager
async def accounts(folder: Path, digests: dict[str, str], trust_user: bool = False) -> AsyncIterator[Accounts]:
    """How to ask on whose account a request with this header runs, which names this user."""
    model = str(byte_level(folder))
    peer = Peer([ready_model("llm", model)])
    peer.says(ModelText.load(model).encode("water"))
    async with front_door(peer, keyring=Keyring(digests), trust_user=trust_user) as front:

        async def account(header: str | None, user: str | None = None) -> str:
            body = {"model": "llm", "prompt": "a", "user": user}
            headers = {} if header is None else {"Authorization": header}
            status, _, _ = await front.post("/v1/completions", body, headers=headers)
            assert status == 200
            return (await front.peer.next_submit()).tenant

        yield account


@pytest.mark.parametrize("trust_user", [False, True])
async def test_a_tenants_token_goes_before_the_user_that_a_request_names(tmp_path: Path, trust_user: bool) -> None:
    async with accounts(tmp_path, OPERATORS | TENANTS, trust_user) as account:
        assert {await account("Bearer red-token", user) for user in (None, "red", "one", "two", "blue", "")} == {"red"}
        assert await account("Bearer blue-token", "red") == "blue"


@pytest.mark.parametrize("digests", [OPERATORS, OPERATORS | TENANTS], ids=["alone", "beside tenants"])
async def test_with_the_operators_token_everything_is_on_one_account(tmp_path: Path, digests: dict[str, str]) -> None:
    async with accounts(tmp_path, digests) as account:
        users = [None, "one", "two", "red", ""]
        found = {await account("Bearer operators-own", user) for user in users}
        found |= {await account(header, "one") for header in ("bearer operators-own", "BEARER   operators-own")}
        assert len(found) == 1, "nor does another way to write the header gain anything"
        assert found.isdisjoint({"", "red", "blue", "operators-own"})


async def test_a_gateway_that_the_operator_trusts_names_its_users(tmp_path: Path) -> None:
    async with accounts(tmp_path, OPERATORS | TENANTS, trust_user=True) as account:
        assert [await account("Bearer operators-own", user) for user in ("one", "red")] == ["one", "red"]
        assert await account("Bearer operators-own", None) not in ("", "one", "red")


async def test_where_no_token_is_needed_the_user_counts_or_else_the_key(tmp_path: Path) -> None:
    async with accounts(tmp_path, {}) as account:
        assert [await account(header, "one") for header in (None, "Bearer k1", "Bearer k2")] == ["one"] * 3
        first, second = await account("Bearer k1"), await account("Bearer k2")
        assert len({"", "k1", first, second}) == 4, "each key has its account, and journals do not record the key"
        assert await account(None) == ""
