"""Many logs: where they lie, who wrote them, and what failed over all of them."""
