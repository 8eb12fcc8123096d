"""The software that is known, a file each: what it can be set to, what it forbids and where its code says so, and how its files
are read and written. A new one is such a file, a line in `known.registry`, and its tests.
"""
