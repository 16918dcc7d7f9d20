"""Load a folder of rules and diagnose standard input with them, in a process that can be ended: seconds and outcome as JSON.

A pattern that hangs inside the regular expression library cannot be interrupted from Python; its process can be killed.
"""

import io
import json
import resource
import sys
import time
from pathlib import Path

from oomguard.core.errors import RuleError
from oomguard.diagnosis import diagnose_lines
from oomguard.rules.rule_files import load_rules
from oomguard.scan.source import read_lines

MEMORY_LIMIT = 3 << 30  # of address space: a runaway fails here and not on the machine


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    load_rules()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = {"refused": None, "scan_s": 0.0, "notes": [], "kinds": []}
    began = time.process_time()
    try:
        rules = load_rules([Path(sys.argv[1])])
    except RuleError as error:
        answer["refused"] = {
            "path": error.path,
            "key": error.key,
            "line": error.line,
            "column": error.column,
            "text": str(error),
        }
    answer["load_s"] = time.process_time() - began
    if answer["refused"] is None:
        began = time.process_time()
        diagnosis = diagnose_lines(
            read_lines(io.BytesIO(sys.stdin.read().encode("utf-8", "surrogatepass"))), rules=rules
        )
        answer["scan_s"] = time.process_time() - began
        answer["notes"] = list(diagnosis.notes)
        answer["kinds"] = [incident.kind for incident in diagnosis.incidents]
    answer["grown_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
