"""Group failures over many logs: who wrote each log and what failed most."""
