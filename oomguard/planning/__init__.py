"""Plan a start or a call before it runs: the code behind ``oomguard plan`` and
``oomguard.plan``.
"""
