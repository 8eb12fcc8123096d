"""The proof of one block: its statements (`block.py`, start there) and each line's operation beside the captured one."""
