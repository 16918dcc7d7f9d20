"""Twenty kinds of pickle that a reader of snapshots must refuse: those that run something, and
those that fill or stop a machine.

Each that runs something would write a marker file. Opcodes: Python's pickletools; protocol 4 unless
it says another.
"""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HEADER = b"\x80\x04"


def _text(value: str) -> bytes:
    raw = value.encode()
    if len(raw) < 256:
        return b"\x8c" + bytes([len(raw)]) + raw
    return b"X" + struct.pack("<I", len(raw)) + raw


class _Runs:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self._command,)


def in_snapshot(value: Any, protocol: int) -> bytes:
    """A pickle of a snapshot with the value in place of its first segment."""
    return pickle.dumps({"segments": [value], "device_traces": []}, protocol)


def hostile_pickles(marker: Path) -> dict[str, bytes]:
    """The kinds by name; ``marker`` is the file that those write which run."""
    command = f"touch {marker}"
    call = b"(" + _text(command) + b"t"
    system = b"cos\nsystem\n"
    runs = _Runs(command)
    nested = b"K\x00" + b"\x85" * 200_000
    doubled = b"K\x00\x94" + b"".join(
        b"h" + bytes([n]) * 1 + b"h" + bytes([n]) + b"\x86\x94" for n in range(60)
    )
    return {
        "REDUCE of os.system, protocol 0": in_snapshot(runs, 0),
        "REDUCE of os.system, protocol 2": in_snapshot(runs, 2),
        "REDUCE of os.system, protocol 5": in_snapshot(runs, 5),
        "GLOBAL with a dotted name": b"\x80\x02cbuiltins\nexec\n(X"
        + _long(f"open({str(marker)!r}, 'w')")
        + b"tR.",
        "STACK_GLOBAL of names noted before": _HEADER
        + b"]("
        + _text("os")
        + b"\x94"
        + _text("system")
        + b"\x94eh\x00h\x01\x93"
        + call
        + b"R.",
        "INST": b"\x80\x02(" + b"X" + _long(command) + b"ios\nsystem\n.",
        "OBJ": b"\x80\x02(" + system + b"X" + _long(command) + b"o.",
        "NEWOBJ": _HEADER + b"csubprocess\nPopen\n" + call + b"\x81.",
        "NEWOBJ_EX": _HEADER + b"csubprocess\nPopen\n" + call + b"}\x92.",
        "BUILD with a state": _HEADER + system + b"}" + _text("x") + b"K\x01sb.",
        "EXT1 of a registered object": b"\x80\x02\x82\x07.",
        "PERSID": b"\x80\x02P" + command.encode() + b"\n.",
        "BINPERSID": _HEADER + _text(command) + b"Q.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "LONG_BINPUT of a number that makes room for 2^31 objects": _HEADER
        + b"]r\xff\xff\xff\x7f.",
        "BYTEARRAY8 that claims 2^40 bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "LONG4 that claims 2^31 - 1 bytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "a key of tuples nested 200,000 deep": _HEADER + b"}" + nested + b"K\x01s.",
        "a key of 60 doubled tuples (billion laughs)": _HEADER + b"}" + doubled + b"K\x01s.",
        "one list of segments, referred to 1,000 times": _shared_segments(),
    }


def _long(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def _shared_segments() -> bytes:
    blocks = [
        {
            "address": 0,
            "size": 512,
            "requested_size": 512,
            "state": "active_allocated",
            "frames": [],
        }
    ] * 1000
    segment = {"device": 0, "address": 0, "total_size": 512_000, "stream": 0, "blocks": blocks}
    return pickle.dumps({"segments": [segment] * 1000, "device_traces": []}, 4)
