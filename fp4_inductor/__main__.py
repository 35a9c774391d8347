"""``python -m fp4_inductor <command>``. A command is a module with ``add_parser`` and a name in ``COMMANDS``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import doctor
from .bench import command as bench
from .checkpoint import inspection
from .errors import Fp4InductorError

COMMANDS = (bench, doctor, inspection)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` names; an error that the package raises on purpose is told without a traceback."""
    parser = argparse.ArgumentParser(prog="python -m fp4_inductor")
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except Fp4InductorError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
