"""Jobs of hours: a function over many items, in batches that fit, each result stored as it is
finished, each item computed once.
"""
