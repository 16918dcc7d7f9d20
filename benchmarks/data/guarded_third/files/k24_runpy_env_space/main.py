import pathlib
import runpy
import sys

import oomguard


def main():
    here = pathlib.Path(__file__).parent
    sys.argv = ["service.py", "will it rain", "who wins"]
    with oomguard.guard(allow="reduces-capacity", pin=["max_num_batched_tokens"]) as g:
        namespace = runpy.run_path(str(here / "service.py"), run_name="service")
    print("changed", [patch.setting for attempt in g.attempts for patch in attempt.patches])
    for name, value in namespace["values"].items():
        print("VALUE", name, value)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
