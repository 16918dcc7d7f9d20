"""Read a model: from its configuration and files to shapes and bytes."""
