"""Entry point of the `gpunode` command and of `python -m agent`."""

import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    from agent.cli import parser

    sys.exit(parser.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
