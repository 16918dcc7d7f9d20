"""Support Ray: work on its cluster, guard its tasks and actors, and unwrap its errors."""
