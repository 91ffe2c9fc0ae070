"""Entry point of the `gpunode` command and of `python -m agent`."""

import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    import agent.cli.parser as parser  # mypy takes the short form for a missing attribute

    sys.exit(parser.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
