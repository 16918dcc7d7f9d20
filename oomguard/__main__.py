"""``python -m oomguard`` is the same program as ``oomguard``."""

from oomguard.cli import main

main()
