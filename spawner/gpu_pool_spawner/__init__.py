"""What JupyterHub calls: course profiles for its spawners.

The room is laid out and holds nothing yet. It may import ``gpu_pool_client``
and, of the pool, only courses and dialects.
"""
