"""Run a command: streams, signals, process tree, exit status. Imports nothing that explains a
failure.
"""
