"""What the benchmarks share: workloads, programs that the vLLM environment runs, and how a figure
is printed and kept.
"""
