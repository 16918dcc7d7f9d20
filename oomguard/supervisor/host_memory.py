"""Watch the host's memory while a command runs, and end the command before the host freezes.

A machine whose memory is full may freeze for minutes, above all if its GPU uses the same memory. A
container is killed without a word. So a thread reads the available memory of the machine, the limit
of the control group and the kernel's pressure figures. Before less than the reserve is left, it
stops the command: first with SIGTERM, then by killing the largest process of its tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from oomguard.supervisor import tree

if TYPE_CHECKING:
    from oomguard.supervisor.messages import Messages
    from oomguard.supervisor.reaper import Reaper

MIB: Final = 1 << 20
GIB: Final = 1 << 30
NODE: Final = "node"
LIMIT: Final = "limit"
# The reserve: 4 percent, at least 2 GiB, but at most an eighth of a machine or limit below 16 GiB.
_SHARE: Final = 0.04
_LEAST_BYTES: Final = 2 * GIB
_SMALL_PART: Final = 8
# Tasks that wait for memory for this part of the last ten seconds double the reserve.
_STALLED_RATIO: Final = 0.2
# No program is assumed to take memory faster than this per second, so a look is due before it can
# use up half of the reserve.
_FASTEST_BYTES: Final = 4 * GIB
_IDLE_S: Final = 1.0
_NEAR_S: Final = 0.15
_GROWING_S: Final = 0.005
# Time that a signal needs until the command stops growing.
_REACTION_S: Final = 0.05
# Growth is measured over at least this time.
_WINDOW_S: Final = 0.04
# After SIGTERM the command may use half of the reserve, and at most this time.
_GRACE_S: Final = 5.0
_USED_PART: Final = 0.5
_NEXT_KILL_S: Final = 1.0
_ALL_KILLED_S: Final = 3.0
# A tree with less memory than this part of the reserve did not fill the host.
_SMALL_TREE_PART: Final = 0.25
_DEVICES: Final = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
_CURVE_S: Final = 60.0
_CURVE_STEP_S: Final = 0.25
_NO_LIMIT_BYTES: Final = 1 << 62
_SAME_BYTES: Final = MIB
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Machines whose GPU has no memory of its own, or shares one address space with the CPU.
_UNIFIED: Final = (
    b"gb10",
    b"dgx spark",
    b"gh200",
    b"gb200",
    b"gb300",
    b"jetson",
    b"orin",
    b"thor",
    b"ryzen ai max",
)
_SHIELD: Final = b"-900"
_SCORE: Final = "/proc/{}/oom_score_adj"
# linux/mman.h: lock the pages that are in use now or later, without loading others.
_MCL_CURRENT_ON_FAULT: Final = 1 | 4


def default_reserve(total_bytes: int) -> int:
    """Return the reserve for a machine or a limit of this size."""
    return max(int(total_bytes * _SHARE), min(_LEAST_BYTES, total_bytes // _SMALL_PART))


class Level(NamedTuple):
    """Describe the memory that is left on the machine (``node``) or below a ``limit``."""

    scope: str
    total_bytes: int
    available_bytes: int


class _Group:
    """Read one control group with a memory limit, from files that stay open."""

    def __init__(self, folder: str, *, version: int) -> None:
        names = {
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            2: ("memory.max", "memory.current"),
        }[version]
        self._prefix = b"total_" if version == 1 else b""
        self._limit, self._usage = (_opened(f"{folder}/{name}") for name in names)
        self._stat = _opened(f"{folder}/memory.stat")
        self._cached = (-_NO_LIMIT_BYTES, 0)
        self.pressure = _opened(f"{folder}/memory.pressure")

    def limit_bytes(self) -> int | None:
        """Return the limit; None without one."""
        text = _read(self._limit)
        if text is None or not text.strip().isdigit() or int(text) >= _NO_LIMIT_BYTES:
            return None
        return int(text)

    def level(self, far_bytes: int) -> Level | None:
        """Return the memory that is left; below ``far_bytes``, the page cache counts as left."""
        limit = self.limit_bytes()
        usage = _read(self._usage)
        if limit is None or usage is None:
            return None
        used = int(usage)
        left = limit - used
        if left < far_bytes:
            left += self._page_cache_bytes(used)
        return Level(LIMIT, limit, min(limit, left))

    def _page_cache_bytes(self, used: int) -> int:
        """Return the bytes of cached files, which the kernel can free."""
        if abs(used - self._cached[0]) > _SAME_BYTES:
            stat = _read(self._stat) or b""
            names = (b"inactive_file", b"active_file")
            sizes = (_number(stat, b"\n" + self._prefix + name + b" ") for name in names)
            self._cached = (used, sum(size or 0 for size in sizes))
        return self._cached[1]


class HostMemory:
    """Read the memory that is left on this machine and below its control group's limits.

    Args:
        root: the root of the files; "" for this machine.
    """

    def __init__(self, root: str = "") -> None:
        self._meminfo = _opened(f"{root}/proc/meminfo")
        self._pressure = _opened(f"{root}/proc/pressure/memory")
        self._groups = []
        for folder, version in group_folders(root):
            group = _Group(folder, version=version)
            if group.limit_bytes() is not None:
                self._groups.append(group)
        self.is_unified = has_unified_memory(root)
        self.is_limited = bool(self._groups)

    def node(self) -> Level | None:
        """Return what is left on the machine; None if the kernel does not report it."""
        text = _read(self._meminfo) or b""
        total = _number(text, b"MemTotal:")
        available = _number(text, b"MemAvailable:")
        if total is None or available is None:
            return None
        return Level(NODE, total * 1024, available * 1024)

    def limits(self, far_bytes: int = _NO_LIMIT_BYTES) -> list[Level]:
        """Return what is left below each limit."""
        found = []
        for group in self._groups:
            level = group.level(far_bytes)
            if level is not None:
                found.append(level)
        return found

    def stalled_ratio(self) -> float:
        """Return the part of the last ten seconds in which all tasks waited for memory."""
        files = [group.pressure for group in self._groups] + [self._pressure]
        return max((_stalled_ratio(_read(file) or b"") for file in files), default=0.0)


def _stalled_ratio(text: bytes) -> float:
    figure = text.partition(b"full avg10=")[2].split(b" ", 1)[0]
    try:
        return float(figure) / 100
    except ValueError:
        return 0.0


def group_folders(root: str = "") -> Iterator[tuple[str, int]]:
    """Yield the folders of our memory controller from the group up to the mount point."""
    with contextlib.suppress(OSError, ValueError):
        listed = tree.read_file(f"{root}/proc/self/cgroup").decode("utf-8", "replace")
        for line in listed.splitlines():
            _, controllers, path = line.split(":", 2)
            parts = []
            for part in path.split("/"):
                if part and part != "..":
                    parts.append(part)
            mounts: tuple[tuple[str, int], ...] = ()
            if "memory" in controllers.split(","):
                mounts = (("/sys/fs/cgroup/memory", 1),)
            if not controllers:
                mounts = (("/sys/fs/cgroup", 2), ("/sys/fs/cgroup/unified", 2))
            for mount, version in mounts:
                for depth in range(len(parts), -1, -1):
                    yield "/".join((f"{root}{mount}", *parts[:depth])), version


def has_unified_memory(root: str = "") -> bool:
    """Return whether the GPU uses the host's memory, by the names of machine and GPU."""
    paths = [
        f"{root}/proc/device-tree/model",
        f"{root}/sys/class/dmi/id/product_name",
        f"{root}/proc/cpuinfo",
    ]
    folder = f"{root}/proc/driver/nvidia/gpus"
    with contextlib.suppress(OSError):
        paths += [f"{folder}/{name}/information" for name in os.listdir(folder)]
    for path in paths:
        file = _opened(path)
        text = (_read(file, 1024) or b"").lower()
        if file is not None:
            os.close(file)
        if any(name in text for name in _UNIFIED):
            return True
    return False


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None


def _read(file: int | None, size: int = 8192) -> bytes | None:
    try:
        return None if file is None else os.pread(file, size, 0)
    except OSError:
        return None


def _number(text: bytes, name: bytes) -> int | None:
    words = text.partition(name)[2].split(None, 1)
    if words and words[0].isdigit():
        return int(words[0])
    return None


def tree_pids(root: int) -> list[int]:
    """Return the processes below ``root``, without a look at every process of the machine."""
    found: list[int] = []
    todo = [root]
    while todo:
        pid = todo.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                below = tree.read_file(f"/proc/{pid}/task/{task}/children")
                todo += map(int, below.split())
        except FileNotFoundError:
            # Without CONFIG_PROC_CHILDREN, Linux has no file that lists children.
            if pid == root:
                return tree.descendants(root)
        except (OSError, ValueError):
            pass
        if pid != root:
            found.append(pid)
    return found


def resident_bytes(pid: int) -> int:
    """Return a process's bytes in host memory; 0 if it is gone."""
    try:
        return int(tree.read_file(f"/proc/{pid}/statm").split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _uses_device(pid: int) -> bool:
    """Return whether a process has opened a GPU, whose memory its resident bytes do not show."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{number}").startswith(_DEVICES):
                    return True
    return False


# Our own score before ``shield``.
_score: Final[list[bytes]] = []


def shield() -> None:
    """Keep this process's pages in memory, and let the kernel kill others first, if permitted."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mlockall(_MCL_CURRENT_ON_FAULT)
    with contextlib.suppress(OSError):
        if not _score:
            _score.append(tree.read_file(_SCORE.format(os.getpid())).strip())
        _set_score(os.getpid(), _SHIELD)


def unshield(pid: int | None) -> None:
    """Give a child of this process the score that this process had."""
    with contextlib.suppress(OSError):
        if pid is not None and _score:
            _set_score(pid, _score[0])


def _set_score(pid: int, score: bytes) -> None:
    file = os.open(_SCORE.format(pid), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, score)
    finally:
        os.close(file)


class HostWatch:
    """Watch the host's memory during one attempt, in a thread.

    Args:
        reaper: the process above the command.
        messages: reports that the command is stopped.
        reserve_bytes: the bytes that must stay available on the machine and below each limit. None:
            the default below limits and on machines with unified memory; 0: nothing is watched.
        memory: reads the figures; None for this machine.

    Attributes:
        record: why and how the command was stopped, for the analyst; None if it was not.
    """

    def __init__(
        self,
        reaper: Reaper,
        messages: Messages,
        reserve_bytes: int | None,
        memory: HostMemory | None = None,
    ) -> None:
        self._reaper = reaper
        self._messages = messages
        self._asked_bytes = reserve_bytes
        self._memory = memory
        self._is_over = False
        self._curve: deque[tuple[float, int]] = deque(maxlen=round(_CURVE_S / _CURVE_STEP_S))
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        self._reserves: dict[tuple[str, int], int] = {}
        self._begin_bytes: dict[tuple[str, int], int] = {}
        self._ignored_until_s: float | None = None
        self.record: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="oomguard-memory", daemon=True)

    def start(self) -> None:
        """Start watching, unless the user turned it off."""
        if self._asked_bytes != 0:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._is_over = True

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # noqa: BLE001 - an error here must not stop the run
            reason = f"{type(error).__name__}: {error}"
            self._messages.say("warning", "oomguard stopped watching host memory", reason=reason)

    def _watch(self) -> None:
        memory = self._memory or HostMemory()
        watches_node = memory.is_unified or self._asked_bytes is not None
        if not watches_node and not memory.is_limited:
            return
        # This thread has to run when memory is full, so its pages stay and the kernel kills others.
        shield()
        while not self._is_over:
            nearest = self._look(memory, watches_node=watches_node)
            if nearest is None:
                return
            time.sleep(self._act(memory, nearest))

    def _look(self, memory: HostMemory, *, watches_node: bool) -> Level | None:
        """Return the level that is nearest to its reserve, and record it."""
        levels = memory.limits(self._far_bytes())
        if watches_node and (node := memory.node()) is not None:
            levels.append(node)
        nearest = min(levels, key=self._distance_bytes, default=None)
        if nearest is not None:
            self._note(nearest)
        return nearest

    def _far_bytes(self) -> int:
        """Return the bytes below which the page cache is read."""
        return 4 * max(self._reserves.values(), default=_NO_LIMIT_BYTES)

    def _distance_bytes(self, level: Level) -> int:
        return level.available_bytes - self._reserve_bytes(level)

    def _reserve_bytes(self, level: Level) -> int:
        """Return the reserve of a level, which is at most half of what was left at the start."""
        key = (level.scope, level.total_bytes)
        if key not in self._reserves:
            asked = self._asked_bytes
            wanted = default_reserve(level.total_bytes) if asked is None else asked
            self._begin_bytes[key] = level.available_bytes
            self._reserves[key] = min(wanted, level.available_bytes // 2)
            if self._reserves[key] < wanted:
                self._messages.say(
                    "warning",
                    "Little host memory is left at the start, so the host reserve is smaller",
                    available=_gib(level.available_bytes),
                    reserve=_gib(self._reserves[key]),
                    wanted=_gib(wanted),
                )
        return self._reserves[key]

    def _note(self, level: Level) -> None:
        now_s = time.monotonic()
        self._recent.append((now_s, level.available_bytes))
        if not self._curve or now_s - self._curve[-1][0] >= _CURVE_STEP_S:
            self._curve.append((now_s, level.available_bytes))

    def _growth(self) -> float:
        """Return how fast the available memory shrinks, in bytes per second; at least 0."""
        now_s, now_bytes = self._recent[-1]
        for at_s, available in reversed(self._recent):
            if now_s - at_s >= _WINDOW_S:
                return max(0.0, (available - now_bytes) / (now_s - at_s))
        return 0.0

    def _act(self, memory: HostMemory, level: Level) -> float:
        """Stop the command if the reserve is about to be touched; return the seconds to wait."""
        growth = self._growth()
        distance = self._distance_bytes(level)
        if distance - growth * _REACTION_S < self._reserve_bytes(level):
            stalled = memory.stalled_ratio()
            if stalled > _STALLED_RATIO:
                distance -= self._reserve_bytes(level)
        is_ignored = time.monotonic() < (self._ignored_until_s or 0.0)
        if distance - growth * _REACTION_S <= 0 and not is_ignored:
            self._end(memory, level, growth)
        spare = distance + self._reserve_bytes(level) * _USED_PART
        wait_s = min(_IDLE_S, max(_NEAR_S, spare / _FASTEST_BYTES))
        if growth > 0:
            wait_s = min(wait_s, max(_GROWING_S, distance / growth / 4))
        return wait_s

    def _end(self, memory: HostMemory, level: Level, growth: float) -> None:
        """Stop the command, and kill the processes that do not stop in time."""
        reserve = self._reserve_bytes(level)
        sizes = self._sizes()
        if not self._is_to_blame(sizes, reserve):
            if self._ignored_until_s is None:
                self._messages.say(
                    "warning",
                    "Host memory is almost used up, but not by the command, which continues",
                    available=_gib(level.available_bytes),
                    command=_gib(sum(sizes.values())),
                )
            self._ignored_until_s = time.monotonic() + _IDLE_S
            return
        holder = max(sizes, key=lambda pid: sizes[pid], default=None)
        # The figures are taken before the stop, because it changes them.
        record = self._describe(memory, level, growth, sizes, holder)
        # Set before the signal, so that even a quick end of the command finds its reason.
        self.record = record
        self._reaper.forward(int(signal.SIGTERM), None, None)
        self._messages.say(
            "warning",
            "Stopping the command before host memory runs out",
            available=_gib(level.available_bytes),
            reserve=_gib(reserve),
            growth_per_s=_gib(growth),
        )
        began_s = time.monotonic()
        first_kill_s = None
        next_kill_s = 0.0
        while not self._is_over:
            time.sleep(_GROWING_S)
            now = level
            for one in self._levels(memory):
                if one.scope == level.scope:
                    now = one
                    break
            now_s = time.monotonic()
            is_used = now.available_bytes < reserve * _USED_PART
            if first_kill_s is not None and now_s - first_kill_s > _ALL_KILLED_S:
                self._reaper.kill()
                return
            if (is_used or now_s - began_s > _GRACE_S) and now_s >= next_kill_s:
                self._kill_largest(record)
                first_kill_s = first_kill_s or now_s
                next_kill_s = now_s + _NEXT_KILL_S

    def _levels(self, memory: HostMemory) -> list[Level]:
        node = memory.node()
        return memory.limits() + ([] if node is None else [node])

    def _kill_largest(self, record: dict[str, Any]) -> None:
        sizes = self._sizes()
        if sizes:
            pid = max(sizes, key=lambda one: sizes[one])
            record["killed"].append([pid, tree.name_of(pid), sizes[pid]])
            tree.send(pid, signal.SIGKILL)

    def _sizes(self) -> dict[int, int]:
        return {pid: resident_bytes(pid) for pid in tree_pids(self._reaper.pid)}

    def _is_to_blame(self, sizes: dict[int, int], reserve_bytes: int) -> bool:
        """Return whether the command has memory whose release would help."""
        return sum(sizes.values()) >= reserve_bytes * _SMALL_TREE_PART or any(
            map(_uses_device, sizes)
        )

    def _describe(
        self,
        memory: HostMemory,
        level: Level,
        growth: float,
        sizes: dict[int, int],
        holder: int | None,
    ) -> dict[str, Any]:
        node = memory.node()
        key = (level.scope, level.total_bytes)
        now_s = time.monotonic()
        curve = [[round(at_s - now_s, 2), available] for at_s, available in self._curve]
        return {
            "scope": level.scope,
            "total_bytes": level.total_bytes,
            "available_bytes": level.available_bytes,
            "reserve_bytes": self._reserves[key],
            "begin_bytes": self._begin_bytes[key],
            "machine_bytes": 0 if node is None else node.total_bytes,
            "is_unified": memory.is_unified,
            "growth_bytes": int(growth),
            "tree_bytes": sum(sizes.values()),
            "holder": "" if holder is None else tree.name_of(holder),
            "holder_pid": holder,
            "holder_bytes": 0 if holder is None else sizes[holder],
            "killed": [],
            "curve": [*curve, [0.0, level.available_bytes]],
        }


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f}GiB"
