"""Optional parts for many devices, processes and machines: placement, ranks, serving, schedulers,
fleet logs.
"""
