"""One failure, many processes: the ranks of one job find each other, name one first cause, and start again with one plan, or none."""
