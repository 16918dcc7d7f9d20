"""Compiled patterns, kept in the user's cache folder: compiling those that a short log needs takes longer than reading it.

What is kept is what ``pickle`` would keep of a pattern, as data and never as a pickle: reading it runs nothing. It is ignored where it
was kept by another version of Python or of ``regex``, by other rules for writing patterns, or is damaged.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import hashlib
import marshal
import sys
from pathlib import Path
from typing import Any, Final

from oomguard.regular_file import read_regular
from oomguard.rules import pattern
from oomguard.user_files import keep, kept_file, state_of

_MAX_KEPT_BYTES: Final = 16 << 20
_DIGEST_BYTES: Final = 32


class KeptPatterns:
    """Patterns by their text; those that were not kept yet are compiled, and all are kept when the program ends."""

    def __init__(self) -> None:
        import regex

        self._make, _ = _parts(regex.compile(""))
        own = state_of(Path(pattern.__file__))
        self._path = kept_file("patterns-{}.bin", [sys.version.encode(), regex.__version__.encode(), own])
        self._kept = _read(self._path)
        self._grew = False

    def compiled(self, text: str) -> Any:
        """Return a pattern that ``trusted_pattern`` takes, compiled."""
        kept = self._kept.get(text)
        if kept is not None:
            with contextlib.suppress(Exception):  # what the library does not take is compiled again
                return self._make(*marshal.loads(kept))  # noqa: S302 - of the user's own folder, as bytecode is
        made = pattern.trusted_pattern(text)
        if not self._grew:
            self._grew = True
            atexit.register(self._keep)
        self._kept[text] = marshal.dumps(_parts(made)[1])
        return made

    def _keep(self) -> None:
        content = marshal.dumps({**_read(self._path), **self._kept})
        keep(self._path, hashlib.sha256(content).digest() + content)


def _parts(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what makes a compiled pattern again, and from what: as ``pickle`` asks for it."""
    return copyreg.dispatch_table[type(compiled)](compiled)  # type: ignore[return-value]


def _read(path: Path) -> dict[str, bytes]:
    """Return what is kept; nothing where there is no such file, or it is not whole."""
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        content = read_regular(path, _MAX_KEPT_BYTES)
        digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            return dict(marshal.loads(content))  # noqa: S302 - whole, and of the user's own folder
    return {}
