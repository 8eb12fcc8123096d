"""Examples of operations, in files by kind."""
