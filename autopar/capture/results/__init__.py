"""What a captured call returns: its loss, and the fields beside it."""
