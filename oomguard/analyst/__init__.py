"""The second process of ``oomguard run``: recorded output in, diagnosis and the next command out."""
