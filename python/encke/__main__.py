"""``python -m encke``: the same command line as the program ``encke``."""

import signal
import sys

from encke._encke import command


def main() -> int:
    """Runs the command with the arguments of this process; returns the exit code."""
    # The command runs outside the interpreter, which could not run Python's signal handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
