"""What a generated program runs on. Imports torch and the standard library only, so that `export` can copy the folder."""
