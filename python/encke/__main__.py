"""``python -m encke``: the same command line as the program ``encke``."""

import signal
import sys

from encke._encke import command


def main() -> int:
    """Does what the words after the command's name say; returns the exit code."""
    # The command runs outside the interpreter, where Python's own handler would never be asked.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
