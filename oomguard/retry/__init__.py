"""Keep the ledger of attempts, and wait for memory; guard, loop and run share this."""
