"""Types of command-line options."""

from argparse import ArgumentTypeError

import pytest

from forebay.bench import goodput, options, replay


@pytest.mark.parametrize("text", ["http://127.0.0.1:8080", "https://example.org", "http://[::1]:80/v1", "http://host/"])
def test_base_urls(text: str) -> None:
    assert options.base_url(text) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1:8080", "'127.0.0.1:8080' lacks its scheme; http://127.0.0.1:8080 is allowed"),
        ("localhost", "'localhost' lacks its scheme; http://localhost is allowed"),
        ("ftp://host", "begins with ftp://; http:// and https:// are allowed"),
        ("http://", "has no usable host and port"),
        ("http://:8080", "has no usable host and port"),
        ("http://host:99999", "has no usable host and port"),
        ("http://[::1", "has no usable host and port"),
    ],
)
def test_what_is_wrong_with_a_base_url_is_named(text: str, words: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        options.base_url(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("command", [replay, goodput])
def test_commands_ask_for_the_scheme(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["w.json", "--base-url", "127.0.0.1:8080"])  # type: ignore[attr-defined]
    assert "argument --base-url: '127.0.0.1:8080' lacks its scheme" in capsys.readouterr().err
