"""Describe this process, and start Python processes that load no code from the working directory.

The working directory may be a stranger's model folder, and ``json.py`` in it is input, not a
module. At its top this file imports only modules that Python loads before it searches any folder,
because ``python -m oomguard`` runs this file first.
"""

import os
import sys

# Variables that name folders of code. Python reads an empty or relative entry as relative to the
# working directory.
_CODE_FOLDERS = ("PYTHONPATH", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")


_ON = frozenset({"1", "true", "yes", "on"})
# Above this number, a shell, a container and systemd mean the signal that ended the command.
_SIGNAL_BASE = 128
# The last entry is the process that this one works for.
_pid_of_run: list[int] = []


def disabled() -> bool:
    """Return whether OOMGUARD_DISABLE turns oomguard off; ``0``, empty and unset leave it on."""
    return os.environ.get("OOMGUARD_DISABLE", "").strip().lower() in _ON


def pid_of_run() -> int:
    """Return the process id that the user would look for or stop.

    Under ``oomguard run`` this is the supervisor, not the process that calls this function.
    """
    if _pid_of_run:
        return _pid_of_run[-1]
    return os.getpid()


def set_pid_of_run(pid: int) -> None:
    """Record the id of the process that this one works for."""
    _pid_of_run[:] = [pid]


def status_in_words(status: int) -> str:
    """Describe an exit status in words.

    >>> status_in_words(137)
    'exit status 137, signal 9 (KILL)'
    """
    import signal

    try:
        name = signal.Signals(status - _SIGNAL_BASE).name.removeprefix("SIG")
    except ValueError:
        return f"exit status {status}"
    return f"exit status {status}, signal {status - _SIGNAL_BASE} ({name})"


def python_command(module: str) -> list[str]:
    """Return the command that runs ``main`` of one of oomguard's modules.

    Start it with ``python_environment()``. ``-P`` keeps the working directory off its path. The
    child loads oomguard from the folder of this file, so a checkout needs no path either. It
    inherits the flags that ignore the environment or the user's site packages.

        >>> python_command("oomguard.cli.analyst")[1]
        '-P'
    """
    flags = []
    if sys.flags.ignore_environment:
        flags.append("-E")
    if sys.flags.no_user_site:
        flags.append("-s")
    return [sys.executable, "-P", *flags, os.path.abspath(__file__), module]


def python_environment() -> dict[str, str]:
    """Return this process's variables without the entries that mean the working directory.

    Absolute entries stay, because the user named those folders. The child may start further Pythons
    without ``-P`` (an engine inspects models in one); PYTHONSAFEPATH protects those.
    """
    variables = dict(os.environ)
    for name in _CODE_FOLDERS:
        kept = [
            entry for entry in variables.pop(name, "").split(os.pathsep) if os.path.isabs(entry)
        ]
        if kept:
            variables[name] = os.pathsep.join(kept)
    return {**variables, "PYTHONSAFEPATH": "1"}


def leave_working_directory() -> None:
    """Remove the working directory from ``sys.path``.

    ``-m`` puts it first, and relative entries of PYTHONPATH point to it. Code from there that
    Python already imported has run, and nothing here can undo that.
    """
    try:
        here = os.getcwd()
    except OSError:  # the working directory no longer exists
        return
    if not sys.flags.safe_path and sys.path[:1] in ([here], [""]):
        del sys.path[0]
    given = os.environ.get("PYTHONPATH", "")
    if given and not sys.flags.ignore_environment:
        entries = given.split(os.pathsep)
    else:
        entries = []
    named = {os.path.abspath(entry) for entry in entries if os.path.isabs(entry)}
    meant = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)} - named
    sys.path[:] = [
        entry for entry in sys.path if os.path.isabs(entry) and os.path.abspath(entry) not in meant
    ]


def _become(module: str) -> None:
    """Load this package from its own folder and run ``main`` of one of its modules."""
    import importlib.util

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        "oomguard", init, submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - a file that is there
    package = importlib.util.module_from_spec(spec)
    sys.modules["oomguard"] = package
    spec.loader.exec_module(package)
    sys.argv = sys.argv[1:]
    importlib.import_module(module).main()


if __name__ == "__main__":
    _become(sys.argv[1])
