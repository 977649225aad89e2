"""The backend of a Slurm cluster: each kernel is a job, and Slurm decides whose turn it is."""
