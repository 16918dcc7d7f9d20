"""Support clusters: device placement, ranks, servers, schedulers, and summaries of many logs."""
