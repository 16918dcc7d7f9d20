"""Pythons of our own that take no code from the working directory, and this process once it has
left it.

The working directory may be a stranger's model folder, and ``json.py`` in it is input, not a
module. This file imports what Python has loaded before it looks into any folder, and no more:
``python -m oomguard`` comes here first.
"""

import os
import sys

# Variables that name folders of code. Python reads an empty or relative entry as one of the working
# directory.
_CODE_FOLDERS = ("PYTHONPATH", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX")


def command(module: str) -> list[str]:
    """Return the command that runs ``main`` of one of oomguard's modules; start it with
    ``environment()``.

    ``-P`` keeps the working directory off its path. oomguard itself is loaded from where it lies,
    so that a checkout needs no path either. Flags that shut the environment or the user's own
    packages out go on.
    """
    flags = [
        flag
        for flag, on in (("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site))
        if on
    ]
    return [sys.executable, "-P", *flags, os.path.abspath(__file__), module]


def environment() -> dict[str, str]:
    """Return this process's variables for a Python of our own, without the entries that mean the
    working directory.

    Absolute entries stay: the user named those folders. Pythons that the child starts in its turn
    (an engine inspects models in one) have no ``-P``; PYTHONSAFEPATH is the same to them.
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
    """Take the working directory off ``sys.path``: what ``-m`` put first, and what relative entries
    of PYTHONPATH became.

    What lies there and Python itself has imported by now has run already; nothing here can change
    that.
    """
    try:
        here = os.getcwd()
    except OSError:  # it was removed
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
    """Load this package from its own folder, whatever the path has, and run ``main`` of one of its
    modules.
    """
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
