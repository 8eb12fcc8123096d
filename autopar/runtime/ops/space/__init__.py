"""Operations on images that are sharded along one dimension of space: each rank exchanges the rows at the edges of its shard with
its neighbours (halo exchange), or sums statistics over the axis.

`convolution` exchanges rows, `norms` sums. Imports torch and the rest of the runtime only.
"""
