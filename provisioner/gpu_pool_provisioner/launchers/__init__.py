"""How a kernel is launched: as a process of this machine, or in a pod. Both are a ``KernelRun``."""
