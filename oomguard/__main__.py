"""The program: ``oomguard``, and ``python -m oomguard``, which is the same."""

import _signal  # type: ignore[import-not-found] # it is in the interpreter, in no folder
import sys

from oomguard.clean_start import leave_working_directory

_COLLECTED_AFTER = 50_000
_START_S = 10.0
_before: list = []  # type: ignore[type-arg]


def main() -> None:
    """Run the command line; from here on nothing is imported from the working directory."""
    if sys.argv[1:2] == ["run"] and "--" in sys.argv[2:-1]:
        _arm(sys.argv[sys.argv.index("--") + 1 :])
    try:
        leave_working_directory()
        if sys.argv[1:2] == ["run"]:
            _run_supervised(sys.argv[2:])
        _disarm()
        import gc

        gc.set_threshold(_COLLECTED_AFTER)  # what is loaded stays: to look for garbage in it takes time
        from oomguard.cli import main as run

        run()
    except KeyboardInterrupt:  # before a sub-command takes care of it
        raise SystemExit(130) from None


def _run_supervised(words: list[str]) -> None:
    """Supervise the command behind ``--``; return where there is none, or only help is asked for."""
    _end_by_interrupt()
    at = words.index("--") if "--" in words[:-1] else 0
    own, command = words[:at], words[at + 1 :]
    if not at and words[:1] != ["--"]:
        return
    if {"-h", "--help"} & set(own):
        return
    try:
        from oomguard.supervisor.failsafe import become, run_safely
        from oomguard.switch import disabled

        is_off = disabled()
    except BaseException:  # noqa: BLE001 - whatever is wrong with oomguard's files, the command runs
        import os

        os.execvp(command[0], command)  # noqa: S606
    if is_off:
        sys.exit(become(command))
    run_safely(own, command, ready=_disarm)


def _arm(command: list[str]) -> None:
    """Become the command where oomguard does not come so far as to supervise it in time."""
    import os

    def become_command(*_of_signal: object) -> None:
        _disarm()
        os.execvp(command[0], command)  # noqa: S606

    _before.append(_signal.signal(_signal.SIGALRM, become_command))
    _signal.setitimer(_signal.ITIMER_REAL, _START_S)


def _disarm() -> None:
    """Take the alarm back: from here on the supervisor watches itself."""
    while _before:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        _signal.signal(_signal.SIGALRM, _before.pop())


def _end_by_interrupt() -> None:
    """Let Ctrl-C end ``run`` without a word until it hands signals on: nothing was started yet."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
