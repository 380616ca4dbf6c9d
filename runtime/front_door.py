"""`python -m forebay.runtime.front_door`: HTTP and tokenizers, started by the scheduler. Holds only `main()`."""

import sys


def main(arguments: list[str] | None = None) -> int:
    import argparse
    from pathlib import Path

    from forebay.runtime.bodies import BODY_LIMIT
    from forebay.runtime.options import port

    parser = argparse.ArgumentParser(prog="runtime.front_door", description="The scheduler starts this process.")
    parser.add_argument("--scheduler", required=True, metavar="ENDPOINT")
    parser.add_argument("--sockets", required=True, type=Path, metavar="DIR", help="folder for the socket of tokens")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8080)
    parser.add_argument("--grace", type=float, default=3.0, metavar="S", help="for answers being written at the end")
    parser.add_argument("--body-limit", type=int, default=BODY_LIMIT, metavar="BYTES", help="of one request")
    parser.add_argument("--trust-user", action="store_true", help="of requests with the operator's token")
    parser.add_argument("--config", help="what the page says that the server runs from")
    parser.add_argument("--parent", type=int, metavar="DESCRIPTOR", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    from forebay.runtime.front_door_process import open_door

    return open_door(
        options.scheduler,
        options.sockets,
        options.host,
        options.port,
        options.grace,
        options.config,
        options.parent,
        options.body_limit,
        options.trust_user,
    )


if __name__ == "__main__":
    sys.exit(main())
