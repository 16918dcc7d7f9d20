"""What to do where a database does not let this user write: statements for its administrator, or another server."""

from __future__ import annotations

import getpass
import os
import re
from contextlib import suppress
from typing import Final

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from oomguard.journal.place import Shared

_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")
# PostgreSQL's insufficient_privilege (appendix A, Error Codes).
_DENIED: Final = "42501"
# Its read_only_sql_transaction: a standby, or a server or user that is set so.
_READ_ONLY: Final = "25006"
_OTHER_SERVER: Final = (
    "the server only reads, as a standby does: name the one that writes, or several, --journal "
    "'postgresql://USER@HOST1,HOST2/DATABASE?target_session_attrs=read-write'"
)
_HINT: Final = "a database administrator has to permit it: "


def hint_of(error: SQLAlchemyError, shared: Shared, *, reads_only: bool = False) -> str | None:
    """Return what has to be granted to the user of a URL, or that the server only reads; None where it is neither."""
    state = getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None
    words = str(getattr(error, "orig", ""))
    if state == _READ_ONLY:
        return _OTHER_SERVER
    if state != _DENIED:
        return None
    user = _quoted(_user_of(shared) or "USER")
    if not reads_only and "database" in words:  # there is no schema yet, and none may be made
        return f"{_HINT}CREATE SCHEMA oomguard AUTHORIZATION {user}"
    on = "ALL TABLES IN SCHEMA oomguard"
    if reads_only:
        return f"{_HINT}GRANT USAGE ON SCHEMA oomguard TO {user}; GRANT SELECT ON {on} TO {user}"
    grants = (
        f"GRANT USAGE ON SCHEMA oomguard TO {user}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {on} TO {user}",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA oomguard TO {user}",
    )
    return _HINT + "; ".join(grants)


def _user_of(shared: Shared) -> str | None:
    """Return the user as libpq takes it: of the URL, of its query, of PGUSER, who this is."""
    with suppress(Exception):
        url = make_url(shared.libpq_url)
        given = url.username or url.query.get("user") or os.environ.get("PGUSER") or getpass.getuser()
        return given if isinstance(given, str) else None
    return None


def _quoted(name: str) -> str:
    if _PLAIN.fullmatch(name) or name == "USER":
        return name
    doubled = name.replace('"', '""')
    return f'"{doubled}"'
