"""What `import oomguard` costs beside `python -c pass`: both run in turn, the smallest of each is compared."""

import subprocess
import sys
import time

ROUNDS = 20


def seconds(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def main() -> None:
    pairs = [(seconds("pass"), seconds("import oomguard")) for _ in range(ROUNDS)]
    nothing, ours = min(a for a, _ in pairs), min(b for _, b in pairs)
    print(
        f"python -c pass {1000 * nothing:.1f} ms, import oomguard {1000 * ours:.1f} ms: {1000 * (ours - nothing):.1f} ms more (goal < 60)"
    )


if __name__ == "__main__":
    main()
