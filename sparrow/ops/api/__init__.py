"""The ops: contracts, argument checks, dispatch. Tensors in, tensors out.

Each op here has a definition of the same name in `sparrow.ops.reference`.
"""
