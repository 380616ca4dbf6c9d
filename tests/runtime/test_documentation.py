"""The page at /docs works where there is no network but the loopback."""

import re
from pathlib import Path

from tests.runtime.front import Peer, front_door, ready_model
from tests.runtime.tiny_text import byte_level


async def test_the_page_loads_everything_from_this_server(tmp_path: Path) -> None:
    folder = str(byte_level(tmp_path / "llm"))
    async with front_door(Peer([ready_model("llm", folder)])) as front:

        async def read(path: str) -> tuple[str, str]:
            async with front.client.get(front.url + path) as response:
                assert response.status == 200, path
                return response.content_type, await response.text()

        kind, page = await read("/docs")
        assert kind == "text/html"
        assert "//" not in re.sub(r"(?m)^\s*//.*", "", page), "an address elsewhere, with or without a scheme"
        links = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
        assert sorted(links) == ["/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "data:,"]
        assert "'/openapi.json'" in page
        kind, script = await read("/docs/swagger-ui-bundle.js")
        assert kind == "text/javascript"
        assert "SwaggerUIBundle" in script
        kind, style = await read("/docs/swagger-ui.css")
        assert kind == "text/css"
        assert ".swagger-ui" in style
        _, schema = await read("/openapi.json")
        assert '"/docs' not in schema
