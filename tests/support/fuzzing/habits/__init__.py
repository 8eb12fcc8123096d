"""Random scripts of habits: `statements` is the grammar, `script` draws and runs one, `trial` compares ranks with one process."""
