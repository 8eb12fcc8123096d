"""Operations on images ``[n, c, ...]``: convolutions, pooling and sampling; `space` says how an image is cut over ranks.

Start with `convolutions`. Imports `operations.notation` and the record.
"""
