"""Keep the ledger of attempts and wait for memory to come back: shared by loop, guard and run."""
