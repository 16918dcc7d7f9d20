"""Reading what is left of the host's memory, and when the reserve counts as touched."""

from __future__ import annotations

import time
from pathlib import Path

from oomguard.supervisor.host_memory import (
    GIB,
    MIB,
    HostMemory,
    HostWatch,
    Level,
    default_reserve,
    has_unified_memory,
)
from oomguard.supervisor.messages import Messages

MEMINFO = "MemTotal:       33554432 kB\nMemFree:  1000 kB\nMemAvailable:   16777216 kB\n"
FULL = "some avg10=61.00 avg60=1.00 avg300=0.00 total=1\nfull avg10=40.50 avg60=1.00 avg300=0.00 total=1\n"


def machine(root: Path, files: dict[str, str]) -> HostMemory:
    """A machine whose files are below a folder."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return HostMemory(str(root))


class Tree:
    """The processes of a run, of which the watch only asks the one above them."""

    pid = 0


def watch(memory: HostMemory, reserve_bytes: int | None = None) -> HostWatch:
    return HostWatch(Tree(), Messages(quiet=True), reserve_bytes, memory)  # type: ignore[arg-type]


def test_the_default_reserve_is_smaller_below_a_small_limit():
    sizes = [default_reserve(size * GIB) for size in (128, 50, 16, 8, 1)]
    assert sizes == [int(128 * GIB * 0.04), 2 * GIB, 2 * GIB, GIB, GIB // 8]


def test_a_limit_of_version_2_counts_the_page_cache_as_free(tmp_path):
    group = "sys/fs/cgroup/pod/box"
    memory = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            f"{group}/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{7 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {2 * GIB}\n",
            "sys/fs/cgroup/pod/memory.pressure": FULL,
        },
    )
    assert memory.is_limited
    assert memory.limits() == [Level("limit", 8 * GIB, 4 * GIB)]
    assert memory.limits(far_bytes=GIB // 2) == [Level("limit", 8 * GIB, GIB)]
    assert memory.stalled_ratio() == 0.405


def test_a_limit_of_version_1_and_no_pressure_file(tmp_path):
    memory = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"cache 1\nactive_file 9\ntotal_inactive_file {MIB}\ntotal_active_file 0\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert memory.limits() == [Level("limit", 4 * GIB, GIB + MIB)]
    assert memory.stalled_ratio() == 0


def test_a_container_that_sees_the_path_of_its_host(tmp_path):
    memory = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
    )
    assert memory.limits() == [Level("limit", 2 * GIB, GIB)]


def test_a_machine_without_limit_and_with_garbage_is_not_limited(tmp_path):
    memory = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a\nnonsense\n",
            "sys/fs/cgroup/a/memory.max": "lots\n",
            "proc/pressure/memory": "full avg10=?\n",
        },
    )
    assert (memory.is_limited, memory.limits(), memory.stalled_ratio()) == (False, [], 0.0)
    assert memory.node() == Level("node", 32 * GIB, 16 * GIB)


def test_the_names_of_machines_with_unified_memory(tmp_path):
    names = {
        "proc/driver/nvidia/gpus/0000/information": ("Model: NVIDIA GB10\n", True),
        "proc/device-tree/model": ("NVIDIA Jetson AGX Orin\0", True),
        "sys/class/dmi/id/product_name": ("PowerEdge R760\n", False),
        "proc/cpuinfo": ("model name : AMD RYZEN AI MAX+ 395 w/ Radeon 8060S\n", True),
    }
    for number, (name, (text, is_unified)) in enumerate(names.items()):
        root = tmp_path / str(number)
        machine(root, {name: text})
        assert has_unified_memory(str(root)) is is_unified, name


def test_looks_are_rare_far_from_the_reserve_and_often_near_it(tmp_path):
    memory = machine(tmp_path, {})
    far = watch(memory, 2 * GIB)
    level = far._look(memory, watches_node=True)
    assert far._act(memory, level) == 1.0
    near = watch(memory, GIB // 2)
    near._look(memory, watches_node=True)
    waits_s = []
    for left_mib in (612, 580):
        left = Level("node", 32 * GIB, left_mib * MIB)
        near._note(left)
        time.sleep(0.05)
        waits_s.append(near._act(memory, left))
    assert 0.005 <= waits_s[1] < waits_s[0] <= 0.15


def test_a_reserve_of_more_than_half_of_what_is_left_is_smaller(tmp_path):
    memory = machine(tmp_path, {})
    crowded = watch(memory, 12 * GIB)
    level = crowded._look(memory, watches_node=True)
    assert crowded._reserve_bytes(level) == 8 * GIB
