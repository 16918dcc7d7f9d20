"""The program: ``oomguard``, and ``python -m oomguard``, which is the same."""

import _signal  # type: ignore[import-not-found] # it is in the interpreter, in no folder
import sys

_COLLECTED_AFTER = 200_000
_START_S = 10.0
_before: list = []  # type: ignore[type-arg]


def main() -> None:
    """Run the command line; from here on nothing is imported from the working directory."""
    words = sys.argv[2:]
    if sys.argv[1:2] == ["run"] and "--" in words[:-1]:
        at = words.index("--")
        command = words[at + 1 :]
        # Whatever is wrong with oomguard, the command runs. The alarm starts it if oomguard is not
        # ready to supervise it in time.
        try:
            _before.append(_signal.signal(_signal.SIGALRM, lambda *_: sys.exit(_become(command))))
            _signal.setitimer(_signal.ITIMER_REAL, _START_S)
            status = _supervised(words[:at], command)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except BaseException:  # noqa: BLE001
            status = _become(command)
        if status is not None:
            raise SystemExit(status)
    try:
        from oomguard.core.process import leave_working_directory

        leave_working_directory()
        import gc

        gc.set_threshold(
            _COLLECTED_AFTER
        )  # what is loaded stays: to look for garbage in it takes time
        from oomguard.cli import main as run

        try:
            run()
        finally:
            # At its end, Python would look for garbage in everything once more: 10 % of the time
            # of a short log.
            gc.freeze()
    except KeyboardInterrupt:  # before a sub-command takes care of it
        raise SystemExit(130) from None


def _supervised(own: list[str], command: list[str]) -> int | None:
    """Supervise the command and never return, unless it cannot be started, or only help is asked
    for (None).
    """
    from oomguard.core.process import leave_working_directory

    leave_working_directory()
    _end_by_interrupt()
    if {"-h", "--help"} & set(own):
        _disarm()
        return None
    from oomguard.core.process import disabled
    from oomguard.supervisor.failsafe import become, run_safely

    if not disabled():
        run_safely(own, command, ready=_disarm)
    _disarm()
    return become(command)


def _become(command: list[str]) -> int:
    """Become the command, by nothing but system calls; return the status where that fails."""
    import os

    _signal.setitimer(_signal.ITIMER_REAL, 0)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except FileNotFoundError:
        return 127
    except (OSError, ValueError):
        return 126


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
