"""List remote logs (``s3://``, ``gs://``, any fsspec protocol) and read them as streams."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, cast

from oomguard.core.errors import InputError
from oomguard.core.installation import install_hint
from oomguard.scan.inputs import Input, is_log_of_layout
from oomguard.scan.source import decompress, printable_path

# Objects are read in blocks of this size, so a usual log needs one request.
_BLOCK_BYTES: Final = 8 << 20
_MAGIC: Final = frozenset("*?[")
# The packages that read objects, by the protocol of the URL; names for pip.
_PACKAGES: Final = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
}
_SIZES: Final = ("size", "Size")
_TIMES: Final = ("LastModified", "mtime", "updated", "last_modified", "created")


def find_objects(url: str) -> Iterator[Input]:
    """Yield the objects of a URL: itself, its contents, or the matches of a pattern.

    Raises:
        InputError: the listing failed, with the reason, or the protocol's package is missing.
    """
    with _as_input_errors(url):
        system, path = _system(url)
        if _MAGIC & set(path):
            matched = {
                name: about
                for name, about in system.glob(path, detail=True).items()
                if about["type"] == "file"
            }
            if not matched:
                raise InputError(
                    f"{printable_path(url)}: no object matches",
                    hint="** takes folders of any depth",
                )
            yield from (_input(system, matched[name], is_named=False) for name in sorted(matched))
            return
        about = system.info(path)
        if about["type"] == "file":
            yield Input(url, True, _size(about), _modified_at(about), _file(system, about))
            return
        inside = system.find(path, detail=True)
        top = str(about["name"]).rstrip("/")
        for name in sorted(inside):
            is_direct = "/" not in name[len(top) :].strip("/")
            if is_direct or is_log_of_layout(name):
                yield _input(system, inside[name], is_named=False)


def open_object(url: str, on_read: Callable[[int], None] | None = None) -> IO[bytes]:
    """Open an object like ``open_log`` opens a file, unpacking a compressed one.

    Raises:
        InputError: with the reason why it is unreadable.
    """
    with _as_input_errors(url):
        system, path = _system(url)
        return decompress(
            cast("IO[bytes]", _NamedStream(system.open(path, "rb", block_size=_BLOCK_BYTES), url)),
            url,
            on_read,
        )


def modified_at(url: str) -> float | None:
    """Return an object's last modification in Unix seconds, or None if unknown."""
    with contextlib.suppress(Exception):
        system, path = _system(url)
        return _modified_at(system.info(path))
    return None


class _NamedStream:
    """Wrap a stream so that its errors name the object.

    A library's error in the middle of a read is a failure of the input.
    """

    def __init__(self, stream: Any, url: str) -> None:
        self._stream = stream
        self._url = url

    def read(self, size: int = -1, /) -> bytes:
        with _as_input_errors(self._url):
            return bytes(self._stream.read(size))

    def readinto(self, buffer: Any, /) -> int:
        with _as_input_errors(self._url):
            return int(self._stream.readinto(buffer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _system(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0].lower()
    try:
        import fsspec
    except ImportError:
        raise InputError(
            f"{printable_path(url)}: oomguard needs fsspec to read it, which is not installed",
            hint=install_hint("fleet"),
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError:
        package = _PACKAGES.get(protocol)
        if package:
            hint = f"pip install {package}"
        else:
            hint = "fsspec's documentation names the package"
        raise InputError(
            f"{printable_path(url)}: the package for {protocol}:// is not installed", hint=hint
        ) from None
    except ValueError as error:
        raise InputError(
            f"{printable_path(url)}: {error}",
            hint="give a path, s3://BUCKET/KEY or gs://BUCKET/KEY",
        ) from None
    return system, path


@contextlib.contextmanager
def _as_input_errors(url: str) -> Iterator[None]:
    """Raise every error of an object as InputError, because libraries have their own types."""
    try:
        yield
    except (InputError, GeneratorExit, MemoryError):
        raise
    except PermissionError as error:
        hint = "check this process's credentials, and that they permit listing and reading"
        raise InputError(
            f"{printable_path(url)}: no permission ({_short(error)})", hint=hint
        ) from None
    except FileNotFoundError:
        raise InputError(
            f"{printable_path(url)}: there is no such object, folder or bucket"
        ) from None
    except Exception as error:  # noqa: BLE001
        # botocore, aiohttp and gcsfs raise their own families of errors.
        no_credentials = type(error).__name__ == "NoCredentialsError"
        raise InputError(
            f"{printable_path(url)}: {type(error).__name__}: {_short(error)}",
            hint="set the credentials, for example: aws configure" if no_credentials else None,
        ) from None


def _short(error: BaseException) -> str:
    return printable_path(" ".join(str(error).split()))[:200] or "no reason given"


def _input(system: Any, about: Mapping[str, Any], *, is_named: bool) -> Input:
    name = str(system.unstrip_protocol(about["name"]))
    return Input(name, is_named, _size(about), _modified_at(about), _file(system, about))


def _file(system: Any, about: Mapping[str, Any]) -> object:
    """Return the identity of an object under any name; links count as their target."""
    if type(system).__name__ == "LocalFileSystem":
        with contextlib.suppress(OSError, ValueError):
            there = Path(about["name"]).stat()
            return there.st_dev, there.st_ino
    return str(system.unstrip_protocol(about["name"]))


def _size(about: Mapping[str, Any]) -> int | None:
    return next((int(about[name]) for name in _SIZES if about.get(name) is not None), None)


def _modified_at(about: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        value = about.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.datetime.fromisoformat(value).timestamp()
    return None
