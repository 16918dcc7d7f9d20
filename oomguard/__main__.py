"""The program: ``oomguard``, and ``python -m oomguard``, which is the same."""

import gc
import sys

from oomguard.clean_start import leave_working_directory

_COLLECTED_AFTER = 50_000


def main() -> None:
    """Run the command line; from here on nothing is imported from the working directory."""
    try:
        leave_working_directory()
        gc.set_threshold(_COLLECTED_AFTER)  # what is loaded stays: to look for garbage in it delays the command
        if sys.argv[1:2] == ["run"]:
            _end_by_interrupt()
        from oomguard.cli import main as run

        run()
    except KeyboardInterrupt:  # before a sub-command takes care of it
        raise SystemExit(130) from None


def _end_by_interrupt() -> None:
    """Let Ctrl-C end ``run`` without a word until it hands signals on: nothing was started yet."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
