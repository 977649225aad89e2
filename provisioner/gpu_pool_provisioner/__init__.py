"""What Jupyter calls: a lease when a kernel starts, its return when it ends."""
