"""The revisions; each has the number of the schema that it makes."""
