"""Run a command: streams, signals, process tree, exit status. Imports no diagnosis code."""
