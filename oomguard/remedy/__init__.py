"""What to change: the registry of settings, the user's policy, the solvers of values, and the
planner.
"""
