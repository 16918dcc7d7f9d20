"""Apply a function to many items in batches that fit, and store each result as it is finished."""
