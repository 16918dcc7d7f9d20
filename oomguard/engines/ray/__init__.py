"""Ray: its cluster as a place to work, its tasks and actors under the guard, its errors
unwrapped.
"""
