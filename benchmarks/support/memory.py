"""What a process and all that it started take."""

from pathlib import Path


def tree(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:
                continue
    return found


def anonymous_bytes(pid: int, *, whole_tree: bool = True) -> int:
    """Anonymous memory of a process, and of all that it started unless ``whole_tree`` is false."""
    total = 0
    for process in tree(pid) if whole_tree else [pid]:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) * 1024
            for line in status.splitlines()
            if line.startswith("RssAnon:")
        )
    return total
