"""The guard: watched calls inside the process, remedied one by one."""
