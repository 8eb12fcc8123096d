"""Models of public packages, unmodified, installed from the package index: `requirements.txt` says which, `catalog` lists them.

They are not needed for anything else: `pip install --no-deps --target FOLDER -r requirements.txt`, and FOLDER behind the tree on
``PYTHONPATH``. Start with `catalog`.
"""
