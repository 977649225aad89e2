"""What these tests share with those of the kernel proxy."""

from support.fixtures import classroom, manager

__all__ = ["classroom", "manager"]
