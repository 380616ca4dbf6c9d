"""`python -m bench.compare MODEL…`: Forebay beside what users would run instead. Holds only its command line."""

import sys


def main(arguments: list[str] | None = None) -> int:
    from forebay.bench.command_line import check_outputs, reported
    from forebay.bench.compare_options import build_parser, setup_of, split_words

    words, more = split_words(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    given = parser.parse_args(words)

    from forebay.bench.compare_session import compare

    def work() -> int:
        check_outputs(given.output / "setup.json", given.json)
        return compare(given, setup_of(given, more), ["python", "-m", "bench.compare", *words, *more])

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())
