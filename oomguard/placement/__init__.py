"""Which device a command gets, before its first attempt: what is there, what is leased, where its plan fits."""
