"""vLLM started by this process: what its processes say, what a failed start leaves, and the same
start with other arguments.
"""
