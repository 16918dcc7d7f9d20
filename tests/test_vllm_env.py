"""scripts/vllm-env: the `vllm` command that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "vllm-env"


def test_vllm_command_runs_its_own_python_in_any_folder(tmp_path):
    binaries = tmp_path / 'it\'s a "new" $HOME' / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    (binaries / "python").chmod(0o755)
    command = binaries / "vllm"
    command.write_text(SCRIPT.read_text().split("<<'EOF'\n")[1].split("\nEOF\n")[0])
    command.chmod(0o755)
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(
        "import sys\ndef main():\n    print(sys.argv[1:], sys.flags.no_site)\n    return 7\n"
    )

    ran = subprocess.run(
        ["vllm", "serve", "a b"],
        env={"PATH": f"{binaries}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "['serve', 'a b'] 1\n", "")
