"""Choose the devices of a command before its first attempt: devices, leases, queues."""
