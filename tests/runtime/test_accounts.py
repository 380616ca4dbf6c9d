"""On whose account a request runs, where tenants have tokens: invented users gain nobody a larger share."""

from pathlib import Path

from forebay.runtime.keyring import OPERATOR, Keyring, digest
from forebay.runtime.text import ModelText
from tests.runtime.front import Peer, front_door, ready_model
from tests.runtime.tiny_text import byte_level

KEYRING = Keyring({OPERATOR: digest("operators-own"), "red": digest("red-token"), "blue": digest("blue-token")})


async def test_a_tenants_token_goes_before_the_user_that_a_request_names(tmp_path: Path) -> None:
    folder = str(byte_level(tmp_path))
    peer = Peer([ready_model("llm", folder)])
    peer.says(ModelText.load(folder).encode("water"))
    async with front_door(peer, keyring=KEYRING) as front:

        async def account(token: str, user: str | None) -> str:
            body = {"model": "llm", "prompt": "a", "user": user}
            status, _, _ = await front.post("/v1/completions", body, headers={"Authorization": f"Bearer {token}"})
            assert status == 200
            return (await front.peer.next_submit()).tenant

        assert [await account("red-token", user) for user in (None, "red", "one", "two", "blue")] == ["red"] * 5
        assert await account("blue-token", "red") == "blue"
        assert await account("operators-own", "red") == "red", "it speaks for everybody"
        assert await account("operators-own", None) not in ("", "red", "blue")
