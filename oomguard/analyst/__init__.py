"""The second process of ``oomguard run``: read the recorded output, diagnose it, decide what to
change.
"""
