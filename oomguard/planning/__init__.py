"""Plan a start or a call before it runs, for ``oomguard plan`` and ``oomguard.plan``."""
