"""Files of configurations: what somebody wrote, as entries with the lines that they stand on (`entries`, read by `formats`), the
text of new ones (`text`), and what would change in a file (`changes`). Knows no software. Whatever is wrong with a file is a
`ConfigError` of one line that names file and line.
"""
