"""Takes apart what export keeps whole, so that rules need not know it.

Start with `program.decomposed`. `nodes` takes a graph apart where it stands, `writes` what it changes in
place; what they cannot is traced again by torch.
"""
