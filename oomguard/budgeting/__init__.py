"""Where a GPU's bytes will go, before anything is started: what ``oomguard plan`` and ``oomguard.plan`` ask."""
