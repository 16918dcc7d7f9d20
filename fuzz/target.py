"""Coverage-guided fuzzing with atheris of the scanner, the rule loader and the JSON output.

    make fuzz-atheris                # or, with atheris installed:
    python fuzz/target.py -runs=1000000 -max_len=160 FOLDER    # FOLDER keeps what raised the coverage

The first byte chooses: three of four inputs are logs, the others rule files. A failed check is written to crash-… in the
working folder; `python fuzz/target.py crash-…` runs it again.
"""

import atexit
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))

with atheris.instrument_imports(include=["oomguard"]):
    pass

from fuzz_checks import check_log, check_rule_file
from fuzz_inputs import log_text, rule_file

_folder = tempfile.TemporaryDirectory()
atexit.register(_folder.cleanup)


def one_input(data: bytes) -> None:
    """Run one input; an exception is a finding."""
    if data[:1] >= b"\xc0":
        check_rule_file(Path(_folder.name), rule_file(data[1:]))
    else:
        check_log(log_text(data[1:]))


def main() -> None:
    """Hand the command line to libFuzzer; it ends the process itself."""
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
